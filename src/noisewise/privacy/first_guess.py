"""Where a search for the noise multiplier begins: closed forms and estimates, all of them quick."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.renyi import Conversion

__all__ = ["first_guess", "gaussian_mu"]

_CLOSE = 1e-4  # of the aim's logarithm, where the estimate may end


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian DP means (epsilon, delta) (Dong, Roth and Su, 2022, corollary 1).

    Example:
        >>> round(gaussian_mu(1.0, 1e-5), 3)
        0.268
    """

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        far = float(log_ndtr(-epsilon / mu - mu / 2))
        return float(ndtr(-epsilon / mu + mu / 2)) - math.exp(epsilon + far) - delta

    low, high = math.log(1e-9), math.log(1e4)
    if excess(low) >= 0 or excess(high) <= 0:
        return math.exp(low if excess(low) >= 0 else high)
    return math.exp(float(brentq(excess, low, high, rtol=1e-6)))


def first_guess(
    budget: PrivacyBudget,
    sample_rate: float,
    steps: int,
    conversion: Conversion | None,
    bounds: tuple[float, float],
    aim: float,
) -> tuple[float, float]:
    """A noise multiplier z near the one sought, and the slope of log epsilon against log z there.

    Args:
        budget: what is to be kept.
        sample_rate: q.
        steps: T.
        conversion: of an accountant by Renyi DP, whose estimate then decides; None for others.
        bounds: on z.
        aim: the epsilon to hit.
    """
    z = _gaussian_limit(budget.epsilon, budget.delta, sample_rate, steps)
    apart = _gaussian_limit(1.1 * budget.epsilon, budget.delta, sample_rate, steps)
    slope = min(-0.05, math.log(1.1) / math.log(apart / z)) if apart < z else -1.0
    z = min(max(z, bounds[0]), bounds[1])
    if conversion is None:
        return z, slope
    return _estimated(budget.delta, sample_rate, steps, conversion, bounds, aim, z, slope)


def _gaussian_limit(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The z of the Gaussian limit: q sqrt(T (exp(1/z^2) - 1)) = mu (Bu et al., 2020)."""
    mu = gaussian_mu(epsilon, delta)
    return 1 / math.sqrt(math.log1p(mu * mu / (sample_rate * sample_rate * steps)))


def _estimated(
    delta: float,
    sample_rate: float,
    steps: int,
    conversion: Conversion,
    bounds: tuple[float, float],
    aim: float,
    z: float,
    slope: float,
) -> tuple[float, float]:
    """Where the estimated epsilon meets the aim, by secant steps on logarithms."""
    previous, narrow = None, False
    for _ in range(20):
        estimates = conversion.estimates(sample_rate, z, steps, delta)
        place = int(np.argmin(estimates))
        epsilon = float(estimates[place])
        if not 0 < epsilon < math.inf:
            break
        point = (math.log(z), math.log(epsilon / aim))
        if previous is not None and point[0] != previous[0]:
            slope = min(-0.05, (point[1] - previous[1]) / (point[0] - previous[0]))
        if abs(point[1]) < _CLOSE:
            break
        previous = point
        if abs(point[1]) < 0.3 and not narrow:
            conversion, narrow = conversion.near(place), True  # the best order moves little now
        z *= math.exp(min(max(-point[1] / slope, -1.0), 1.0))
        z = min(max(z, bounds[0]), bounds[1])
    return z, slope
