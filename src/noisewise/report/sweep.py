"""Several comparisons side by side: accuracy against the fields in which their configs differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.report.cells import csv_text
from noisewise.report.chart import (
    FONT_SIZE,
    INK,
    Chart,
    Look,
    Table,
    add_tips,
    label_ends,
    method_looks,
    style_axes,
)
from noisewise.report.sources import RunSet, words_of
from noisewise.report.tables import MethodRow, method_rows

__all__ = ["overview_chart", "overview_csv", "overview_table"]

_PANEL, _MOST_PANELS = 3.1, 8


def _keys(sets: Sequence[RunSet]) -> list[str]:
    """The fields that vary, the one of the horizontal axis first: numbers before words."""
    keys = list(dict.fromkeys(key for one in sets for key in one.settings))

    def rank(key: str) -> tuple[bool, int]:
        values = [one.settings.get(key) for one in sets]
        return not all(map(_is_number, values)), -len({repr(value) for value in values})

    return sorted(keys, key=rank)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def overview_table(sets: Sequence[RunSet]) -> Table:
    """One row for each set and method."""
    rows = []
    for one in sets:
        for row in method_rows(one.results):
            cells = row.cells()
            rows.append((one.name, *cells[:2], str(row.seeds), *cells[2:5]))
    headings = (
        "setting", "method", "accuracy ± standard error", "seeds", "noise / oracle's",
        "signal / best", "largest epsilon spent",
    )  # fmt: skip
    return Table(headings, tuple(rows))


def overview_csv(sets: Sequence[RunSet]) -> str:
    """The exact numbers, with a column for each field that varies."""
    keys = _keys(sets)
    fields = ("seeds", "accuracy", "standard_error", "noise_ratio", "largest_epsilon", "diverged")
    lines: list[list[object]] = [["set", *keys, "method", *fields]]
    for one in sets:
        for row in method_rows(one.results):
            varied = [one.settings.get(key) for key in keys]
            lines.append([one.name, *varied, row.method, *(getattr(row, f) for f in fields)])
    return csv_text(lines)


@dataclass(frozen=True)
class _Panel:
    """A panel's heading, and its sets with their places along the axis."""

    heading: str
    members: tuple[tuple[float, RunSet], ...]


def _panels(sets: Sequence[RunSet]) -> tuple[str, list[_Panel], dict[float, str]]:
    """The field along the axis, the panels for all others, and the axis's labels.

    Sets that are no sweep, such as folders that differ in many ways, stand side by side.
    """
    keys = _keys(sets)
    along, others = (keys[0], keys[1:]) if keys else ("", [])
    values: list[Any] = list(
        {repr(one.settings.get(along)): one.settings.get(along) for one in sets}.values()
    )
    numeric = all(map(_is_number, values))
    places = {repr(v): float(v) if numeric else float(k) for k, v in enumerate(values)}
    grouped: dict[str, list[tuple[float, RunSet]]] = {}
    for one in sets:
        heading = words_of({key: one.settings.get(key) for key in others})
        grouped.setdefault(heading, []).append((places[repr(one.settings.get(along))], one))
    full = len(values) > 1 and all(len({p for p, _ in some}) > 1 for some in grouped.values())
    if not full or len(grouped) > _MOST_PANELS:
        row = tuple((float(k), one) for k, one in enumerate(sets))
        return "", [_Panel("", row)], {k: _short(one.folder or one.name) for k, one in row}
    panels = [_Panel(_short(name, 60), tuple(some)) for name, some in grouped.items()]
    words = {places[repr(v)]: f"{v:g}" if numeric else _short(_plain(v)) for v in values}
    return along, panels, words


def _plain(value: Any) -> str:
    return words_of({"": value}).removeprefix(" = ")


def _short(words: str, most: int = 22) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def overview_chart(sets: Sequence[RunSet]) -> Chart:
    """Accuracy against the swept value, one line a method; further fields give further panels."""
    along, panels, ticks = _panels(sets)
    looks = method_looks([run.method for one in sets for run in one.results])
    figure = Figure(figsize=(4.8, 0.4 + _PANEL * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    tips: dict[str, tuple[str, ...]] = {}
    drawn: list[tuple[Axes, dict[str, tuple[float, float]]]] = []
    for number, panel in enumerate(panels):
        first = drawn[0][0] if drawn else None
        axes = figure.add_subplot(len(panels), 1, number + 1, sharex=first, sharey=first)
        style_axes(axes)
        ends, words = _draw(axes, panel, looks, f"{number}-", joined=bool(along))
        tips |= words
        drawn.append((axes, ends))
        axes.set_title(panel.heading, fontsize=FONT_SIZE, loc="left", color=INK)
        axes.set_ylabel("final accuracy [%]")
        axes.margins(x=0.05)
    _ticks(drawn[0][0], ticks)
    for axes, ends in drawn:  # last, since the panels share their limits
        label_ends(axes, ends, {method: look.text for method, look in looks.items()}, _PANEL)
    drawn[-1][0].set_xlabel(along)
    return Chart(
        "sweep",
        f"Accuracy against {along}" if along else "Accuracy in each setting",
        "Mean over seeds of the final accuracy; bars are the standard error over seeds.",
        figure,
        overview_table(sets),
        tips,
    )


def _ticks(axes: Axes, ticks: Mapping[float, str]) -> None:
    """A tick for each value; a logarithmic axis where they span much."""
    places = sorted(ticks)
    if min(places) > 0 and max(places) >= 8 * min(places):
        axes.set_xscale("log")
        axes.minorticks_off()
    longest = max(map(len, ticks.values()))
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if longest > 8 else {}
    axes.set_xticks(places, [ticks[place] for place in places], **turned)


def _draw(
    axes: Axes, panel: _Panel, looks: Mapping[str, Look], prefix: str, *, joined: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[str, ...]]]:
    """Draw the lines of one panel; where each ends, and its tips."""
    lines: dict[str, list[tuple[float, MethodRow, str]]] = {}
    for place, one in panel.members:
        for row in method_rows(one.results):
            if math.isfinite(row.accuracy):
                lines.setdefault(row.method, []).append((place, row, one.name))
    ends, tips = {}, {}
    for number, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        xs = [place for place, _, _ in points]
        ys = [100 * row.accuracy for _, row, _ in points]
        errors = [100 * row.standard_error for _, row, _ in points]
        look = looks[method]
        axes.errorbar(
            xs,
            ys,
            yerr=[error if math.isfinite(error) else 0.0 for error in errors],
            fmt="o" if look.marker == "|" else look.marker,
            ls=look.line if joined else "",
            color=look.colour,
            lw=1.6,
            elinewidth=1,
            ms=4.5,
        )
        ends[method] = (xs[-1], ys[-1])
        add_tips(axes, f"{prefix}{number}", xs, ys)
        tips[f"{prefix}{number}"] = tuple(
            f"{method}, {name}: {row.accuracy_words()}" for _, row, name in points
        )
    return ends, tips
