"""Results in a notebook: a small table and curves over the rounds, as HTML with inline SVG.

The HTML refers to nothing outside of itself and has no scripts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from noisewise.palette import MUTED, PALETTE
from noisewise.text import printable

__all__ = ["Curve", "notebook_html"]

Curve = Sequence[tuple[int, float]]
"""(round, value) of the rounds that have a value."""

# Okabe and Ito's palette for colour-blind readers.
_COLOURS = tuple(mark for mark, _ in PALETTE[:-1])
_WIDTH, _HEIGHT = 420, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 26
_DOT = 1.8


def notebook_html(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    curves: Mapping[str, Curve],
    axis: str,
    colours: Mapping[str, str] | None = None,
) -> str:
    """A table and a plot of curves, for ``_repr_html_``.

    Args:
        headings: of the table.
        rows: texts of its cells.
        curves: by name.
        axis: what the curves show.
        colours: of the curves by name; by default those of the palette in their order.
    """
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    finite = {
        name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in curves.items()
    }
    return f"<div>{table}{_svg({n: c for n, c in finite.items() if c}, axis, colours or {})}</div>"


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)


def _svg(curves: Mapping[str, Curve], axis: str, colours: Mapping[str, str]) -> str:
    """The curves with axes and a legend; empty without a value."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: int, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return _LEFT + wide * across, _TOP + tall * (1 - up)

    parts = []
    for number, (name, curve) in enumerate(curves.items()):
        colour = colours.get(name, _COLOURS[number % len(_COLOURS)])
        spots = [place(x, y) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts += [_dot(x, y, _DOT, colour) for x, y in spots]
        if len(curves) > 1:
            y = _HEIGHT + 14 * (number + 1)
            parts.append(_dot(_LEFT, y - 4, 4, colour))
            parts.append(_text(_LEFT + 10, y, name, "start"))
    base, height = _TOP + tall, _HEIGHT + (14 * len(curves) + 6 if len(curves) > 1 else 0)
    parts += [
        f'<path d="M{_LEFT},{_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="{MUTED}"/>',
        _text(_LEFT - 4, _TOP + 8, f"{high:.3g}", "end"),
        _text(_LEFT - 4, base, f"{low:.3g}", "end"),
        _text(_LEFT, base + 14, f"round {first}", "start"),
        _text(_WIDTH - _RIGHT, base + 14, f"{last}", "end"),
        _text(_LEFT + wide / 2, base + 14, axis, "middle"),
    ]
    return (
        f'<svg role="img" aria-label="{_escaped(axis)}" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg>'
    )


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    style = f'font-family="sans-serif" font-size="10" fill="{MUTED}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{_escaped(text)}</text>'
