"""Epsilon over the rounds, composed round by round, compared with composing all steps at once."""

from __future__ import annotations

import numpy as np
import pytest

from noisewise.data import ClientSpec
from noisewise.privacy import LocalPlan, epsilon_of, make_plan
from noisewise.privacy.accounting import compose_rounds
from noisewise.privacy.spending import epsilon_spent, spending_curve

PLANS = {
    "paper": (ClientSpec("a", 2400, 32, 0.5, 1e-4), 40, "pld"),
    "small": (ClientSpec("a", 90, 11, 8.0, 1e-3), 20, "pld"),
    "no sampling": (ClientSpec("a", 50, 50, 4.0, 1e-3), 10, "pld"),
    "huge epsilon": (ClientSpec("a", 50, 10, 3000.0, 1e-3), 6, "pld"),
    "rdp": (ClientSpec("a", 90, 11, 2.0, 1e-3), 8, "rdp"),
    "moments": (ClientSpec("a", 90, 11, 2.0, 1e-3), 8, "moments"),
    "one round": (ClientSpec("a", 90, 11, 2.0, 1e-3), 1, "pld"),
}


def planned(name: str) -> LocalPlan:
    spec, rounds, accountant = PLANS[name]
    return make_plan(spec, rounds=rounds, clip_norm=1.0, accountant=accountant)


def check(plan: LocalPlan, curve: tuple[float, ...]) -> None:
    """Slow reference: within 0.5 % of composing everything anew, growing, at most the budget."""
    assert plan.budget is not None
    assert len(curve) == plan.rounds
    assert all(np.diff(curve) >= 0)
    assert curve[-1] <= plan.budget.epsilon
    for number in sorted({1, plan.rounds // 2, plan.rounds - 1, plan.rounds} - {0}):
        anew = epsilon_of(
            plan.sample_rate,
            plan.noise_multiplier,
            number * plan.steps_per_round,
            plan.budget.delta,
            plan.accountant,
        )
        assert curve[number - 1] == pytest.approx(anew, rel=5e-3)


@pytest.mark.parametrize("name", PLANS)
def test_curve_against_composing_anew(name: str) -> None:
    plan = planned(name)
    check(plan, spending_curve(plan))
    assert epsilon_spent(plan, plan.rounds) == spending_curve(plan)[-1]


def test_a_round_forgotten_is_seen() -> None:
    plan = planned("small")
    curve = spending_curve(plan)
    with pytest.raises(AssertionError):
        check(plan, (curve[0], *curve[:-1]))


def test_rounds_too_private_to_tell_report_a_later_one() -> None:
    """At a large delta one round alone has epsilon 0; we never say so."""
    spec = ClientSpec("a", 1000, 10, 0.02, 5e-2)
    plan = make_plan(spec, rounds=5, clip_norm=1.0)
    raw = list(
        compose_rounds(plan.sample_rate, plan.noise_multiplier, plan.steps_per_round, 4, 5e-2)
    )
    assert raw[0] == 0.0, "no zero to hide: the test has no power"
    curve = spending_curve(plan)
    assert all(e > 0 for e in curve)
    assert list(curve) == sorted(curve)
