"""The HTML page of a report: one file with everything in it, for a browser without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noisewise import __version__
from noisewise.federation.results import RunResult
from noisewise.report.chart import Chart, Table, css_colours, inline_svg
from noisewise.report.citation import PAPER, PAPER_BIBTEX, software_bibtex
from noisewise.report.disclosures import disclosure
from noisewise.report.explain import explain
from noisewise.report.html import template_environment
from noisewise.report.server_view import NOT_CHECKED, server_views
from noisewise.report.sources import RunSet
from noisewise.report.tables import by_method, method_rows

__all__ = [
    "STATUS_WORDS",
    "Section",
    "disclosure_table",
    "final_table",
    "render_page",
    "run_table",
]

STATUS_WORDS = {
    "finished": "finished",
    "diverged": "diverged: the model became NaN or infinite",
    "budgets_spent": "ended early: all budgets were spent",
    "no_updates": "no updates: no round changed the model, so there is no trained model",
    "unfinished": "unfinished: run the same command again to resume",
}
"""How a run ended."""


@dataclass(frozen=True)
class Section:
    """One set of runs with its charts."""

    runs: RunSet
    charts: tuple[Chart, ...]


def final_table(results: Sequence[RunResult]) -> Table:
    """Mean, standard error and every seed of each method."""
    rows = []
    for row in method_rows(results):
        scores = ", ".join(
            f"{seed}: {100 * score:.1f}" if score == score else f"{seed}: none"
            for seed, score in zip(row.seed_numbers, row.scores, strict=True)
        )
        rows.append((*row.cells()[:5], str(row.seeds), scores))
    headings = (
        "method",
        "accuracy ± standard error",
        "noise / oracle's",
        "signal / best",
        "largest epsilon spent",
        "seeds",
        "under each seed [%]",
    )
    return Table(headings, tuple(rows))


def disclosure_table(results: Sequence[RunResult]) -> Table:
    """Who was told what: the disclosures that each method's server needs."""
    rows = []
    for method, runs in by_method(results).items():
        words = [disclosure(need) for need in runs[0].needs]
        needs = [word.entered if runs[0].deployed else word.reported for word in words]
        if any(record.noised_accuracy for run in runs for record in run.rounds):
            needs.append("a noised accuracy of the sites that chose to tell one")
        if any(run.declarations for run in runs):
            needs.append("the unit and budget of the sites that chose to declare them")
        told = "; ".join(needs) or "nothing beyond the updates"
        privacy = "each client's own budget"
        if runs[0].deployed:
            privacy = NOT_CHECKED
        elif runs[0].guarantee is None:
            privacy = "none: updates carry no noise"
        elif any(c["planned_epsilon"] != c["epsilon"] for c in runs[0].clients.values()):
            privacy = "one epsilon for all, the smallest"
        rows.append((method, told, privacy))
    return Table(("method", "the server is told", "privacy of the updates"), tuple(rows))


def run_table(results: Sequence[RunResult]) -> Table:
    """Every run: how far it came and how it ended."""
    rows = tuple(
        (
            run.method,
            str(run.seed),
            STATUS_WORDS[run.status],
            _rounds(run),
            f"{run.settings.get('learning_rate', float('nan')):g}",
        )
        for run in results
    )
    return Table(("method", "seed", "status", "rounds", "learning rate"), rows)


def _rounds(run: RunResult) -> str:
    """How many rounds were played, and how many of them did not change the model."""
    played = f"{len(run.rounds)} of {run.settings.get('rounds', '?')}"
    unchanged = len(run.rounds) - run.rounds_changed
    return f"{played}; {unchanged} left the model as it was" if unchanged else played


def _timing_tables(timings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Table]]:
    tables = []
    for name, timing in timings.items():
        rows = tuple(
            (
                part["part"],
                f"{part['seconds']:.3f}",
                f"{part['seconds_per_round']:.4f}",
                f"{100 * part['share']:.1f}",
            )
            for part in timing["parts"]
        )
        words = f"{name}: {timing['rounds']} rounds in {timing['seconds']:.1f} s"
        tables.append((words, Table(("part", "seconds", "seconds a round", "share [%]"), rows)))
    return tables


def _fallback_config(results: Sequence[RunResult]) -> str:
    """The settings that a result itself knows, where there is no config file."""
    return "\n".join(f"{key} = {value!r}" for key, value in sorted(results[0].settings.items()))


def _content(section: Section, prefix: str) -> dict[str, Any]:
    results = section.runs.results
    troubled = [r for r in results if r.status in ("unfinished", "diverged", "no_updates")]
    return {
        "id": prefix,
        "name": section.runs.name,
        "final": final_table(results),
        "explanation": explain(results).split("\n\n"),
        "charts": [(chart, inline_svg(chart, prefix)) for chart in section.charts],
        "disclosures": disclosure_table(results),
        "views": server_views(results),
        "runs": run_table(results),
        "warning": _warning(troubled, len(results)),
        "timings": _timing_tables(section.runs.timings),
        "config": section.runs.config or _fallback_config(results),
    }


def _warning(troubled: Sequence[RunResult], total: int) -> str:
    parts = []
    for status, words in (
        ("unfinished", "not finished: their figures are those of the rounds so far"),
        ("diverged", "diverged: their figures are those of the last evaluation before"),
        ("no_updates", "without any update: no round changed the model, so there is none to use"),
    ):
        runs = [r for r in troubled if r.status == status]
        if runs:
            names = ", ".join(f"{r.method} seed {r.seed}" for r in runs)
            parts.append(f"{len(runs)} of {total} runs {words} ({names}).")
    return " ".join(parts)


def render_page(
    title: str,
    sections: Sequence[Section],
    overview: tuple[Chart, Table] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        title: its heading.
        sections: one for each set of runs.
        overview: for several sets, the chart and table over all of them.
        notes: lines about runs that are not in it.
    """
    contents = [_content(section, f"s{n}-") for n, section in enumerate(sections, start=1)]
    runs = [run for section in sections for run in section.runs.results]
    return (
        template_environment()
        .get_template("page.html")
        .render(
            title=title,
            sections=contents,
            overview=overview,
            overview_svg=inline_svg(overview[0]) if overview else "",
            notes=notes,
            n_runs=len(runs),
            n_deployed=sum(run.deployed for run in runs),
            n_clients=sorted({len(run.clients) for run in runs}),
            light=css_colours(dark=False),
            dark=css_colours(dark=True),
            paper=PAPER,
            bibtex=f"{PAPER_BIBTEX}\n\n{software_bibtex()}",
            version=__version__,
        )
    )
