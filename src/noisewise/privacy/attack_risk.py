"""Epsilon and delta as risk: how well the best attacker can tell whether a record was used.

The attacker sees everything that left the site, knows all other records, and says for a record
whether it was in the dataset. Its true-positive rate is the share of the records in the dataset
that it names; its false-positive rate the share of the records not in the dataset that it names.

If an output is (epsilon, delta)-DP, the attacker's rates satisfy two inequalities (Dong, Roth and
Su, 2022, equation 5; `_risk`). They hold at every point of the privacy profile delta(epsilon) of
the composed steps, so the smallest of the resulting bounds is an upper bound of the true-positive
rate, and with many points it is the rate of the best attacker.

benchmarks/test_attack_risk_riskcal.py compares with the package riskcal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from noisewise.privacy.composition import MOST_KINDS, Counts, kinds_of, merge_unsampled
from noisewise.privacy.pld_accountant import (
    ROUNDING_PER_STEP,
    StepKinds,
    composed_distribution,
    fits_in_memory,
    grid_widths,
)
from noisewise.privacy.renyi_estimates import Array

__all__ = ["FALSE_POSITIVE_RATES", "AttackRisk", "risk_of_budget", "risk_of_steps"]

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
"""The false-positive rates at which statements give the attacker's true-positive rate."""

_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-5, 10.0, 3000)])
"""Points of the privacy profile. Beyond 10 both inequalities are within 5e-5 of a rate of 1."""

_LARGEST_EPSILON = 700.0
"""Above it the exponential overflows; all rates are 1 in float64 long before."""


@dataclass(frozen=True)
class AttackRisk:
    """Upper bounds for every attacker, whatever it computes.

    Attributes:
        true_positive_rates: the largest possible, one for each of `FALSE_POSITIVE_RATES`.
        advantage: the largest possible difference of true-positive and false-positive rate.
        source: ``steps`` if computed from the noise and sampling of all steps, ``budget`` if from
            epsilon and delta alone, which is the worst case of every mechanism with this budget.
    """

    true_positive_rates: tuple[float, ...]
    advantage: float
    source: Literal["steps", "budget"]


def risk_of_budget(epsilon: float, delta: float) -> AttackRisk:
    """The risk of an (epsilon, delta) budget if nothing else is known about the mechanism.

    Example:
        >>> [round(rate, 3) for rate in risk_of_budget(1.0, 1e-6).true_positive_rates]
        [0.003, 0.027, 0.272]
    """
    point = np.array([min(float(epsilon), _LARGEST_EPSILON)])
    return _risk(point, np.array([delta]), "budget")


def risk_of_steps(counts: Counts, epsilon: float, delta: float) -> AttackRisk:
    """The risk of all steps together.

    Args:
        counts: number of steps by (sample_rate, noise_multiplier); none gives the rates of a guess.
        epsilon: an upper bound of the steps' epsilon at ``delta``, see
            `noisewise.privacy.composition.composed_epsilon`. The result uses it alone if the steps
            have no loss distribution of bounded size.
        delta: of the budget.

    Example:
        >>> risk = risk_of_steps({(1.0, 1.0): 1}, 4.377, 1e-5)  # one release, as much noise as c
        >>> [round(rate, 3) for rate in risk.true_positive_rates]
        [0.018, 0.092, 0.389]
        >>> round(risk.advantage, 3)
        0.383
    """
    if not counts:
        return AttackRisk(FALSE_POSITIVE_RATES, 0.0, "steps")
    kinds = merge_unsampled(kinds_of(counts))
    if len(kinds) > MOST_KINDS or not fits_in_memory(kinds):
        return risk_of_budget(epsilon, delta)
    try:
        deltas = _privacy_profile(kinds)
    except (ArithmeticError, ValueError, MemoryError):
        return risk_of_budget(epsilon, delta)
    if not np.all(np.isfinite(deltas)):
        return risk_of_budget(epsilon, delta)
    points = np.append(_EPSILONS, min(float(epsilon), _LARGEST_EPSILON))
    return _risk(points, np.append(deltas, delta), "steps")


def _privacy_profile(kinds: StepKinds) -> Array:
    """Upper bounds of delta at `_EPSILONS`, the larger of adding and removing a record."""
    widths = grid_widths(kinds)
    with np.errstate(over="ignore"):
        total = composed_distribution(kinds, widths[-1], large=len(widths) > 1)
        deltas: Array = np.asarray(total.get_delta_for_epsilon(_EPSILONS), dtype=float)
    rounding = ROUNDING_PER_STEP * sum(steps for _, _, steps in kinds)
    return np.minimum(deltas + rounding, 1.0)


def _risk(epsilons: Array, deltas: Array, source: Literal["steps", "budget"]) -> AttackRisk:
    """The smallest bound that any of the points of a privacy profile gives.

    At (epsilon, delta) and false-positive rate a, the true-positive rate is at most
    min(delta + exp(epsilon) a, 1 - exp(-epsilon) (1 - delta - a)), and its difference from a at
    most (exp(epsilon) - 1 + 2 delta) / (exp(epsilon) + 1), where the two terms meet.
    """
    ratios = np.exp(epsilons)
    rates = []
    for rate in FALSE_POSITIVE_RATES:
        bounds = np.minimum(deltas + ratios * rate, 1.0 - (1.0 - deltas - rate) / ratios)
        rates.append(max(rate, min(1.0, float(np.min(bounds)))))
    advantages = (ratios - 1.0 + 2.0 * deltas) / (ratios + 1.0)
    return AttackRisk(tuple(rates), min(1.0, float(np.min(advantages))), source)
