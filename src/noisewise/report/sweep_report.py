"""Several comparisons in one chart and table: score against the config fields that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.palette import INK
from noisewise.report.cell_text import csv_text
from noisewise.report.chart import (
    FONT_SIZE,
    Chart,
    Style,
    Table,
    add_tips,
    method_styles,
    style_axes,
)
from noisewise.report.curves import label_ends
from noisewise.report.run_sets import RunSet, settings_text
from noisewise.report.tables import MethodRow, headings, method_rows

__all__ = ["overview_chart", "overview_csv", "overview_table"]

_PANEL, _MOST_PANELS = 3.1, 8


def _keys(sets: Sequence[RunSet]) -> list[str]:
    """Return the fields that vary; the first is for the x axis. Numeric fields come first."""
    keys = list(dict.fromkeys(key for one in sets for key in one.settings))

    def rank(key: str) -> tuple[bool, int]:
        values = [one.settings.get(key) for one in sets]
        return not all(map(_is_number, values)), -len({repr(value) for value in values})

    return sorted(keys, key=rank)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mixed(sets: Sequence[RunSet]) -> bool:
    """Whether the sets have different tasks, whose figures cannot be compared."""
    return len({run.task for one in sets for run in one.results}) > 1


def overview_table(sets: Sequence[RunSet]) -> Table:
    """Return a table with one row for each set and method."""
    rows, mixed = [], _mixed(sets)
    for one in sets:
        for row in method_rows(one.results):
            cells, n_others = row.cells(), len(row.others)
            shown = cells[:2] if mixed else cells[: 2 + n_others]
            rows.append((one.name, *shown, str(row.seeds), *cells[2 + n_others : -1]))
    every = [row for one in sets for row in method_rows(one.results)]
    names = headings(every)[: 2 if mixed else 2 + len(every[0].others)]
    last = ("seeds", "noise / oracle's", "signal / best", "largest epsilon spent")
    return Table(("setting", *names, *last), tuple(rows))


def overview_csv(sets: Sequence[RunSet]) -> str:
    """Return the exact numbers as CSV, with a column for each field that varies."""
    keys = _keys(sets)
    fields = ("seeds", "score", "standard_error", "noise_ratio", "largest_epsilon", "diverged")
    every = [row for one in sets for row in method_rows(one.results)]
    main = headings(every)[1].removesuffix(" ± standard error")
    names = [main if name == "score" else name for name in fields]
    lines: list[list[object]] = [["set", *keys, "method", *names]]
    for one in sets:
        for row in method_rows(one.results):
            varied = [one.settings.get(key) for key in keys]
            lines.append([one.name, *varied, row.method, *(getattr(row, f) for f in fields)])
    return csv_text(lines)


@dataclass(frozen=True)
class _Panel:
    """A panel: its heading, and its sets with their positions on the x axis."""

    heading: str
    members: tuple[tuple[float, RunSet], ...]


def _panels(sets: Sequence[RunSet]) -> tuple[str, list[_Panel], dict[float, str]]:
    """Return the field of the x axis, a panel for each value of the others, and the tick labels.

    Sets that are not a sweep, such as folders that differ in many fields, get one position each in
    a single panel.
    """
    keys = _keys(sets)
    along, others = (keys[0], keys[1:]) if keys else ("", [])
    values: list[Any] = list(
        {repr(one.settings.get(along)): one.settings.get(along) for one in sets}.values()
    )
    numeric = all(map(_is_number, values))
    positions = {repr(v): float(v) if numeric else float(k) for k, v in enumerate(values)}
    grouped: dict[str, list[tuple[float, RunSet]]] = {}
    for one in sets:
        heading = settings_text({key: one.settings.get(key) for key in others})
        grouped.setdefault(heading, []).append((positions[repr(one.settings.get(along))], one))
    is_sweep = len(values) > 1 and all(
        len({position for position, _ in members}) > 1 for members in grouped.values()
    )
    if not is_sweep or len(grouped) > _MOST_PANELS:
        row = tuple((float(k), one) for k, one in enumerate(sets))
        return "", [_Panel("", row)], {k: _short(one.folder or one.name) for k, one in row}
    panels = [_Panel(_short(name, 60), tuple(members)) for name, members in grouped.items()]
    labels = {positions[repr(v)]: f"{v:g}" if numeric else _short(_value_text(v)) for v in values}
    return along, panels, labels


def _value_text(value: Any) -> str:
    return settings_text({"": value}).removeprefix(" = ")


def _short(text: str, most: int = 22) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def overview_chart(sets: Sequence[RunSet]) -> Chart:
    """Chart of the main metric against the swept value, a line for each method.

    If several fields vary, each value of the other fields has its own panel.
    """
    along, panels, ticks = _panels(sets)
    metric, mixed = sets[0].results[0].metric, _mixed(sets)
    name = "score" if mixed else metric.name
    differ = " The sets have different tasks: their scores cannot be compared." if mixed else ""
    styles = method_styles([run.method for one in sets for run in one.results])
    figure = Figure(figsize=(4.8, 0.4 + _PANEL * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    tips: dict[str, tuple[str, ...]] = {}
    drawn: list[tuple[Axes, dict[str, tuple[float, float]]]] = []
    for number, panel in enumerate(panels):
        first = drawn[0][0] if drawn else None
        axes = figure.add_subplot(len(panels), 1, number + 1, sharex=first, sharey=first)
        style_axes(axes)
        ends, panel_tips = _draw(axes, panel, styles, f"{number}-", joined=bool(along))
        tips |= panel_tips
        drawn.append((axes, ends))
        axes.set_title(panel.heading, fontsize=FONT_SIZE, loc="left", color=INK)
        axes.set_ylabel("final score of each task" if mixed else f"final {metric.label}")
        axes.margins(x=0.05)
    _ticks(drawn[0][0], ticks)
    for axes, ends in drawn:  # at the end, because the panels share their limits
        label_ends(axes, ends, {method: style.text for method, style in styles.items()}, _PANEL)
    drawn[-1][0].set_xlabel(along)
    return Chart(
        "sweep",
        f"{name.capitalize()} {f'against {along}' if along else 'in each setting'}",
        f"Mean over seeds of the final {name}; bars are the standard error over seeds.{differ}",
        figure,
        overview_table(sets),
        tips,
    )


def _ticks(axes: Axes, ticks: Mapping[float, str]) -> None:
    """Set a tick for each value, and a logarithmic axis for a wide range of values."""
    positions = sorted(ticks)
    if min(positions) > 0 and max(positions) >= 8 * min(positions):
        axes.set_xscale("log")
        axes.minorticks_off()
    longest = max(map(len, ticks.values()))
    rotation: dict[str, Any] = {"rotation": 20, "ha": "right"} if longest > 8 else {}
    axes.set_xticks(positions, [ticks[position] for position in positions], **rotation)


def _draw(
    axes: Axes, panel: _Panel, styles: Mapping[str, Style], prefix: str, *, joined: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[str, ...]]]:
    """Draw the lines of one panel; return the last point and the tooltips of each line."""
    lines: dict[str, list[tuple[float, MethodRow, str]]] = {}
    for position, one in panel.members:
        for row in method_rows(one.results):
            if math.isfinite(row.score):
                lines.setdefault(row.method, []).append((position, row, one.name))
    ends, tips = {}, {}
    for number, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        xs = [position for position, _, _ in points]
        ys = [row.metric.scale * row.score for _, row, _ in points]
        errors = [row.metric.scale * row.standard_error for _, row, _ in points]
        style = styles[method]
        axes.errorbar(
            xs,
            ys,
            yerr=[error if math.isfinite(error) else 0.0 for error in errors],
            fmt="o" if style.marker == "|" else style.marker,
            ls=style.line if joined else "",
            color=style.colour,
            lw=1.6,
            elinewidth=1,
            ms=4.5,
        )
        ends[method] = (xs[-1], ys[-1])
        add_tips(axes, f"{prefix}{number}", xs, ys)
        tips[f"{prefix}{number}"] = tuple(
            f"{method}, {name}: {row.score_text()}" for _, row, name in points
        )
    return ends, tips
