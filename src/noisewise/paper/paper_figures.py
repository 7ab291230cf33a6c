"""Figures of the reproduction: our values are filled marks, the published ones hollow marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from noisewise.palette import BLUE, INK, MUTED, ORANGE
from noisewise.paper.grids import Grid
from noisewise.report.chart import method_styles, new_axes, plain_numbers
from noisewise.report.curves import label_ends

__all__ = [
    "Line",
    "bars_figure",
    "grid_figure",
    "lines_figure",
    "panels_figure",
    "weights_panels",
]

_SHAPES = "os^Dvph"  # markers with an inside, to be filled or hollow
_HEIGHT = 4.5  # inches


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    x: Sequence[float]
    y: Sequence[float]


def lines_figure(
    lines: Mapping[str, Line],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[float] | None = None,
    title: str = "",
) -> Figure:
    """Draw lines with their names at the right end."""
    figure, axes = new_axes(7.5, _HEIGHT)
    ends = {}
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    looks = method_styles(list(lines))
    for name, line in lines.items():
        look = looks[name]
        marker = look.marker if len(line.x) <= 60 else ""
        axes.plot(line.x, line.y, look.line, marker=marker, ms=4, lw=1.6, color=look.colour)
        ends[name] = (line.x[-1], line.y[-1])
    for axis, logarithmic in (("x", log_x), ("y", log_y)):
        if logarithmic:
            plain_numbers(axes, axis)
    if not log_x and all(float(x).is_integer() for line in lines.values() for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x_ticks is not None:
        axes.set_xticks(x_ticks, [f"{tick:g}" for tick in x_ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    label_ends(axes, ends, {name: look.text for name, look in looks.items()}, _HEIGHT)
    return figure


def bars_figure(
    values: ArrayLike, labels: Sequence[str], x_label: str, y_label: str, highlight: int = 0
) -> Figure:
    """Draw bars in ascending order of their labels; the ``highlight`` largest are orange."""
    heights = np.asarray(values, dtype=np.float64)
    figure, axes = new_axes(8.0, 4.2)
    large = set(np.argsort(-heights)[:highlight].tolist())
    colours = [ORANGE if k in large else BLUE for k in range(len(heights))]
    axes.bar(range(len(heights)), heights, color=colours, width=0.75)
    axes.set_xticks(range(len(heights)), labels, fontsize=8)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.25)
    return figure


def _hollow() -> Line2D:
    """The entry for published figures in the legend."""
    return Line2D([], [], marker="o", ls="", ms=10, mfc="none", color=MUTED, label="hollow: paper")


def grid_figure(grid: Grid, y_label: str, *, log_y: bool = False) -> Figure:
    """Draw a grid as points: the table's columns along the x axis, a colour for each method."""
    width = max(6.0, 1.4 + 0.85 * len(grid.columns))
    figure, axes = new_axes(width, _HEIGHT)
    count = max(1, len(grid.rows))
    published = False
    handles = []
    looks = method_styles(list(grid.rows))
    for number, (row, cells) in enumerate(grid.rows.items()):
        colour, shape = looks[row].colour, _SHAPES[number % len(_SHAPES)]
        shift = 0.7 * ((number + 0.5) / count - 0.5)
        positions = [k + shift for k, c in enumerate(grid.columns) if c in cells]
        in_order = [cells[column] for column in grid.columns if column in cells]
        spread = [c.spread if math.isfinite(c.spread) else 0.0 for c in in_order]
        ours = [c.ours for c in in_order]
        bars = spread if any(spread) else None
        axes.errorbar(positions, ours, yerr=bars, fmt=shape, ms=5.5, color=colour)
        handles.append(Line2D([], [], marker=shape, ls="", ms=5.5, color=colour, label=row))
        paper = [c.paper for c in in_order]
        if any(map(math.isfinite, paper)):
            published = True
            axes.plot(positions, paper, shape, ms=10, mfc="none", mew=1.1, color=colour)
    if published:
        handles.append(_hollow())
    if log_y:
        axes.set_yscale("log")
        plain_numbers(axes, "y")
    for k in range(1, len(grid.columns)):
        axes.axvline(k - 0.5, color=INK, alpha=0.08, lw=0.8)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=min(int(width / 1.5), len(handles)),
        frameon=False,
        fontsize=9,
    )
    return figure


def panels_figure(grid: Grid, y_label: str) -> Figure:
    """Draw a panel of bars for each column of a grid; outlines show the published figures."""
    figure = Figure(figsize=(2.2 + 2.1 * len(grid.columns), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(grid.columns), squeeze=False)[0]
    looks = method_styles(list(grid.rows))
    for axes, column in zip(panels, grid.columns, strict=True):
        cells = {name: row[column] for name, row in grid.rows.items() if column in row}
        positions = range(len(cells))
        ours = [cell.ours for cell in cells.values()]
        paper = [cell.paper for cell in cells.values()]
        colours = [looks[row].colour for row in cells]
        spread = [c.spread if math.isfinite(c.spread) else 0.0 for c in cells.values()]
        axes.bar(positions, ours, width=0.7, color=colours, yerr=spread if any(spread) else None)
        axes.bar(positions, paper, width=0.86, fill=False, edgecolor=INK, lw=1.0)
        for k, (own, published) in enumerate(zip(ours, paper, strict=True)):
            top = max(own, published) if math.isfinite(published) else own
            axes.annotate(
                f"{own:.1f}", (k, top), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_xticks(positions, list(cells), rotation=35, ha="right", fontsize=8)
        axes.set_title(column, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylabel(y_label)
    figure.supxlabel("bars and numbers: ours; outlines: published", fontsize=9)
    return figure


def weights_panels(
    weights: Mapping[str, NDArray[np.float64]],
    estimates: Mapping[str, NDArray[np.float64]],
    truth: NDArray[np.float64],
    x_label: str,
) -> Figure:
    """Draw noise estimates and true noise above the weights of all methods [%].

    Args:
        weights: [n] by method, in the order in which clients are shown.
        estimates: [n] estimated noise energy by method.
        truth: [n] true noise energy.
        x_label: a text that says how clients are ordered.
    """
    figure = Figure(figsize=(8.5, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    positions = np.arange(1, len(truth) + 1)
    width = 14 if len(truth) <= 30 else 7
    looks = method_styles([*weights, *estimates])
    oracle = {"ms": width, "mew": 2.2, "color": MUTED}
    upper.plot(positions, truth, "_", label="true noise", **oracle)
    for name, values in estimates.items():
        look = looks[name]
        label = f"{name}'s estimate"
        upper.plot(positions, values, look.marker, ms=4, color=look.colour, label=label)
    upper.set_yscale("log")
    upper.set_ylabel("noise energy of an update (log scale)")
    shared: dict[tuple[float, ...], list[str]] = {}
    for name, values in weights.items():
        shared.setdefault(tuple(np.round(values, 12)), []).append(name)
    for heights, names in shared.items():
        look = looks[names[0]]
        style = oracle if names[0] == "Oracle" else {"ms": 5, "color": look.colour}
        mark = "_" if names[0] == "Oracle" else look.marker
        lower.plot(positions, 100 * np.array(heights), mark, label=", ".join(names), **style)
    lower.set_ylabel("aggregation weight [%]")
    lower.set_xlabel(x_label)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain_numbers(upper, "y")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    return figure
