"""Figures of the reproduction, in the style of all others: ours filled, the paper's hollow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from noisewise.report.chart import INK, MUTED, method_looks, new_axes
from noisewise.report.grids import Grid

__all__ = [
    "Line",
    "bars_figure",
    "grid_figure",
    "lines_figure",
    "panels_figure",
    "weights_panels",
]

_SHAPES = "os^Dvph"  # with an inside, to be filled or hollow


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    x: Sequence[float]
    y: Sequence[float]


def _plain(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Ordinary numbers at the ticks of logarithmic axes."""
    for wanted, axis in ((x, axes.xaxis), (y, axes.yaxis)):
        if wanted:
            low, high = axis.get_view_interval()
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            short = high < 300 * low  # few decades: 2 and 5 are named as well
            axis.set_minor_formatter(FuncFormatter(_two_and_five) if short else NullFormatter())


def _two_and_five(value: float, _: object) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Names at the ends of lines, moved apart on the screen where they would collide."""
    axes.figure.canvas.draw()
    placed = -math.inf
    places = {n: axes.transData.transform((x, y)) for n, (x, y, _) in ends.items()}
    for name, (_, pixel) in sorted(places.items(), key=lambda item: float(item[1][1])):
        placed = max(float(pixel), placed + 14.0)
        axes.annotate(
            name,
            xy=ends[name][:2],
            xytext=(6, (placed - float(pixel)) * 72 / axes.figure.dpi),
            textcoords="offset points",
            color=ends[name][2],
            va="center",
            fontsize=9,
            annotation_clip=False,
        )


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
    """Lines with their names at the right end."""
    figure, axes = new_axes(7.5, 4.5)
    ends = {}
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    looks = method_looks(list(lines))
    for name, line in lines.items():
        look = looks[name]
        marker = look.marker if len(line.x) <= 60 else ""
        axes.plot(line.x, line.y, look.line, marker=marker, ms=4, lw=1.6, color=look.colour)
        ends[name] = (line.x[-1], line.y[-1], look.text)
    _plain(axes, x=log_x, y=log_y)
    if not log_x and all(float(x).is_integer() for line in lines.values() for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x_ticks is not None:
        axes.set_xticks(x_ticks, [f"{tick:g}" for tick in x_ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    _label_ends(axes, ends)
    return figure


def bars_figure(
    values: ArrayLike, labels: Sequence[str], x_label: str, y_label: str, highlight: int = 0
) -> Figure:
    """Bars in ascending order of their labels; the ``highlight`` largest in another colour."""
    heights = np.asarray(values, dtype=np.float64)
    figure, axes = new_axes(8.0, 4.2)
    large = set(np.argsort(-heights)[:highlight].tolist())
    colours = ["#D55E00" if k in large else "#0072B2" for k in range(len(heights))]
    axes.bar(range(len(heights)), heights, color=colours, width=0.75)
    axes.set_xticks(range(len(heights)), labels, fontsize=8)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.25)
    return figure


def _hollow() -> Line2D:
    """The legend's entry for published figures."""
    return Line2D([], [], marker="o", ls="", ms=10, mfc="none", color=MUTED, label="hollow: paper")


def grid_figure(grid: Grid, y_label: str, *, log_y: bool = False) -> Figure:
    """A grid as points: a column of the table on the x axis, a colour for each method."""
    width = max(6.0, 1.4 + 0.85 * len(grid.columns))
    figure, axes = new_axes(width, 4.5)
    count = max(1, len(grid.rows))
    published = False
    handles = []
    looks = method_looks(list(grid.rows))
    for number, (row, cells) in enumerate(grid.rows.items()):
        colour, shape = looks[row].colour, _SHAPES[number % len(_SHAPES)]
        shift = 0.7 * ((number + 0.5) / count - 0.5)
        places = [k + shift for k, c in enumerate(grid.columns) if c in cells]
        found = [cells[column] for column in grid.columns if column in cells]
        spread = [c.spread if math.isfinite(c.spread) else 0.0 for c in found]
        ours = [c.ours for c in found]
        bars = spread if any(spread) else None
        axes.errorbar(places, ours, yerr=bars, fmt=shape, ms=5.5, color=colour)
        handles.append(Line2D([], [], marker=shape, ls="", ms=5.5, color=colour, label=row))
        paper = [c.paper for c in found]
        if any(map(math.isfinite, paper)):
            published = True
            axes.plot(places, paper, shape, ms=10, mfc="none", mew=1.1, color=colour)
    if published:
        handles.append(_hollow())
    if log_y:
        axes.set_yscale("log")
        _plain(axes, y=True)
    for k in range(1, len(grid.columns)):
        axes.axvline(k - 0.5, color="#000000", alpha=0.08, lw=0.8)
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
    """One panel of bars for each column of a grid; the paper's figures are outlines."""
    figure = Figure(figsize=(2.2 + 2.1 * len(grid.columns), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(grid.columns), squeeze=False)[0]
    looks = method_looks(list(grid.rows))
    for axes, column in zip(panels, grid.columns, strict=True):
        cells = {row: found[column] for row, found in grid.rows.items() if column in found}
        places = range(len(cells))
        ours = [cell.ours for cell in cells.values()]
        paper = [cell.paper for cell in cells.values()]
        colours = [looks[row].colour for row in cells]
        spread = [c.spread if math.isfinite(c.spread) else 0.0 for c in cells.values()]
        axes.bar(places, ours, width=0.7, color=colours, yerr=spread if any(spread) else None)
        axes.bar(places, paper, width=0.86, fill=False, edgecolor=INK, lw=1.0)
        for k, (mine, theirs) in enumerate(zip(ours, paper, strict=True)):
            top = max(mine, theirs) if math.isfinite(theirs) else mine
            axes.annotate(
                f"{mine:.1f}", (k, top), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_xticks(places, list(cells), rotation=35, ha="right", fontsize=8)
        axes.set_title(column, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylabel(y_label)
    figure.supxlabel("bars and numbers: ours; outlines: the paper's", fontsize=9)
    return figure


def weights_panels(
    weights: Mapping[str, NDArray[np.float64]],
    estimates: Mapping[str, NDArray[np.float64]],
    truth: NDArray[np.float64],
    x_label: str,
) -> Figure:
    """Upper panel: noise estimates and the truth; lower panel: weights of all methods [%].

    Args:
        weights: [n] by method, in the order in which clients are shown.
        estimates: [n] by method.
        truth: [n].
        x_label: how clients are ordered.
    """
    figure = Figure(figsize=(8.5, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    places = np.arange(1, len(truth) + 1)
    width = 14 if len(truth) <= 30 else 7
    looks = method_looks([*weights, *estimates])
    oracle = {"ms": width, "mew": 2.2, "color": MUTED}
    upper.plot(places, truth, "_", label="true noise", **oracle)
    for name, values in estimates.items():
        look = looks[name]
        upper.plot(places, values, look.marker, ms=4, color=look.colour, label=f"{name}'s estimate")
    upper.set_yscale("log")
    upper.set_ylabel("noise energy of an update (log scale)")
    shared: dict[tuple[float, ...], list[str]] = {}
    for name, values in weights.items():
        shared.setdefault(tuple(np.round(values, 12)), []).append(name)
    for heights, names in shared.items():
        look = looks[names[0]]
        style = oracle if names[0] == "Oracle" else {"ms": 5, "color": look.colour}
        mark = "_" if names[0] == "Oracle" else look.marker
        lower.plot(places, 100 * np.array(heights), mark, label=", ".join(names), **style)
    lower.set_ylabel("aggregation weight [%]")
    lower.set_xlabel(x_label)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(upper, y=True)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    return figure
