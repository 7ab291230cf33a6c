"""`Chart`: a figure with its caption and exact values; one style, saved as files."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter

from noisewise.storage import write_atomic
from noisewise.text import printable

__all__ = [
    "AMBER",
    "BLUE",
    "DARK_PALETTE",
    "GREEN",
    "GRID",
    "INK",
    "MUTED",
    "ORANGE",
    "PALETTE",
    "PINK",
    "Chart",
    "Style",
    "Table",
    "add_tips",
    "escape_texts",
    "fix_layout",
    "label_ends",
    "method_styles",
    "new_axes",
    "plain_numbers",
    "save_figure",
    "style_axes",
]

INK, MUTED, GRID = "#1b1f24", "#6a7077", "#e2e5e9"
FONT_SIZE = 9.5
Grid = Literal["x", "y", "both"]

# Okabe and Ito's palette for colour-blind readers: (colour of marks, darker colour of text).
PALETTE = (
    ("#0072b2", "#005b8f"),
    ("#e69f00", "#8f6300"),
    ("#009e73", "#00704f"),
    ("#cc79a7", "#a0487a"),
    ("#d55e00", "#a84a00"),
    ("#56b4e9", "#1f78ab"),
    ("#8c6d31", "#6b5222"),
    ("#7d6bb3", "#5f4f94"),  # of Alone only
)
BLUE, AMBER, GREEN, PINK, ORANGE, SKY, BROWN, VIOLET = (mark for mark, _ in PALETTE)
# The colours of the palette on a dark page.
DARK_PALETTE = (
    "#4aa8e0",
    "#f0b93c",
    "#2fc49a",
    "#e6a1c8",
    "#f58a42",
    "#9ad6f7",
    "#c9aa68",
    "#b9a9ec",
)
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
    """

    colour: str
    text: str
    line: str
    marker: str


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
        "Oracle": Style(MUTED, MUTED, "--", "|"),
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
    return {method: styles[method] if method in styles else next(unused) for method in listed}


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


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
    height: float = 3.4,
) -> None:
    """Write the name of each line at its end; names that overlap are moved apart.

    Args:
        axes: axes with the lines.
        ends: last point of each line by name.
        colours: colour of each name.
        height: height of the panel in inches, with axis labels.
    """
    gap = 1.15 * FONT_SIZE / (72 * 0.8 * height)
    axes.autoscale_view()  # computes the limits, on which the positions depend
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = sorted(
        ((float(to_axes.transform(point)[1]), name) for name, point in ends.items()),
    )
    positions = _apart([y for y, _ in wanted], gap)
    for (_, name), position in zip(wanted, positions, strict=True):
        axes.annotate(
            name,
            xy=(1.02, position),
            xycoords="axes fraction",
            color=colours[name],
            va="center",
            fontsize=FONT_SIZE,
            annotation_clip=False,
        )


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions at least ``gap`` apart, as close as possible to the wanted ones.

    This is least squares with the order kept: subtracting k * gap gives an isotonic regression,
    which the pool-adjacent-violators algorithm solves.

    Args:
        wanted: positions in ascending order.
        gap: smallest distance between two positions.
    """
    blocks: list[list[float]] = []
    for number, position in enumerate(wanted):
        blocks.append([position - number * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            previous_mean, previous_count = blocks.pop()
            total = previous_count + count
            blocks.append([(previous_mean * previous_count + mean * count) / total, total])
    flat = [mean for mean, count in blocks for _ in range(int(count))]
    return [position + number * gap for number, position in enumerate(flat)]


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


def fix_layout(figure: Figure) -> None:
    """Compute the layout once and keep it: a figure is saved four times, and layout is slow."""
    escape_texts(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


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
