"""`write_comparison` and `write_report`: everything that runs leave for people, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult, to_json
from noisewise.report.cells import markdown_table, markdown_text, printable_run
from noisewise.report.chart import Chart, save_figure, settle
from noisewise.report.client_figures import budget_chart, estimate_chart, fairness_chart
from noisewise.report.deployment import noised_accuracy_chart, site_weights_chart
from noisewise.report.explain import explain
from noisewise.report.figures import accuracy_chart, noise_chart, weights_chart
from noisewise.report.page import Section, render_page
from noisewise.report.server_view import server_views
from noisewise.report.sources import RunSet, read_timings
from noisewise.report.sweep import overview_chart, overview_csv, overview_table
from noisewise.report.tables import as_csv, as_markdown, method_rows
from noisewise.storage import write_atomic
from noisewise.text import printable

__all__ = ["charts_of", "write_comparison", "write_report"]

_MAKERS = (
    accuracy_chart, noise_chart, weights_chart, estimate_chart, budget_chart, fairness_chart,
    noised_accuracy_chart, site_weights_chart,
)  # fmt: skip


def charts_of(results: Sequence[RunResult]) -> tuple[Chart, ...]:
    """Every chart that the runs have data for."""
    charts = [chart for make in _MAKERS if (chart := make(results)) is not None]
    for chart in charts:
        settle(chart.figure)
    return tuple(charts)


def write_comparison(results: Sequence[RunResult], folder: Path | str) -> tuple[Path, ...]:
    """Write the page, tables (Markdown, CSV, JSON) and figures (PNG, SVG, PDF) of runs.

    Args:
        results: runs of one or more methods over one or more seeds.
        folder: where to; a ``config.toml`` and the timing of runs that lie there are shown too.

    Returns:
        The files.

    Raises:
        InvalidValueError: if there are no runs.
    """
    folder = Path(folder)
    config = folder / "config.toml"
    homes = [folder, *sorted((folder / "runs").glob("*"))]
    runs = RunSet(
        tuple(results),
        config=config.read_text(errors="replace") if config.is_file() else "",
        timings=read_timings({path.name: path for path in homes if path.is_dir()}),
    )
    return write_report([runs], folder)


def write_report(
    sets: Sequence[RunSet],
    folder: Path,
    *,
    title: str = "Comparison",
    notes: Sequence[str] = (),
    draw_parts: bool = True,
) -> tuple[Path, ...]:
    """Write one page over one or several sets of runs, with tables and figures.

    Args:
        sets: each a comparison of its own.
        folder: where to.
        title: of the page.
        notes: lines about runs that are not in it.
        draw_parts: whether figures of each of several sets become files too.

    Returns:
        The files; ``report.html`` is the first.

    Raises:
        InvalidValueError: if there are no sets, or one of them has no runs.
    """
    if not sets or not all(one.results for one in sets):
        raise InvalidValueError("results", [], "must be one or more runs")
    sets = [
        replace(
            one,
            name=printable(one.name),
            folder=printable(one.folder),
            results=tuple(map(printable_run, one.results)),
        )
        for one in sets
    ]
    sections = [Section(one, charts_of(one.results)) for one in sets]
    single = len(sets) == 1
    written: list[Path] = []
    for section in sections if single or draw_parts else ():
        place = folder / "figures" if single else folder / "figures" / section.runs.slug
        for chart in section.charts:
            written += save_figure(chart.figure, place, chart.name)
    texts: dict[str, str] = {}
    overview = None
    if single:
        texts |= _tables(sets[0].results, sections[0].charts)
    else:
        overview = (overview_chart(sets), overview_table(sets))
        written += save_figure(overview[0].figure, folder / "figures", overview[0].name)
        texts["sweep.csv"] = overview_csv(sets)
    texts["report.html"] = render_page(title, sections, overview, notes)
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    files = [folder / name for name in texts]
    return (files[-1], *written, *files[:-1])


def _tables(results: Sequence[RunResult], charts: Sequence[Chart]) -> dict[str, str]:
    """The texts beside the page of one comparison."""
    rows = method_rows(results)
    words = "\n".join(map(markdown_text, explain(results).split("\n")))
    shown = ((c.name, markdown_text(c.title), markdown_text(c.caption)) for c in charts)
    pictures = "\n\n".join(
        f"## {title}\n\n![{title}](figures/{name}.png)\n\n{caption}"
        for name, title, caption in shown
    )
    views = "\n\n".join(
        f"## {name}\n\n{markdown_table(view.headings, view.rows)}"
        for name, view in server_views(results)
    )
    summary = {"rows": [asdict(row) for row in rows], "runs": [r.summary() for r in results]}
    return {
        "report.md": "\n\n".join(
            part for part in ("# Comparison", as_markdown(rows), words, views, pictures) if part
        )
        + "\n",
        "table.csv": as_csv(rows),
        "summary.json": to_json(summary, indent=1) + "\n",
    }
