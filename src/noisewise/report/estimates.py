"""Figures of noise estimation: against the truth, as spectra, over the number of coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noisewise.report.chart import new_axes

__all__ = ["sample_figure", "spectrum_figure", "truth_figure", "weights_against_oracle_figure"]

_MARKS = {"norm": ("s", "#E69F00"), "factor": ("o", "#0072B2"), "pcp": ("^", "#009E73")}
Vectors = Mapping[str, NDArray[np.float64]]


def _mark(name: str) -> tuple[str, str]:
    return _MARKS.get(name, ("D", "#CC79A7"))


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def truth_figure(variance: Vectors, truth: NDArray[np.float64]) -> Figure:
    """Estimated against true noise energy, one mark a client: on the line is right."""
    figure, axes = new_axes(5.5, 5.0)
    ends = [float(truth.min()) * 0.8, float(truth.max()) * 1.25]
    axes.plot(ends, ends, color="#777777", lw=1, label="exact")
    for name, values in variance.items():
        shape, colour = _mark(name)
        axes.plot(truth, values, shape, ms=5, color=colour, label=name, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "true noise energy of an update", "estimate")
    return figure


def weights_against_oracle_figure(weights: Vectors, oracle: NDArray[np.float64]) -> Figure:
    """Each estimator's weights beside the oracle's, clients sorted by the oracle's weight."""
    figure, axes = new_axes(7.5, 4.2)
    order = np.argsort(-oracle)
    places = range(len(order))
    axes.plot(places, 100 * oracle[order], "_", ms=18, mew=2.5, color="#777777", label="oracle")
    for name, values in weights.items():
        shape, colour = _mark(name)
        axes.plot(places, 100 * values[order], shape, ms=5, color=colour, label=name, alpha=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "clients, least noisy first", "weight [%]")
    return figure


def spectrum_figure(singular_values: Vectors) -> Figure:
    """Singular values of the updates and of the low-rank part that pcp leaves."""
    figure, axes = new_axes(6.5, 4.2)
    for (name, values), (shape, colour) in zip(
        singular_values.items(), [("o-", "#D55E00"), ("s-", "#0072B2")], strict=False
    ):
        shown = np.where(values > 0, values, np.nan)
        rank = int(np.count_nonzero(values > 0))
        axes.plot(
            range(1, len(values) + 1),
            shown,
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
    """Excess noise of the weights over the number p' of sampled coordinates."""
    figure, axes = new_axes(6.5, 4.2)
    for name, values in excess.items():
        shape, colour = _mark(name)
        above = np.maximum(np.asarray(values) - 1, 1e-9)
        axes.plot(sizes, above, shape + "-", ms=5, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "sampled coordinates p'", "noise of the weights over the oracle's, minus 1")
    return figure
