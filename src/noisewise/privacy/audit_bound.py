"""The audit's statistics: a lower bound of epsilon from guesses whether a record was used.

(epsilon, delta)-privacy limits how well anybody can guess whether a record was used. So guesses
that are better than the limit, with confidence, disprove the claim. The lower bound is for Gaussian
noise: it is the epsilon of the smallest mu = distance / deviation (Dong, Roth and Su, 2022) that
explains the counted false alarms and misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, norm

from noisewise.checks import fraction, non_negative_int, positive_int
from noisewise.errors import InvalidValueError
from noisewise.privacy.gaussian_dp import gaussian_epsilon

__all__ = ["AuditBound", "audit_bound", "clopper_pearson_upper"]

CONFIDENCE = 0.99


def clopper_pearson_upper(errors: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper bound of an error rate, exact for binomial counts.

    Source: Clopper and Pearson, 1934.

    Args:
        errors: number of errors counted.
        trials: number of trials.
        confidence: probability with which the bound holds.

    Raises:
        InvalidValueError: a count or the confidence is out of range.

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


@dataclass(frozen=True)
class AuditBound:
    """A lower bound of epsilon, and the counts behind it.

    Attributes:
        threshold: a canary with a larger score was guessed to be present.
        present: number of canaries that were present.
        absent: number of canaries that were absent.
        misses: present canaries guessed to be absent.
        false_alarms: absent canaries guessed to be present.
        miss_bound: upper bound of the rate of misses.
        alarm_bound: upper bound of the rate of false alarms.
        mu: lower bound of mu.
        epsilon: lower bound of epsilon at ``delta``; a smaller claimed epsilon is false.
        delta: of the claim.
        confidence: of each of the two bounds of rates.
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
    """A lower bound of epsilon from the scores of canaries.

    The score of a present canary is 1 plus noise, that of an absent canary is noise alone.

    Args:
        present: scores of the canaries that were present.
        absent: scores of the canaries that were absent.
        delta: of the claim.
        thresholds: a canary with a larger score is guessed to be present. They must be fixed before
            the scores are known: a threshold chosen by the scores would need a wider bound. The
            default is the midpoint.
        confidence: of each bound of an error rate. With t thresholds, all 2 t bounds hold together
            with probability 1 - 2 t (1 - confidence) at least.

    Returns:
        The bound of the threshold with the largest epsilon.

    Raises:
        InvalidValueError: there are no scores, or ``delta`` or ``confidence`` is out of range.

    Example:
        >>> bound = audit_bound(np.full(500, 1.0), np.full(500, 0.0), 1e-5)
        >>> round(bound.epsilon, 1)  # no wrong guess among 1,000
        30.5
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
    # A score that is NaN counts as a wrong guess, which can only lower the bound.
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
        epsilon=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
    )
