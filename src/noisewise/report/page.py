"""The HTML page of a report: a single file that loads nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noisewise import __version__
from noisewise.federation.results import RunResult
from noisewise.report.chart import Chart, Table, marker_symbol, method_styles
from noisewise.report.citation import PAPER, PAPER_BIBTEX, software_bibtex
from noisewise.report.disclosures import disclosure
from noisewise.report.explain import explain
from noisewise.report.html import template_environment
from noisewise.report.inline_svg import css_colours, css_variable, inline_svg
from noisewise.report.joining_report import does_joining_pay
from noisewise.report.page_summary import page_summary, sweep_verdict, verdict
from noisewise.report.paired import GROUPS, best_methods, method_groups
from noisewise.report.run_sets import RunSet
from noisewise.report.server_view import NOT_CHECKED, server_views
from noisewise.report.tables import by_method, headings, method_rows

__all__ = [
    "STATUS_TEXT",
    "Section",
    "disclosure_table",
    "final_table",
    "render_page",
    "run_table",
]

STATUS_TEXT = {
    "finished": "finished",
    "diverged": "diverged: the model became NaN or infinite",
    "budgets_spent": "ended early: all budgets are spent",
    "no_updates": "no updates: no round changed the model, so there is no trained model",
    "unfinished": "unfinished: run the same command again to resume",
}
"""Text for each status of a run."""


_JOINING = "joining"  # the chart with a section of its own


@dataclass(frozen=True)
class Section:
    """One set of runs with its charts."""

    runs: RunSet
    charts: tuple[Chart, ...]


def final_table(results: Sequence[RunResult]) -> Table:
    """Return the metrics with the main one of every seed, and its error, for each method."""
    rows, ranked = [], method_rows(results)
    for row in ranked:
        scores = ", ".join(
            f"{seed}: {row.metric.number(score)}" if score == score else f"{seed}: not measured"
            for seed, score in zip(row.seed_numbers, row.scores, strict=True)
        )
        rows.append((*row.cells()[:-1], str(row.seeds), scores))
    metric = results[0].metric
    unit = f" [{metric.unit}]" if metric.unit else ""
    names = [*headings(ranked)[:-2], "largest epsilon spent", "seeds"]
    return Table((*names, f"{metric.name} for each seed{unit}"), tuple(rows))


def disclosure_table(results: Sequence[RunResult]) -> Table:
    """Return what is disclosed to the server under each method, and the privacy of the updates."""
    rows = []
    for method, runs in by_method(results).items():
        texts = [disclosure(need) for need in runs[0].needs]
        needs = [text.entered if runs[0].deployed else text.reported for text in texts]
        if any(record.noised_accuracy for run in runs for record in run.rounds):
            needs.append("a noised score, from the sites that chose to send one")
        if any(run.declarations for run in runs):
            needs.append("unit and budget, from the sites that chose to declare them")
        disclosed = "; ".join(needs) or "nothing except the updates"
        if not runs[0].shares_model:
            disclosed = "nothing: no update leaves a client"
        privacy = f"each client's own budget, for one {runs[0].unit}"
        if runs[0].deployed:
            privacy = NOT_CHECKED
        elif runs[0].guarantee is None:
            privacy = "none: updates have no noise"
        elif any(c["planned_epsilon"] != c["epsilon"] for c in runs[0].clients.values()):
            privacy = f"one epsilon for all clients: the smallest, for one {runs[0].unit}"
        rows.append((method, disclosed, privacy))
    return Table(("method", "disclosed to the server", "privacy of the updates"), tuple(rows))


def run_table(results: Sequence[RunResult]) -> Table:
    """Return the status and the number of rounds of every run."""
    rows = tuple(
        (
            run.method,
            str(run.seed),
            STATUS_TEXT[run.status],
            _rounds(run),
            run.settings.get("server_rate") or f"{run.settings.get('learning_rate', math.nan):g}",
        )
        for run in results
    )
    return Table(("method", "seed", "status", "rounds", "learning rate"), rows)


def _rounds(run: RunResult) -> str:
    """Return how many rounds were run, and how many of them did not change the model."""
    done = f"{len(run.rounds)} of {run.settings.get('rounds', '?')}"
    unchanged = len(run.rounds) - run.rounds_changed
    return f"{done}; {unchanged} did not change the model" if unchanged else done


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
        title = f"{name}: {timing['rounds']} rounds in {timing['seconds']:.1f} s"
        tables.append((title, Table(("part", "seconds", "seconds per round", "share [%]"), rows)))
    return tables


def _fallback_config(results: Sequence[RunResult]) -> str:
    """Return the settings that a result contains, for a run without a config file."""
    return "\n".join(f"{key} = {value!r}" for key, value in sorted(results[0].settings.items()))


def _content(section: Section, prefix: str) -> dict[str, Any]:
    results = section.runs.results
    failed = [r for r in results if r.status in ("unfinished", "diverged", "no_updates")]
    return {
        "id": prefix,
        "groups": _groups(results),
        "best": best_methods(results) if len(by_method(results)) > 1 else (),
        "verdict": verdict(results),
        "name": section.runs.name,
        "final": final_table(results),
        "explanation": explain(results).split("\n\n"),
        "charts": [(c, inline_svg(c, prefix)) for c in section.charts if c.name != _JOINING],
        "joining": does_joining_pay(results),
        "joining_charts": [
            (c, inline_svg(c, prefix)) for c in section.charts if c.name == _JOINING
        ],
        "disclosures": disclosure_table(results),
        "views": server_views(results),
        "runs": run_table(results),
        "warning": _warning(failed, len(results)),
        "timings": _timing_tables(section.runs.timings),
        "config": section.runs.config or _fallback_config(results),
    }


def _groups(results: Sequence[RunResult]) -> list[tuple[str, Table]]:
    """Return the rows of the final table by group of methods: pairs (heading, table)."""
    table = final_table(results)
    rows = {row[0]: row for row in table.rows}
    return [
        (GROUPS[name], Table(table.headings, tuple(rows[method] for method in methods)))
        for name, methods in method_groups(results).items()
    ]


def _marks(runs: Sequence[RunResult]) -> dict[str, tuple[int, str, str]]:
    """Return (number, symbol, CSS colour) of each method, as in the charts."""
    styles = method_styles(list(by_method(runs)))
    return {
        method: (style.number, marker_symbol(style.marker), css_variable(style.text))
        for method, style in styles.items()
    }


def _warning(failed: Sequence[RunResult], total: int) -> str:
    parts = []
    for status, text in (
        ("unfinished", "not finished: the numbers are from the rounds completed so far"),
        ("diverged", "diverged: the numbers are from the last evaluation before that"),
        (
            "no_updates",
            "without any update: no round changed the model, so there is no trained model",
        ),
    ):
        runs = [r for r in failed if r.status == status]
        if runs:
            names = ", ".join(f"{r.method} seed {r.seed}" for r in runs)
            parts.append(f"{len(runs)} of {total} runs {text} ({names}).")
    return " ".join(parts)


def render_page(
    title: str,
    sections: Sequence[Section],
    overview: tuple[Chart, Table] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the page as HTML text.

    Args:
        title: heading of the page.
        sections: one section for each set of runs.
        overview: for several sets, the chart and table of all of them.
        notes: lines about runs that are not on the page.
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
            facts=page_summary([section.runs for section in sections]).facts,
            verdict=contents[0]["verdict"]
            if len(contents) == 1
            else sweep_verdict([section.runs for section in sections]),
            overview_best={part["name"]: part["best"] for part in contents},
            marks=_marks(runs),
            n_runs=len(runs),
            n_deployed=sum(run.deployed for run in runs),
            light=css_colours(dark=False),
            dark=css_colours(dark=True),
            paper=PAPER,
            bibtex=f"{PAPER_BIBTEX}\n\n{software_bibtex()}",
            version=__version__,
        )
    )
