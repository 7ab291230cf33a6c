"""The start of a search for the noise multiplier, from closed forms and quick estimates."""

from __future__ import annotations

import math

import numpy as np

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.gaussian_dp import gaussian_mu
from noisewise.privacy.renyi_estimates import Conversion

__all__ = ["first_guess"]

_CLOSE = 1e-4
"""The search for the start ends when log(epsilon / target) is this small."""


def first_guess(
    budget: PrivacyBudget,
    sample_rate: float,
    steps: int,
    conversion: Conversion | None,
    bounds: tuple[float, float],
    target: float,
) -> tuple[float, float]:
    """A noise multiplier z near the solution, and the slope of log epsilon against log z there.

    Args:
        budget: the budget to calibrate for.
        sample_rate: q.
        steps: T.
        conversion: of an accountant by Renyi DP, whose estimates refine z; None for ``pld``.
        bounds: smallest and largest z.
        target: the epsilon to reach.
    """
    z = _gaussian_limit(budget.epsilon, budget.delta, sample_rate, steps)
    smaller = _gaussian_limit(1.1 * budget.epsilon, budget.delta, sample_rate, steps)
    slope = min(-0.05, math.log(1.1) / math.log(smaller / z)) if smaller < z else -1.0
    z = min(max(z, bounds[0]), bounds[1])
    if conversion is None:
        return z, slope
    return _refined(budget.delta, sample_rate, steps, conversion, bounds, target, z, slope)


def _gaussian_limit(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The z of the Gaussian limit: q sqrt(T (exp(1/z^2) - 1)) = mu (Bu et al., 2020)."""
    mu = gaussian_mu(epsilon, delta)
    return 1 / math.sqrt(math.log1p(mu * mu / (sample_rate * sample_rate * steps)))


def _refined(
    delta: float,
    sample_rate: float,
    steps: int,
    conversion: Conversion,
    bounds: tuple[float, float],
    target: float,
    z: float,
    slope: float,
) -> tuple[float, float]:
    """The z at which the estimated epsilon is the target, by secant steps on logarithms."""
    previous, is_narrow = None, False
    for _ in range(20):
        estimates = conversion.estimates(sample_rate, z, steps, delta)
        best = int(np.argmin(estimates))
        epsilon = float(estimates[best])
        if not 0 < epsilon < math.inf:
            break
        point = (math.log(z), math.log(epsilon / target))
        if previous is not None and point[0] != previous[0]:
            slope = min(-0.05, (point[1] - previous[1]) / (point[0] - previous[0]))
        if abs(point[1]) < _CLOSE:
            break
        previous = point
        if abs(point[1]) < 0.3 and not is_narrow:
            conversion, is_narrow = conversion.near(best), True  # the best order changes little now
        z *= math.exp(min(max(-point[1] / slope, -1.0), 1.0))
        z = min(max(z, bounds[0]), bounds[1])
    return z, slope
