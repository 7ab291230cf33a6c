"""`PrivacyBudget`: (epsilon, delta) of a client or site, and warnings about weak budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from noisewise.checks import fraction, positive_number
from noisewise.errors import InvalidValueError

__all__ = ["PrivacyBudget", "budget_warnings", "overall_guarantee"]

WEAK_EPSILON = 10.0
"""Above this epsilon, protection is weak. Ponomareva et al., "How to DP-fy ML" (arXiv 2303.00654),
call epsilon <= 1 strong, <= 10 reasonable, and more than 10 weak to none."""

NO_EPSILON = 20.0
"""Above this epsilon, there is practically no protection: e^20 is 485 million."""

LARGE_DELTA = 1e-4
"""Above this, delta is too large for 10,000 records; used if the number of records is unknown."""


@dataclass(frozen=True)
class PrivacyBudget:
    """(epsilon, delta) for adding or removing one record, or one person, of one client.

    Training without a budget is written as ``None``; an infinite epsilon is an error.

    Raises:
        InvalidValueError: epsilon is not a finite number above 0, or delta not between 0 and 1.

    Example:
        >>> PrivacyBudget(epsilon=1.0, delta=1e-5)
        PrivacyBudget(epsilon=1.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        positive_number("epsilon", self.epsilon)
        fraction("delta", self.delta, one_allowed=False)


def budget_warnings(
    budget: PrivacyBudget, records: int | None = None, unit: str = "record"
) -> list[str]:
    """Warnings about a weak budget, each with its consequence; an empty list for a usual budget.

    By Bayes' rule, an attacker's odds that a record was used grow by at most e^epsilon. A mechanism
    that publishes each record in full with probability delta is (0, delta)-private.

    Args:
        budget: of a client or site.
        records: the declared number of records, or of persons; None if it is unknown.
        unit: what the budget protects, "record" or "person".

    Example:
        >>> budget_warnings(PrivacyBudget(2.0, 1e-6), records=2400)
        []
        >>> print(budget_warnings(PrivacyBudget(2.0, 0.01), records=2400)[0])
        delta = 0.01 is not below 1/records = 1/2400: publishing whole records at random, 24 of \
2400 on average, would satisfy this delta. Choose a delta far below 1/2400, for example 4e-06.
    """
    warnings = []
    epsilon, delta = budget.epsilon, budget.delta
    if epsilon > NO_EPSILON:
        warnings.append(
            f"epsilon = {epsilon:g}: practically no protection. {_odds(epsilon, 1e-6, unit)} "
            f"Choose an epsilon of at most {WEAK_EPSILON:g}, better 1."
        )
    elif epsilon > WEAK_EPSILON:
        warnings.append(
            f"epsilon = {epsilon:g}: weak protection. {_odds(epsilon, 0.01, unit)} Choose an "
            f"epsilon of at most {WEAK_EPSILON:g}, better 1."
        )
    if records is None and delta > LARGE_DELTA:
        warnings.append(
            f"delta = {delta:g} is large: publishing each {unit} in full with probability "
            f"{delta:g} would satisfy this delta. Choose a delta far below 1/{unit}s."
        )
    elif records is not None and delta * records >= 1:
        warnings.append(
            f"delta = {delta:g} is not below 1/{unit}s = 1/{records}: publishing whole {unit}s at "
            f"random, {delta * records:.3g} of {records} on average, would satisfy this delta. "
            f"Choose a delta far below 1/{records}, for example {0.01 / records:.0e}."
        )
    return warnings


def _odds(epsilon: float, prior: float, unit: str) -> str:
    """What e^epsilon means for an attacker whose first guess has the probability ``prior``."""
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 700 else f"e^{epsilon:g}"
    odds_against = (1 - prior) / prior * math.exp(-epsilon)  # after the replies
    posterior = f"{100 / (1 + odds_against):.4g}" if odds_against > 1e-4 else "more than 99.99"
    return (
        f"The replies can multiply an attacker's odds that a given {unit} was used by up to "
        f"{factor}: a guess of 1 in {1 / prior:,.0f} can become a probability of {posterior} %."
    )


def overall_guarantee(budgets: Iterable[PrivacyBudget]) -> PrivacyBudget:
    """The guarantee of the whole run: (max epsilon, max delta), by parallel composition.

    The clients' records must be disjoint. Source: the paper's theorem on local DP (thm:localdp).

    Raises:
        InvalidValueError: there is no budget.
    """
    budgets = tuple(budgets)
    if not budgets:
        raise InvalidValueError("budgets", budgets, "must contain at least one client's budget")
    return PrivacyBudget(max(b.epsilon for b in budgets), max(b.delta for b in budgets))
