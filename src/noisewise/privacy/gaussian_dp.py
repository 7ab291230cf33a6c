"""Gaussian DP (Dong, Roth and Su, 2022): delta, epsilon and mu computed from one another.

mu-Gaussian DP is the privacy of one release with Gaussian noise of deviation 1/mu times the
sensitivity.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

from noisewise.checks import fraction

__all__ = ["gaussian_delta", "gaussian_epsilon", "gaussian_mu"]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-Gaussian DP at epsilon e: Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2).

    Source: Balle and Wang, 2018, theorem 8. The second term is computed from its logarithm, since
    exp(e) overflows. Rounding can make the result negative where delta is below 1e-16.
    """
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return float(ndtr(-epsilon / mu + mu / 2)) - math.exp(second)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which mu-Gaussian DP has this delta; 0 if its delta is smaller at any epsilon.

    Raises:
        InvalidValueError: ``delta`` is not between 0 and 1.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """
    fraction("delta", delta, one_allowed=False)
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * float(norm.isf(delta)) + 1  # here the first term alone is below delta
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-10))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian DP means (epsilon, delta), to six digits, from 1e-9 to 1e4.

    Example:
        >>> round(gaussian_mu(1.0, 1e-5), 3)
        0.268
    """

    def excess(log_mu: float) -> float:
        return gaussian_delta(math.exp(log_mu), epsilon) - delta

    low, high = math.log(1e-9), math.log(1e4)
    if excess(low) >= 0 or excess(high) <= 0:
        return math.exp(low if excess(low) >= 0 else high)
    return math.exp(float(brentq(excess, low, high, rtol=1e-6)))
