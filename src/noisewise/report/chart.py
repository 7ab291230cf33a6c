"""`Chart`: a figure with its caption and exact values; one style, saved as files."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter

from noisewise.palette import GRID, INK, MUTED, PALETTE
from noisewise.storage import write_atomic
from noisewise.text import printable

__all__ = [
    "Box",
    "Chart",
    "Style",
    "Table",
    "add_legend",
    "add_tips",
    "escape_texts",
    "fix_layout",
    "marker_symbol",
    "method_styles",
    "new_axes",
    "overlap",
    "plain_numbers",
    "save_figure",
    "style_axes",
    "text_width",
]

FONT_SIZE = 9.5
_LEGEND_ROWS = 4  # what the heights of the figures allow for
Grid = Literal["x", "y", "both"]
Box = tuple[float, float, float, float]
"""A rectangle: left, bottom, right, top."""

_MARKERS = "osD^vPX"
_LINES = ("-", ":", "-.")  # dashed lines are for references
# Index in the palette: a method has the same style in all figures. A method that is not listed gets
# one of the remaining styles.
_PALETTE_INDEX = {
    "NoiseWise": 0,
    "RobustHDP": 1,
    "WeiAvg": 2,
    "PFA": 3,
    "BudgetAvg": 4,
    "DPFedAvg": 5,
    "MinEpsilon": 6,
}


@dataclass(frozen=True)
class Table:
    """A table of text: headings, and rows of the same length."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A figure with its title, caption and exact numbers.

    Attributes:
        name: name of its files.
        title: heading.
        caption: how to read the figure.
        figure: the drawn figure.
        values: the exact numbers.
        tips: tooltips, one for each mark, by the name given to `add_tips`.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    values: Table
    tips: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Style:
    """Colours, line and marker of a method in all figures.

    Attributes:
        colour: colour of lines and markers.
        text: colour of the method's name.
        line: line style of matplotlib.
        marker: marker of matplotlib.
        number: position of the method in the list, for the page's filter.
    """

    colour: str
    text: str
    line: str
    marker: str
    number: int = field(default=0, compare=False)


def method_styles(methods: Sequence[str]) -> dict[str, Style]:
    """Return a style for each method.

    A method of the package always has the same style, with options too, unless it is listed more
    than once. Other methods get the remaining styles in their order. References have dashed lines:
    the oracle is grey, FedAvg, which is not private, is black, and Alone is violet.

    Args:
        methods: labels of the methods.

    Example:
        >>> styles = method_styles(["own:Mean", "NoiseWise", "WeiAvg"])
        >>> styles["WeiAvg"] == method_styles(["WeiAvg"])["WeiAvg"]
        True
        >>> len({style.colour for style in styles.values()})
        3
    """
    listed = list(dict.fromkeys(methods))
    fixed = {name: _style(index) for name, index in _PALETTE_INDEX.items()} | {
        "Oracle": Style(MUTED, MUTED, "--", "p"),
        "FedAvg": Style(INK, INK, "--", "*"),
        "Alone": Style(*PALETTE[-1], "--", "h"),
    }
    styles: dict[str, Style] = {}
    for method in sorted(
        listed, key=lambda name: name not in fixed
    ):  # methods without options first
        name = method.partition("(")[0]
        if name in fixed:
            styles[method] = fixed.pop(name)
    used = list(styles.values())
    unused = (style for style in map(_style, itertools.count()) if style not in used)
    chosen = (styles[method] if method in styles else next(unused) for method in listed)
    return {
        method: replace(style, number=number)
        for number, (method, style) in enumerate(zip(listed, chosen, strict=True))
    }


def marker_symbol(marker: str) -> str:
    """Return a character that resembles a marker, for text."""
    symbols = {
        "o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖", "h": "⬢",
        "p": "⬟", "*": "★",
    }  # fmt: skip
    return symbols.get(marker, "●")


def _style(number: int) -> Style:
    """Return style ``number``: the palette, then the palette again with other lines and markers."""
    cycle, index = divmod(number, len(_MARKERS))
    colour, text = PALETTE[index]
    marker = _MARKERS[(index + 3 * cycle) % len(_MARKERS)]  # differs too: points have no lines
    return Style(colour, text, _LINES[cycle % len(_LINES)], marker)


def style_axes(axes: Axes, grid: Grid = "y") -> None:
    """Style axes as in all figures: two spines, a light grid behind the marks, one text colour."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both", labelsize=FONT_SIZE)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_fontsize(FONT_SIZE)
    axes.yaxis.label.set_fontsize(FONT_SIZE)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, lw=0.8)


def new_axes(width: float = 4.8, height: float = 3.4, grid: Grid = "y") -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, in the style of all figures.

    The default width is small, so the text can be read on a phone. No global state of matplotlib is
    used.

    Args:
        width: in inches.
        height: in inches.
        grid: axes with grid lines.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style_axes(axes, grid)
    return figure, axes


def plain_numbers(axes: Axes, which: str) -> None:
    """Write numbers such as 0.2 and 50 on a logarithmic axis instead of powers of ten.

    Args:
        axes: axes whose limits are set.
        which: ``"x"`` or ``"y"``.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    digits = "25" if high < 300 * low else ""  # minor ticks with a label: 2, 5, 20, 50, ...
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if digits and f"{value:e}"[0] in digits else "")
    )


def add_tips(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Add invisible marks for tooltips; the chart's ``tips[name]`` has the text of each.

    Args:
        axes: axes of the figure.
        name: key in ``Chart.tips``.
        xs: x values, all finite: a point that is not finite has no mark, but would have a text.
        ys: y values, all finite.
    """
    assert all(map(math.isfinite, [*xs, *ys]))
    axes.plot(xs, ys, "o", ms=8, mew=0, alpha=0, gid=f"tips-{name}", clip_on=False)


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share.

    Example:
        >>> overlap((0.0, 0.0, 2.0, 2.0), (1.0, 1.0, 5.0, 5.0))
        1.0
    """
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def text_width(text: str) -> float:
    """Return the approximate width of a text in typographic points."""
    return 0.6 * FONT_SIZE * len(text)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend of the labelled series above the axes, in at most 3 columns.

    The figure becomes higher if the legend has more rows than its height allows for.
    """
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(labels, figure.get_figwidth())
    extra_rows = max(math.ceil(len(labels) / columns) - _LEGEND_ROWS, 0)
    figure.set_figheight(figure.get_figheight() + extra_rows * 1.6 * FONT_SIZE / 72)
    figure.legend(
        handles, labels, loc="outside upper center", frameon=False, labelcolor=INK, ncols=columns,
        fontsize=FONT_SIZE, columnspacing=1.2, handletextpad=0.3,
    )  # fmt: skip


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns of a legend, at most 3, fit into ``width`` inches."""
    for columns in (3, 2):
        parts = np.array_split(np.array(labels, dtype=object), columns)  # as matplotlib splits them
        widths = [max(map(text_width, part), default=0.0) for part in parts]
        if sum(widths) + 3 * FONT_SIZE * columns <= 72 * width:
            return columns
    return 1


def fix_layout(figure: Figure) -> None:
    """Compute the layout once and keep it: a figure is saved four times, and layout is slow.

    Matplotlib draws a figure with a layout engine twice for each file, and the engine "none" is a
    placeholder that counts as one. None removes the engine unless the defaults name another.
    """
    escape_texts(figure)
    figure.draw_without_rendering()
    with mpl.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)


class _NameFormatter(FuncFormatter):
    """Writes the names at the ticks of an axis, with control characters escaped."""

    def __init__(self, names: Formatter) -> None:
        super().__init__(lambda value, position: printable(names(value, position)))


def escape_texts(figure: Figure) -> None:
    """Escape control characters in all texts of a figure, and show ``$`` as a character.

    Number formatters (powers of ten) write formulas on purpose and keep them.
    """
    numbers = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        labels = {label for tick in ticks for label in (tick.label1, tick.label2)}
        formatter = axis.get_major_formatter()
        if isinstance(formatter, (FixedFormatter, FuncFormatter)):  # set by set_ticks for names
            if not isinstance(formatter, _NameFormatter):
                axis.set_major_formatter(_NameFormatter(formatter))
            for label in labels:
                label.set_parse_math(False)
        numbers |= {*labels, axis.get_offset_text()}
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_text(printable(text.get_text(), lines=True))
            text.set_parse_math(False)


def save_figure(
    figure: Figure, folder: Path, name: str, kinds: Sequence[str] = ("png", "svg", "pdf")
) -> tuple[Path, ...]:
    """Write a figure as ``name.png``, ``.svg`` and ``.pdf``; the same figure gives the same bytes.

    Args:
        figure: the figure.
        folder: folder of the files; it is created if it does not exist.
        name: file name without suffix.
        kinds: the suffixes, any of ``png``, ``svg`` and ``pdf``.

    Returns:
        The paths of the files, in the order of ``kinds``.
    """
    escape_texts(figure)
    options: dict[str, dict[str, Any]] = {
        "png": {"dpi": 150},
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
    }
    paths = tuple(folder / f"{name}.{kind}" for kind in kinds)
    for path, kind in zip(paths, kinds, strict=True):
        content = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": name}):
            figure.savefig(content, format=kind, **options[kind])
        write_atomic(path, content.getvalue())
    return paths
