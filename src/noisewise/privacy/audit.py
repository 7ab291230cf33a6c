"""The audit's statistics: from errors of a guess "was this record there?" to a bound on epsilon.

Whoever promises (epsilon, delta) promises that nobody can guess well. So a guess that is too good,
by counts that are not a matter of luck, disproves the promise. The bound from below is for Gaussian
noise: of all trade-offs between false alarms and misses, the one with mu = distance / deviation
(Dong, Roth and Su, 2019) that the counted errors allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import beta, norm

from noisewise.checks import fraction, non_negative_int, positive_int
from noisewise.errors import InvalidValueError

__all__ = [
    "AuditBound",
    "audit_bound",
    "clopper_pearson_upper",
    "epsilon_of_mu",
    "gaussian_delta",
]

CONFIDENCE = 0.99


def clopper_pearson_upper(errors: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Upper bound of an error rate from ``errors`` in ``trials``, exact for binomial counts.

    Source: Clopper and Pearson, 1934; one-sided.

    Example:
        >>> round(clopper_pearson_upper(0, 100, 0.95), 4)  # 1 - 0.05^(1/100)
        0.0295
    """
    non_negative_int("errors", errors)
    positive_int("trials", trials)
    fraction("confidence", confidence, one_allowed=False)
    if errors > trials:
        raise InvalidValueError("errors", errors, f"must be at most the {trials} trials")
    return 1.0 if errors == trials else float(beta.ppf(confidence, errors + 1, trials - errors))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-Gaussian DP at epsilon: Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2).

    Source: Balle and Wang, 2018, theorem 8. In logarithms, since exp(e) overflows.
    """
    first = float(log_ndtr(-epsilon / mu + mu / 2))
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return math.exp(first) * -math.expm1(second - first) if second < first else 0.0


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The epsilon at which mu-Gaussian DP has this delta; 0 if delta is not reached even there.

    Example:
        >>> round(epsilon_of_mu(1.0, 1e-5), 3)
        4.377
    """
    fraction("delta", delta, one_allowed=False)
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * float(norm.isf(delta)) + 1  # where the first term alone is below
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-10))


@dataclass(frozen=True)
class AuditBound:
    """What the guesses prove.

    Attributes:
        threshold: a score above it was taken for present.
        present: canaries that were there.
        absent: canaries that were not.
        misses: present ones taken for absent.
        false_alarms: absent ones taken for present.
        miss_bound: upper bound of the rate of misses.
        alarm_bound: upper bound of the rate of false alarms.
        mu: the separation that is proven.
        epsilon: the lower bound at ``delta``; a smaller claim is false.
        delta: of the claim.
        confidence: of each of the two bounds.
    """

    threshold: float
    present: int
    absent: int
    misses: int
    false_alarms: int
    miss_bound: float
    alarm_bound: float
    mu: float
    epsilon: float
    delta: float
    confidence: float


def audit_bound(
    present: NDArray[np.float64],
    absent: NDArray[np.float64],
    delta: float,
    *,
    thresholds: Sequence[float] = (0.5,),
    confidence: float = CONFIDENCE,
) -> AuditBound:
    """A lower bound of epsilon from scores that are 1 plus noise if present and noise if not.

    Thresholds are fixed beforehand: one chosen by the data would need a wider bound. The first is
    the midpoint that the claim implies; the best of several counts.

    Args:
        present: scores of the canaries that were there.
        absent: scores of those that were not.
        delta: of the claim.
        thresholds: a score above it is taken for present.
        confidence: of each error bound. With t thresholds all 2 t of them hold together with at
            least 1 - 2 t (1 - confidence).
    """
    bounds = [_bound(present, absent, delta, limit, confidence) for limit in thresholds]
    return max(bounds, key=lambda bound: bound.epsilon)


def _bound(
    present: NDArray[np.float64],
    absent: NDArray[np.float64],
    delta: float,
    threshold: float,
    confidence: float,
) -> AuditBound:
    # A score that is not a number counts as a wrong guess: it must not prove anything.
    misses = int(np.count_nonzero(~(present > threshold)))
    false_alarms = int(np.count_nonzero(~(absent <= threshold)))
    miss_bound = clopper_pearson_upper(misses, len(present), confidence)
    alarm_bound = clopper_pearson_upper(false_alarms, len(absent), confidence)
    mu = float(norm.isf(alarm_bound) - norm.ppf(miss_bound))
    return AuditBound(
        threshold=threshold,
        present=len(present),
        absent=len(absent),
        misses=misses,
        false_alarms=false_alarms,
        miss_bound=miss_bound,
        alarm_bound=alarm_bound,
        mu=mu,
        epsilon=epsilon_of_mu(mu, delta) if mu > 0 else 0.0,
        delta=delta,
        confidence=confidence,
    )
