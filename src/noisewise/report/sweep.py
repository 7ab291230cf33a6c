"""Several comparisons side by side: accuracy against the fields in which their configs differ."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
from noisewise.report.figures import plain_numbers
from noisewise.report.sources import RunSet, words_of
from noisewise.report.tables import MethodRow, method_rows

__all__ = ["overview_chart", "overview_csv", "overview_table"]


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
            words = row.accuracy_words() + (f" ({row.remarks()})" if row.remarks() else "")
            rows.append((one.name, row.method, words, str(row.seeds), *row.cells()[2:4]))
    headings = (
        "setting", "method", "accuracy ± standard error", "seeds", "noise / oracle's",
        "largest epsilon spent",
    )  # fmt: skip
    return Table(headings, tuple(rows))


def overview_csv(sets: Sequence[RunSet]) -> str:
    """The exact numbers, with a column for each field that varies."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = _keys(sets)
    fields = ("seeds", "accuracy", "standard_error", "noise_ratio", "largest_epsilon", "diverged")
    writer.writerow(["set", *keys, "method", *fields])
    for one in sets:
        for row in method_rows(one.results):
            varied = [one.settings.get(key) for key in keys]
            writer.writerow([one.name, *varied, row.method, *(getattr(row, f) for f in fields)])
    return out.getvalue()


def overview_chart(sets: Sequence[RunSet]) -> Chart:
    """Accuracy against the swept value, one line a method; further fields give further panels."""
    keys = _keys(sets)
    along, others = (keys[0], keys[1:]) if keys else ("", [])
    panels: dict[str, list[RunSet]] = {}
    for one in sets:
        name = words_of({key: one.settings.get(key) for key in others})
        panels.setdefault(name, []).append(one)
    looks = method_looks([run.method for one in sets for run in one.results])
    figure = Figure(figsize=(4.8, 0.4 + 3.1 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    tips: dict[str, tuple[str, ...]] = {}
    first: Axes | None = None
    for number, (name, members) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, number + 1, sharex=first, sharey=first)
        first = first or axes
        style_axes(axes)
        tips |= _panel(axes, members, along, looks, f"{number}-")
        if name:
            axes.set_title(name, fontsize=FONT_SIZE, loc="left", color=INK)
        axes.set_ylabel("final accuracy [%]")
    if first is not None:
        figure.axes[-1].set_xlabel(along or "set")
    return Chart(
        "sweep",
        f"Accuracy against {along}" if along else "Accuracy in each set",
        "Mean over seeds of the final accuracy; bars are the standard error over seeds.",
        figure,
        overview_table(sets),
        tips,
    )


def _panel(
    axes: Axes, sets: Sequence[RunSet], along: str, looks: dict[str, Look], prefix: str
) -> dict[str, tuple[str, ...]]:
    """Draw the lines of one panel and return their tips."""
    values: list[Any] = [one.settings.get(along) if along else one.name for one in sets]
    numeric = all(map(_is_number, values)) and len(set(values)) == len(values)
    places = [float(v) for v in values] if numeric else list(map(float, range(len(values))))
    lines: dict[str, list[tuple[float, MethodRow, str]]] = {}
    for place, one in zip(places, sets, strict=True):
        for row in method_rows(one.results):
            if math.isfinite(row.accuracy):
                lines.setdefault(row.method, []).append((place, row, one.name))
    ends, tips = {}, {}
    for number, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        xs = [point[0] for point in points]
        ys = [100 * point[1].accuracy for point in points]
        errors = [100 * point[1].standard_error for point in points]
        look = looks[method]
        axes.errorbar(
            xs,
            ys,
            yerr=[error if math.isfinite(error) else 0.0 for error in errors],
            fmt=("o" if look.marker == "|" else look.marker) + look.line,
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
    if numeric and min(places) > 0 and max(places) >= 8 * min(places):
        axes.set_xscale("log")
        plain_numbers(axes, "x")
    if numeric:
        axes.set_xticks(places, [f"{value:g}" for value in places])
        axes.minorticks_off()
    else:
        words = [words_of({"": value}).removeprefix(" = ") for value in values]
        shown = [word if len(word) <= 22 else word[:20] + "…" for word in words]
        axes.set_xticks(places, shown, rotation=20 if max(map(len, shown)) > 8 else 0)
    axes.margins(x=0.05)
    label_ends(axes, ends, {method: look.text for method, look in looks.items()}, height=3.1)
    return tips
