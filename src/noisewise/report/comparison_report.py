"""`write_comparison` and `write_report`: write the page, tables and figures of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult
from noisewise.federation.round_times import RoundTime
from noisewise.report.cell_text import markdown_table, markdown_text, printable_run
from noisewise.report.chart import Chart, fix_layout, save_figure
from noisewise.report.client_figures import budget_chart, estimate_chart, fairness_chart
from noisewise.report.confusion_figures import confusion_chart
from noisewise.report.deployment_figures import noised_accuracy_chart, site_weights_chart
from noisewise.report.explain import explain
from noisewise.report.figures import accuracy_chart, noise_chart, weights_chart
from noisewise.report.joining_report import does_joining_pay, joining_chart
from noisewise.report.method_figures import (
    epsilon_chart,
    loss_chart,
    paired_chart,
    participation_chart,
    time_chart,
)
from noisewise.report.page import Section, render_page
from noisewise.report.page_summary import page_summary, verdict
from noisewise.report.run_sets import RunSet, read_round_times, read_timings
from noisewise.report.server_view import server_views
from noisewise.report.sweep_report import overview_chart, overview_csv, overview_table
from noisewise.report.tables import as_csv, as_markdown, as_run_csv, method_rows
from noisewise.storage import to_json, write_atomic
from noisewise.text import printable

__all__ = ["charts_of", "write_comparison", "write_report"]

_MAKERS = (
    accuracy_chart, paired_chart, epsilon_chart, noise_chart, weights_chart, estimate_chart,
    budget_chart, fairness_chart, confusion_chart, loss_chart, participation_chart,
    noised_accuracy_chart, site_weights_chart,
)  # fmt: skip


def charts_of(
    results: Sequence[RunResult],
    times: Mapping[tuple[str, int], Sequence[RoundTime]] | None = None,
) -> tuple[Chart, ...]:
    """Return every chart for which the runs have data.

    Args:
        results: runs of one or more methods and seeds.
        times: when the rounds took place, by (method, seed), if that was recorded.
    """
    makers = (*_MAKERS, lambda runs: time_chart(runs, times or {}), joining_chart)
    charts = [chart for make in makers if (chart := make(results)) is not None]
    for chart in charts:
        fix_layout(chart.figure)
    return tuple(charts)


def write_comparison(
    results: Sequence[RunResult], folder: Path | str, config: str | None = None
) -> tuple[Path, ...]:
    """Write the page, tables (Markdown, CSV, JSON) and figures (PNG, SVG, PDF) of runs.

    Args:
        results: runs of one or more methods over one or more seeds.
        folder: folder of the files. If it has ``timing.json`` files of runs, the page shows them.
        config: the runs' config as TOML; by default the folder's ``config.toml``, if it has one.

    Returns:
        The paths of the files; the first is ``report.html``.

    Raises:
        InvalidValueError: there are no runs.

    Example:
        The page of a run that a folder holds:

            page, *_ = write_comparison([nw.load_result("runs/mine")], "runs/mine/report")
    """
    folder = Path(folder)
    if config is None:
        file = folder / "config.toml"
        config = file.read_text(errors="replace") if file.is_file() else ""
    run_folders = [folder, *sorted((folder / "runs").glob("*"))]
    runs = RunSet(
        tuple(results),
        config=config,
        times=read_round_times(run_folders, results),
        timings=read_timings({path.name: path for path in run_folders if path.is_dir()}),
    )
    return write_report([runs], folder)


def write_report(
    sets: Sequence[RunSet],
    folder: Path,
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    draw_parts: bool = True,
) -> tuple[Path, ...]:
    """Write one page for one or several sets of runs, with tables and figures.

    Args:
        sets: sets of runs; each is one comparison.
        folder: folder of the files.
        title: title of the page; by default it says what was run (data, model, methods).
        notes: lines about runs that are not on the page.
        draw_parts: for several sets: whether to save the figures of each set as files too.

    Returns:
        The paths of the files; the first is ``report.html``.

    Raises:
        InvalidValueError: there are no sets, or one of them has no runs.
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
    sections = [Section(one, charts_of(one.results, one.times)) for one in sets]
    single = len(sets) == 1
    written: list[Path] = []
    for section in sections if single or draw_parts else ():
        figures = folder / "figures" if single else folder / "figures" / section.runs.slug
        for chart in section.charts:
            written += save_figure(chart.figure, figures, chart.name)
    texts: dict[str, str] = {}
    overview = None
    title = title or page_summary(sets).title
    if single:
        texts |= _tables(title, sets[0], sections[0].charts)
    else:
        overview = (overview_chart(sets), overview_table(sets))
        written += save_figure(overview[0].figure, folder / "figures", overview[0].name)
        texts["sweep.csv"] = overview_csv(sets)
    texts["report.html"] = render_page(title, sections, overview, notes)
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    files = [folder / name for name in texts]
    return (files[-1], *written, *files[:-1])


def _tables(title: str, runs: RunSet, charts: Sequence[Chart]) -> dict[str, str]:
    """Return the content of the other files of one comparison by file name."""
    results = runs.results
    rows = method_rows(results)
    facts = "\n".join(
        f"- {name}: {markdown_text(text)}" for name, text in page_summary([runs]).facts
    )
    top = (f"# {markdown_text(title)}", facts, markdown_text(verdict(results)))
    explanation = "\n".join(map(markdown_text, explain(results).split("\n")))
    texts = ((c.name, markdown_text(c.title), markdown_text(c.caption)) for c in charts)
    pictures = "\n\n".join(
        f"## {title}\n\n![{title}](figures/{name}.png)\n\n{caption}"
        for name, title, caption in texts
    )
    views = "\n\n".join(
        f"## {name}\n\n{markdown_table(view.headings, view.rows)}"
        for name, view in server_views(results)
    )
    joining = does_joining_pay(results)
    gains = []
    if joining is not None:  # its figure is the last one, just above
        tables = (joining.table, joining.method_table)
        gains = [
            markdown_text(joining.sentence),
            *(markdown_table(table.headings, table.rows) for table in tables),
        ]
    summary = {"rows": [asdict(row) for row in rows], "runs": [r.summary() for r in results]}
    return {
        "report.md": "\n\n".join(
            part for part in (*top, as_markdown(rows), explanation, views, pictures, *gains) if part
        )
        + "\n",
        "table.csv": as_csv(rows),
        "runs.csv": as_run_csv(results),
        "summary.json": to_json(summary, indent=1) + "\n",
    }
