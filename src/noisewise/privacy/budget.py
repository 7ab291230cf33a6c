"""`PrivacyBudget`: what a client promises its records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noisewise.checks import fraction, positive_number
from noisewise.errors import InvalidValueError

__all__ = ["PrivacyBudget", "overall_guarantee"]


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


def overall_guarantee(budgets: Iterable[PrivacyBudget]) -> PrivacyBudget:
    """The guarantee of the whole run: (max epsilon, max delta), by parallel composition.

    Source: the paper's theorem on local DP (thm:localdp). The clients' records must be disjoint.
    """
    budgets = tuple(budgets)
    if not budgets:
        raise InvalidValueError("budgets", budgets, "must hold at least one client's budget")
    return PrivacyBudget(max(b.epsilon for b in budgets), max(b.delta for b in budgets))
