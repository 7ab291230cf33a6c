"""Curves of figures over rounds: a line for each method, with its range over seeds and its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.report.chart import FONT_SIZE, Style

__all__ = ["Curve", "Measure", "accuracy_curve", "curve_of", "draw_curves", "label_ends"]

Measure = Callable[[RunResult, RoundRecord], float]
"""A figure of a round of a run; not finite if the round does not have it."""

_MARKS = 12

_WIDTH = 1.8
_WIDER = 1.5  # by how much a line is wider than the one that covers it
_COVERED = 0.01  # share of the axis that two lines differ by at most if one covers the other


class Curve(NamedTuple):
    """Figures at some rounds: values [runs, rounds]."""

    rounds: list[int]
    values: NDArray[np.float64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean over the runs [rounds]."""
        mean: NDArray[np.float64] = self.values.mean(axis=0)
        return mean


def curve_of(runs: Sequence[RunResult], measure: Measure) -> Curve:
    """Return the rounds that all runs with any figure have, and their figures."""
    curves = [
        {r.round: v for r in run.rounds if math.isfinite(v := measure(run, r))} for run in runs
    ]
    curves = [figures for figures in curves if figures]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    return Curve(rounds, np.array([[figures[r] for r in rounds] for figures in curves]))


def accuracy_curve(runs: Sequence[RunResult]) -> Curve:
    """Return the rounds that all runs evaluated, and their main metric in its unit."""
    return curve_of(runs, lambda run, r: run.metric.scale * r.figure(run.metric.name))


def draw_curves(
    axes: Axes, curves: Mapping[str, Curve], styles: Mapping[str, Style], *, marked: bool = False
) -> None:
    """Draw a line for the mean of each curve, with the range over its runs as a band.

    A line that others cover is wider than they are, so that its colour shows on both sides.

    Args:
        axes: to draw on.
        curves: with at least one round each, by name.
        styles: of each name.
        marked: draw marks too, and label the lines for a legend.
    """
    means = {name: curve.mean for name, curve in curves.items()}
    points = np.concatenate(list(means.values()))
    tolerance = _COVERED * float(points.max() - points.min())
    names = list(curves)
    for number, (name, (rounds, values)) in enumerate(curves.items()):
        covering = sum(
            curves[other].rounds == rounds
            and float(np.abs(means[other] - means[name]).mean()) <= tolerance
            for other in names[number + 1 :]
        )
        style = styles[name]
        [line] = axes.plot(
            rounds, means[name], style.line, color=style.colour, lw=_WIDTH + _WIDER * covering
        )
        if marked:
            line.set(marker=style.marker, markersize=5, label=name.replace("$", r"\$"))
            line.set_markevery(max(1, len(rounds) // _MARKS))
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(rounds, low, high, color=style.colour, alpha=0.14, lw=0)


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
    height: float = 3.4,
) -> None:
    """Write the name of each line at its end, with a leader line.

    Names that overlap are moved apart.

    Args:
        axes: axes with the lines.
        ends: last point of each line by name.
        colours: colour of each name.
        height: height of the panel in inches, with axis labels.
    """
    gap = 1.15 * FONT_SIZE / (72 * 0.8 * height)
    axes.autoscale_view()  # computes the limits, on which the positions depend
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(
        ((float(to_axes.transform(point)[1]), name) for name, point in ends.items()),
    )
    positions = _apart([y for y, _ in labels], gap)
    for (end, name), position in zip(labels, positions, strict=True):
        axes.annotate(
            name,
            xy=(1.0, end),
            xytext=(1.04, position),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colours[name],
            va="center",
            fontsize=FONT_SIZE,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colours[name], "lw": 0.7, "shrinkA": 0, "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return positions at least ``gap`` apart, as close as possible to the wanted ones.

    This is least squares with the order kept: subtracting k * gap gives an isotonic regression,
    which the pool-adjacent-violators algorithm solves.

    Args:
        heights: positions in ascending order.
        gap: smallest distance between two positions.
    """
    blocks: list[list[float]] = []
    for number, position in enumerate(heights):
        blocks.append([position - number * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            previous_mean, previous_count = blocks.pop()
            total = previous_count + count
            blocks.append([(previous_mean * previous_count + mean * count) / total, total])
    flat = [mean for mean, count in blocks for _ in range(int(count))]
    return [position + number * gap for number, position in enumerate(flat)]
