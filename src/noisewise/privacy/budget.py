"""`PrivacyBudget`: what a client promises its records, and what a weak promise means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from noisewise.checks import fraction, positive_number
from noisewise.errors import InvalidValueError

__all__ = ["PrivacyBudget", "budget_warnings", "overall_guarantee"]

WEAK_EPSILON = 10.0
"""Above this, a promise is weak. Ponomareva et al., "How to DP-fy ML" (arXiv 2303.00654), call
epsilon <= 1 strong, <= 10 reasonable, and more than 10 weak to none."""

NO_EPSILON = 20.0
"""Above this, a promise protects practically nobody: e^20 is 485 million."""

LARGE_DELTA = 1e-4
"""Above this, delta is too large for 10,000 records; for where their number is not known."""


@dataclass(frozen=True)
class PrivacyBudget:
    """(epsilon, delta) for adding or removing one record of one client.

    No budget at all is written ``None`` where a type allows it; an infinite epsilon is an error.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        positive_number("epsilon", self.epsilon)
        fraction("delta", self.delta, one_allowed=False)


def budget_warnings(budget: PrivacyBudget, records: int | None = None) -> list[str]:
    """What is weak about a budget, with its consequence in plain words; nothing for a usual one.

    The consequence of epsilon is Bayes' rule: an attacker's odds that a record was used grow by at
    most e^epsilon. That of delta: a mechanism that publishes each record in full with probability
    delta is (0, delta)-private.

    Args:
        budget: the promise.
        records: the declared number of records; None if it is not known.

    Example:
        >>> budget_warnings(PrivacyBudget(2.0, 1e-6), records=2400)
        []
        >>> print(budget_warnings(PrivacyBudget(2.0, 0.01), records=2400)[0])
        delta = 0.01 is not below 1/records = 1/2400: publishing whole records at random, 24 of \
2400 on average, would keep this promise. Choose a delta far below 1/2400, for example 4e-06.
    """
    warnings = []
    epsilon, delta = budget.epsilon, budget.delta
    if epsilon > NO_EPSILON:
        warnings.append(
            f"epsilon = {epsilon:g}: practically no protection. {_odds(epsilon, 1e-6)} Choose an "
            f"epsilon of at most {WEAK_EPSILON:g}, better 1."
        )
    elif epsilon > WEAK_EPSILON:
        warnings.append(
            f"epsilon = {epsilon:g}: weak protection. {_odds(epsilon, 0.01)} Choose an epsilon of "
            f"at most {WEAK_EPSILON:g}, better 1."
        )
    if records is None and delta > LARGE_DELTA:
        warnings.append(
            f"delta = {delta:g} is large: publishing each record in full with probability "
            f"{delta:g} would keep this promise. Choose a delta far below 1/records."
        )
    elif records is not None and delta * records >= 1:
        warnings.append(
            f"delta = {delta:g} is not below 1/records = 1/{records}: publishing whole records at "
            f"random, {delta * records:.3g} of {records} on average, would keep this promise. "
            f"Choose a delta far below 1/{records}, for example {0.01 / records:.0e}."
        )
    return warnings


def _odds(epsilon: float, prior: float) -> str:
    """What e^epsilon means for an attacker who takes a record's use for this likely at first."""
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 700 else f"e^{epsilon:g}"
    doubt = (1 - prior) / prior * math.exp(-epsilon)  # odds against, after the reply
    sure = f"{100 / (1 + doubt):.4g}" if doubt > 1e-4 else "more than 99.99"
    return (
        "The replies may multiply an attacker's odds that a certain record was used by up to "
        f"{factor}: a guess of 1 in {1 / prior:,.0f} may become a certainty of {sure} %."
    )


def overall_guarantee(budgets: Iterable[PrivacyBudget]) -> PrivacyBudget:
    """The guarantee of the whole run: (max epsilon, max delta), by parallel composition.

    Source: the paper's theorem on local DP (thm:localdp). The clients' records must be disjoint.
    """
    budgets = tuple(budgets)
    if not budgets:
        raise InvalidValueError("budgets", budgets, "must hold at least one client's budget")
    return PrivacyBudget(max(b.epsilon for b in budgets), max(b.delta for b in budgets))
