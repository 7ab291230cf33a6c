"""Charts as SVG inside an HTML page: text stays text, and colours follow the page's theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

import matplotlib as mpl

from noisewise.palette import DARK_PALETTE, GRID, INK, MUTED, PALETTE
from noisewise.report.chart import Chart, escape_texts
from noisewise.text import printable

__all__ = ["css_colours", "css_variable", "inline_svg"]


def inline_svg(chart: Chart, prefix: str = "") -> str:
    """Return the figure as SVG for an HTML page.

    Text stays text, colours become CSS variables, and tooltips become ``<title>`` elements.

    Args:
        chart: the chart.
        prefix: start of all ids in the SVG; it must differ for charts of the same name.
    """
    escape_texts(chart.figure)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix + chart.name}):
        chart.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for name, titles in chart.tips.items():
        text = _with_titles(text, f"tips-{name}", titles)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}{chart.name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}{chart.name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}{chart.name}-\1)", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda match: css_variable(match[0]), text)
    text = re.sub(r"font: ([^;]*?)'[^;\"]*", r"font: \1var(--font)", text)
    label = html.escape(printable(f"{chart.title}. {chart.caption}"), quote=True)
    opening = re.search(r'viewBox="[^"]+"', text)
    assert opening is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    return (
        f'<svg {opening[0]} role="img" aria-label="{label}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">' + body
    )


def _with_titles(text: str, gid: str, titles: Sequence[str]) -> str:
    """Add a title to each mark of the group ``gid``."""
    start = text.find(f'<g id="{gid}">')
    if start < 0:
        return text
    remaining = iter(titles)

    def titled(match: re.Match[str]) -> str:
        title = html.escape(printable(next(remaining), lines=True))
        return f"{match[1]}><title>{title}</title></use>"

    return text[:start] + re.sub(r"(<use [^>]*?)/>", titled, text[start:], count=len(titles))


def _variables() -> dict[str, tuple[str, str]]:
    """Return for each colour in figures: (CSS variable, its value on a dark page)."""
    variables = {
        INK: ("--ink", "#e6e9ec"),
        MUTED: ("--muted", "#a4abb3"),
        GRID: ("--grid", "#30363d"),
    }
    for number, ((colour, text), dark) in enumerate(zip(PALETTE, DARK_PALETTE, strict=True)):
        variables[colour] = (f"--mark-{number}", dark)
        variables[text] = (f"--word-{number}", dark)
    return variables


def css_variable(colour: str) -> str:
    """Return the CSS variable of a colour of the charts; another colour stays as it is."""
    variable = _variables().get(colour)
    return f"var({variable[0]})" if variable else colour


def css_colours(*, dark: bool) -> str:
    """Return CSS declarations of the colours of all charts, for a light or a dark page."""
    return "".join(
        f"{name}:{shade if dark else colour};" for colour, (name, shade) in _variables().items()
    )
