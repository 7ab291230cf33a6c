"""Figures of noise estimates: against the true noise, spectra, effect of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noisewise.palette import AMBER, BLUE, GREEN, MUTED, ORANGE, PINK
from noisewise.report.chart import new_axes

__all__ = ["sample_figure", "spectrum_figure", "truth_figure", "weights_against_oracle_figure"]

_MARKS = {"norm": ("s", AMBER), "factor": ("o", BLUE), "pcp": ("^", GREEN)}
Vectors = Mapping[str, NDArray[np.float64]]


def _mark(name: str) -> tuple[str, str]:
    return _MARKS.get(name, ("D", PINK))


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def truth_figure(variance: Vectors, truth: NDArray[np.float64]) -> Figure:
    """Return a figure of estimated against true noise energy; marks on the line are exact."""
    figure, axes = new_axes(5.5, 5.0)
    ends = [float(truth.min()) * 0.8, float(truth.max()) * 1.25]
    axes.plot(ends, ends, color=MUTED, lw=1, label="exact")
    for name, values in variance.items():
        shape, colour = _mark(name)
        axes.plot(truth, values, shape, ms=5, color=colour, label=name, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "true noise energy of an update", "estimate")
    return figure


def weights_against_oracle_figure(weights: Vectors, oracle: NDArray[np.float64]) -> Figure:
    """Return a figure of each estimator's weights and the oracle's, sorted by the oracle's."""
    figure, axes = new_axes(7.5, 4.2)
    order = np.argsort(-oracle)
    ranks = range(len(order))
    axes.plot(ranks, 100 * oracle[order], "_", ms=18, mew=2.5, color=MUTED, label="oracle")
    for name, values in weights.items():
        shape, colour = _mark(name)
        axes.plot(ranks, 100 * values[order], shape, ms=5, color=colour, label=name, alpha=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "clients, least noisy first", "weight [%]")
    return figure


def spectrum_figure(singular_values: Vectors) -> Figure:
    """Return a figure of the singular values of the updates and of pcp's low-rank part."""
    figure, axes = new_axes(6.5, 4.2)
    for (name, values), (shape, colour) in zip(
        singular_values.items(), [("o-", ORANGE), ("s-", BLUE)], strict=False
    ):
        positive = np.where(values > 0, values, np.nan)
        rank = int(np.count_nonzero(values > 0))
        axes.plot(
            range(1, len(values) + 1),
            positive,
            shape,
            ms=5,
            color=colour,
            label=f"{name} (rank {rank})",
        )
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "number", "singular value")
    return figure


def sample_figure(sizes: Sequence[int], excess: Mapping[str, Sequence[float]]) -> Figure:
    """Return a figure of the weights' excess noise against the number p' of coordinates."""
    figure, axes = new_axes(6.5, 4.2)
    for name, values in excess.items():
        shape, colour = _mark(name)
        above = np.maximum(np.asarray(values) - 1, 1e-9)
        axes.plot(sizes, above, shape + "-", ms=5, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "sampled coordinates p'", "noise of the weights over the oracle's, minus 1")
    return figure
