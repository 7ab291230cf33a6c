"""`Chart`: a figure with its words and exact values; one style, saved as files or set in a page."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
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
    "GRID",
    "INK",
    "MUTED",
    "Chart",
    "Look",
    "Table",
    "add_tips",
    "css_colours",
    "inline_svg",
    "label_ends",
    "method_looks",
    "new_axes",
    "save_figure",
    "settle",
    "style_axes",
]

INK, MUTED, GRID = "#1b1f24", "#6a7077", "#e2e5e9"
FONT_SIZE = 9.5
Grid = Literal["x", "y", "both"]

# Okabe and Ito's palette, safe for colour-blind eyes: (marks, the same hue dark enough for words).
_PALETTE = (
    ("#0072b2", "#005b8f"),
    ("#e69f00", "#8f6300"),
    ("#009e73", "#00704f"),
    ("#cc79a7", "#a0487a"),
    ("#d55e00", "#a84a00"),
    ("#56b4e9", "#1f78ab"),
    ("#8c6d31", "#6b5222"),
)
# Each colour of the palette as it has to look on a dark page.
_DARK = ("#4aa8e0", "#f0b93c", "#2fc49a", "#e6a1c8", "#f58a42", "#9ad6f7", "#c9aa68")
_MARKERS = "osD^vPX"
_LINES = ("-", ":", "-.")  # dashes are for references
# Places in the palette: a method looks alike in all figures, whatever else is in them.
_PLACES = {
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
    """Words in columns."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A figure, what it shows, and the numbers in it.

    Attributes:
        name: of its files.
        title: a heading.
        caption: how to read it.
        figure: drawn.
        values: the exact numbers.
        tips: words for the marks of each artist of `add_tips`, shown when a pointer rests there.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    values: Table
    tips: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """How a method looks in every figure of a comparison."""

    colour: str
    text: str
    line: str
    marker: str


def method_looks(methods: Sequence[str]) -> dict[str, Look]:
    """One look for each method; the oracle is grey and the non-private reference black, dashed.

    A method of the package always has the same one; with options too, unless it stands there twice.
    Others get what is left, in their order.

    Example:
        >>> looks = method_looks(["own:Mean", "NoiseWise", "WeiAvg"])
        >>> looks["WeiAvg"] == method_looks(["WeiAvg"])["WeiAvg"]
        True
        >>> len({look.colour for look in looks.values()})
        3
    """
    listed = list(dict.fromkeys(methods))
    fixed = {name: _look(place) for name, place in _PLACES.items()} | {
        "Oracle": Look(MUTED, MUTED, "--", "|"),
        "FedAvg": Look(INK, INK, "--", "*"),
    }
    looks: dict[str, Look] = {}
    for method in sorted(listed, key=lambda name: name not in fixed):  # without options first
        name = method.partition("(")[0]
        if name in fixed:
            looks[method] = fixed.pop(name)
    used = list(looks.values())
    left = (look for look in map(_look, itertools.count()) if look not in used)
    return {method: looks[method] if method in looks else next(left) for method in listed}


def _look(number: int) -> Look:
    """The palette once and again, then with other lines and markers: points have no lines."""
    turn, place = divmod(number, len(_PALETTE))
    colour, text = _PALETTE[place]
    marker = _MARKERS[(place + 3 * turn) % len(_MARKERS)]
    return Look(colour, text, _LINES[turn % len(_LINES)], marker)


def style_axes(axes: Axes, grid: Grid = "y") -> None:
    """Two spines, a faint grid behind the marks, one ink."""
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
    """An empty figure without global state, in the style of all others.

    It is narrow, so that its words can still be read on a phone.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style_axes(axes, grid)
    return figure, axes


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
    height: float = 3.4,
) -> None:
    """Write each line's name at its end, moved apart as little as keeps them legible.

    ``height`` is that of the panel in inches, axis labels included.
    """
    gap = 1.15 * FONT_SIZE / (72 * 0.8 * height)
    axes.autoscale_view()  # limits are lazy, and places depend on them
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = sorted(
        ((float(to_axes.transform(point)[1]), name) for name, point in ends.items()),
    )
    places = _apart([y for y, _ in wanted], gap)
    for (_, name), place in zip(wanted, places, strict=True):
        axes.annotate(
            name,
            xy=(1.02, place),
            xycoords="axes fraction",
            color=colours[name],
            va="center",
            fontsize=FONT_SIZE,
            annotation_clip=False,
        )


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places at least ``gap`` apart, nearest to the wanted ones in least squares.

    Pool adjacent violators: subtracting k * gap turns it into isotonic regression.
    """
    blocks: list[list[float]] = []
    for number, place in enumerate(wanted):
        blocks.append([place - number * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            before, others = blocks.pop()
            whole = others + count
            blocks.append([(before * others + mean * count) / whole, whole])
    flat = [mean for mean, count in blocks for _ in range(int(count))]
    return [place + number * gap for number, place in enumerate(flat)]


def add_tips(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Unseen marks to rest a pointer on; a chart's ``tips[name]`` has the words for each.

    Points that are not finite get no mark, so the caller leaves them out.
    """
    assert all(map(math.isfinite, [*xs, *ys]))
    axes.plot(xs, ys, "o", ms=8, mew=0, alpha=0, gid=f"tips-{name}", clip_on=False)


def settle(figure: Figure) -> None:
    """Find the layout once and keep it: a figure is written four times, and layout is slow."""
    _show_names(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


class _Names(FuncFormatter):
    """Names at the ticks of an axis, as text."""

    def __init__(self, names: Formatter) -> None:
        super().__init__(lambda value, place: printable(names(value, place)))


def _show_names(figure: Figure) -> None:
    """Let every text of a figure be text: no control characters, and ``$`` begins no formula.

    Formatters of numbers (powers of ten) write formulas of their own and keep them.
    """
    numbers = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        labels = {label for tick in ticks for label in (tick.label1, tick.label2)}
        formatter = axis.get_major_formatter()
        if isinstance(formatter, (FixedFormatter, FuncFormatter)):  # what set_ticks makes of names
            if not isinstance(formatter, _Names):
                axis.set_major_formatter(_Names(formatter))
            for label in labels:
                label.set_parse_math(False)
        numbers |= {*labels, axis.get_offset_text()}
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_text(printable(text.get_text(), lines=True))
            text.set_parse_math(False)


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Write ``name.png``, ``.svg`` and ``.pdf``; the same figure gives the same bytes."""
    _show_names(figure)
    kinds: dict[str, dict[str, Any]] = {
        "png": {"dpi": 150},
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
    }
    png, svg, pdf = (folder / f"{name}.{kind}" for kind in kinds)
    for path, (kind, options) in zip((png, svg, pdf), kinds.items(), strict=True):
        content = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": name}):
            figure.savefig(content, format=kind, **options)
        write_atomic(path, content.getvalue())
    return png, svg, pdf


def inline_svg(chart: Chart, prefix: str = "") -> str:
    """The figure as SVG for an HTML page: words as text, colours as CSS variables, tips as titles.

    ``prefix`` keeps the ids of charts of the same name apart.
    """
    _show_names(chart.figure)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix + chart.name}):
        chart.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for name, words in chart.tips.items():
        text = _with_titles(text, f"tips-{name}", words)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}{chart.name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}{chart.name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}{chart.name}-\1)", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found[0]), text)
    text = re.sub(r"font: ([^;]*?)'[^;\"]*", r"font: \1var(--font)", text)
    label = html.escape(printable(f"{chart.title}. {chart.caption}"), quote=True)
    opening = re.search(r'viewBox="[^"]+"', text)
    assert opening is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    return (
        f'<svg {opening[0]} role="img" aria-label="{label}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">' + body
    )


def _with_titles(text: str, gid: str, words: Sequence[str]) -> str:
    """Give each mark of the group ``gid`` its title."""
    start = text.find(f'<g id="{gid}">')
    if start < 0:
        return text
    remaining = iter(words)

    def titled(found: re.Match[str]) -> str:
        return (
            f"{found[1]}><title>{html.escape(printable(next(remaining), lines=True))}</title></use>"
        )

    return text[:start] + re.sub(r"(<use [^>]*?)/>", titled, text[start:], count=len(words))


def _variables() -> dict[str, tuple[str, str]]:
    """Colour in a figure -> (CSS variable, its value on a dark page)."""
    found = {INK: ("--ink", "#e6e9ec"), MUTED: ("--muted", "#a4abb3"), GRID: ("--grid", "#30363d")}
    for number, ((colour, text), dark) in enumerate(zip(_PALETTE, _DARK, strict=True)):
        found[colour] = (f"--mark-{number}", dark)
        found[text] = (f"--word-{number}", dark)
    return found


def _variable(colour: str) -> str:
    known = _variables().get(colour)
    return f"var({known[0]})" if known else colour


def css_colours(*, dark: bool) -> str:
    """Declarations of the charts' colours, for a style sheet."""
    return "".join(
        f"{name}:{shade if dark else colour};" for colour, (name, shade) in _variables().items()
    )
