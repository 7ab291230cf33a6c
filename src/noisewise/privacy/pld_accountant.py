"""Epsilon by privacy loss distributions (accountant ``pld``), for steps of one or several kinds.

A loss distribution lies on a grid of losses. Every grid gives an upper bound of epsilon; a finer
grid gives a smaller one and needs more memory. `grid_widths` chooses the grids and `pld_epsilon`
refines from coarse to fine until a finer grid changes little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from noisewise.privacy.loss_distribution import (
    PrivacyLossDistribution,
    compose_steps,
    one_step_distribution,
)

__all__ = [
    "ROUNDING_PER_STEP",
    "SMALLEST_PLD_NOISE",
    "StepKinds",
    "composed_distribution",
    "fits_in_memory",
    "grid_widths",
    "loss_variance",
    "pld_epsilon",
    "pld_epsilon_on_grid",
    "pld_epsilons_by_round",
    "reduced_delta",
]

StepKinds = tuple[tuple[float, float, int], ...]
"""Kinds of steps: (sample_rate q, noise_multiplier z, number of steps) for each."""

ROUNDING_PER_STEP = 2.3e-16
"""Bound on the rounding error that the Fourier transform of one composed step adds to a tail
probability. Measured: at most 5.6e-17. The total is subtracted from delta where it is more than
0.2% of delta, and ``pld`` does not answer where it is more than half of delta."""

SMALLEST_PLD_NOISE = 0.15
"""Below this noise multiplier (epsilons of many hundreds) a loss distribution of steps with
sampling does not fit in memory."""

_SMALLEST_NOISE_WITHOUT_SAMPLING = 0.05

_COARSE_GRID, _FINE_GRID = 20_000, 200_000
"""Points of one step's loss distribution on the first grid, and at most on the last."""

_MANY_STEPS = 100_000
"""Distributions of more steps than this are composed with a shorter Fourier transform."""

_ENOUGH = 0.002
"""The refinement ends when a grid four times as fine lowers epsilon by less than this share."""


def fits_in_memory(kinds: StepKinds) -> bool:
    """Whether every kind of step has enough noise for a loss distribution of bounded size."""
    return all(
        z >= (SMALLEST_PLD_NOISE if q < 1 else _SMALLEST_NOISE_WITHOUT_SAMPLING)
        for q, z, _ in kinds
    )


def pld_epsilon(kinds: StepKinds, delta: float) -> float:
    """Epsilon of all steps together, an upper bound; 0 where the distribution cannot resolve it.

    Args:
        kinds: the steps; all Gaussian steps without sampling must be merged into one step.
        delta: at which delta.
    """
    widths = grid_widths(kinds)
    epsilon = math.inf
    for width in widths:
        coarser = epsilon
        epsilon = pld_epsilon_on_grid(kinds, delta, width, large=len(widths) > 1)
        if epsilon == 0 or epsilon > (1 - _ENOUGH) * coarser:
            return min(coarser, epsilon)
    return epsilon


def pld_epsilon_on_grid(kinds: StepKinds, delta: float, width: float, *, large: bool) -> float:
    """Epsilon on one grid: an upper bound on any grid, and 0 where the grid cannot resolve it.

    Args:
        kinds: the steps.
        delta: at which delta.
        width: of the grid of losses.
        large: whether the grid is one of several, so that distributions have many points.
    """
    with np.errstate(over="ignore"):
        total = composed_distribution(kinds, width, large=large)
        steps = sum(steps for _, _, steps in kinds)
        return float(total.get_epsilon_for_delta(reduced_delta(delta, steps)))


def composed_distribution(
    kinds: StepKinds, width: float, *, large: bool
) -> PrivacyLossDistribution:
    """The pessimistic loss distribution of all steps together on one grid.

    Args:
        kinds: the steps.
        width: of the grid of losses.
        large: whether the grid is one of several, so that distributions have many points.
    """
    composed = [
        compose_steps(one_step_distribution(q, z, width), steps, large=large or steps > _MANY_STEPS)
        for q, z, steps in kinds
    ]
    return functools.reduce(lambda one, other: one.compose(other), composed)


def pld_epsilons_by_round(
    sample_rate: float, noise_multiplier: float, steps_per_round: int, rounds: int, delta: float
) -> Iterator[float]:
    """Epsilon after 1, 2, ..., ``rounds`` rounds, each composed from the round before."""
    width = grid_widths(((sample_rate, noise_multiplier, steps_per_round * rounds),))[-1]
    with np.errstate(over="ignore"):
        step = one_step_distribution(sample_rate, noise_multiplier, width)
        one_round = total = compose_steps(step, steps_per_round)
        for number in range(rounds):
            total = total if number == 0 else total.compose(one_round)
            yield float(total.get_epsilon_for_delta(delta))


def reduced_delta(delta: float, steps: int) -> float:
    """``delta`` minus the possible rounding error of its tail, see `ROUNDING_PER_STEP`."""
    rounding = ROUNDING_PER_STEP * steps
    return delta if rounding < 0.002 * delta else delta - rounding


def grid_widths(kinds: StepKinds) -> tuple[float, ...]:
    """Widths of the grids on which ``pld`` computes, from coarse to fine; mostly a single one.

    Rounding losses up to a grid of width h adds about h^2/4 to the variance of each step's loss, so
    h must be small against one step's deviation s; with few steps it must be small against the
    total deviation s sqrt(T) too. The constants keep the excess below 0.2% of epsilon. With small
    sampling rates and little noise such a grid would need gigabytes: the finest grid then has
    `_FINE_GRID` points, and coarser grids come first.

    For several kinds of steps, s^2 is the mean variance of a step's loss, and the width is rounded
    down to a power of two: counts that differ little then share a grid, on which more steps never
    get a smaller epsilon.
    """
    if len(kinds) == 1:
        [(q, z, steps)] = kinds
        std = _step_loss_std(q, z)
        width = min(0.12 * std, 0.03 * std * math.sqrt(steps), 0.05)
    else:
        variance = loss_variance(kinds)
        std = math.sqrt(variance / sum(steps for _, _, steps in kinds))
        width = 2.0 ** math.floor(math.log2(min(0.12 * std, 0.03 * math.sqrt(variance), 0.05)))
    largest_loss = max(_largest_loss(q, z) for q, z, _ in kinds)
    finest = max(width, largest_loss / _FINE_GRID)
    widths = [max(finest, largest_loss / _COARSE_GRID)]
    while widths[-1] > finest:
        widths.append(max(finest, widths[-1] / 4))
    return tuple(widths)


def loss_variance(kinds: Iterable[tuple[float, float, int]]) -> float:
    """Approximate variance of the privacy loss of all steps together."""
    return sum(steps * _step_loss_std(q, z) ** 2 for q, z, steps in kinds)


def _step_loss_std(sample_rate: float, noise_multiplier: float) -> float:
    """Standard deviation of one step's privacy loss, q sqrt(exp(1/z^2) - 1), capped for tiny z.

    It is the per-step mu of the Gaussian limit of DP-SGD (Bu, Dong, Long and Su, 2020) and sets
    the scale on which a loss distribution must be resolved.
    """
    if sample_rate == 1:
        return 1 / noise_multiplier
    return sample_rate * math.sqrt(math.expm1(min(noise_multiplier**-2, 2.0)))


def _largest_loss(sample_rate: float, noise_multiplier: float) -> float:
    """The largest loss of one step that the distribution holds: ten deviations out."""
    unsampled = 10 / noise_multiplier + 0.5 / noise_multiplier**2
    if sample_rate == 1:
        return unsampled
    return float(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + unsampled))
