"""The epsilon that a plan has spent after a number of its rounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from noisewise.checks import non_negative_int
from noisewise.privacy.accounting import compose_rounds, epsilon_of
from noisewise.privacy.plan import LocalPlan

__all__ = ["epsilon_spent", "spending_curve"]


def epsilon_spent(plan: LocalPlan, rounds_done: int) -> float:
    """Epsilon after ``rounds_done`` rounds, at the budget's delta; inf without a budget.

    It is above 0 after the first round, never decreases, and is at most the budget's epsilon up to
    the planned number of rounds.

    Args:
        plan: of the client.
        rounds_done: number of rounds that the client took part in.

    Raises:
        InvalidValueError: ``rounds_done`` is negative or no whole number.
        AccountingError: the accountant has no valid epsilon for this number of rounds.

    Example:
        >>> from noisewise.data.specs import ClientSpec
        >>> from noisewise.privacy.plan import make_plan
        >>> plan = make_plan(ClientSpec("a", 600, 30, 1.0, 1e-5), rounds=2, clip_norm=1.0)
        >>> 0 < epsilon_spent(plan, 1) < epsilon_spent(plan, 2) <= 1.0
        True
    """
    non_negative_int("rounds_done", rounds_done)
    if rounds_done == 0:
        return 0.0
    if plan.budget is None:
        return math.inf
    if rounds_done < plan.rounds:
        return spending_curve(plan)[rounds_done - 1]
    return _from_all_steps(plan, rounds_done)


def _from_all_steps(plan: LocalPlan, rounds: int) -> float:
    assert plan.budget is not None
    steps = rounds * plan.steps_per_round
    return epsilon_of(
        plan.sample_rate, plan.noise_multiplier, steps, plan.budget.delta, plan.accountant
    )


@functools.lru_cache(maxsize=1 << 16)
def spending_curve(plan: LocalPlan) -> tuple[float, ...]:
    """Epsilon after 1, 2, ... of the planned rounds, each an upper bound.

    Rounds are composed one by one, which costs a tenth of composing all steps again for each. Early
    rounds can be so private that an accountant returns 0 at this delta. Their epsilon is then that
    of the first later round for which it returns more: more rounds never have a smaller epsilon.
    """
    last = _from_all_steps(plan, plan.rounds)
    curve = np.array([*_rounds(plan), last])
    curve[~(curve > 0)] = 0.0
    for index in range(len(curve) - 2, -1, -1):
        curve[index] = curve[index] or curve[index + 1]
    return tuple(float(e) for e in np.minimum(np.maximum.accumulate(curve), last))


def _rounds(plan: LocalPlan) -> Iterator[float]:
    """Epsilon after each round but the last."""
    assert plan.budget is not None
    return compose_rounds(
        plan.sample_rate,
        plan.noise_multiplier,
        plan.steps_per_round,
        plan.rounds - 1,
        plan.budget.delta,
        plan.accountant,
    )
