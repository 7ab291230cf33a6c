"""`plan_with_releases`: training and other releases together use one budget and stay within it."""

from __future__ import annotations

import math

import pytest

from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.privacy.accounting import epsilon_of
from noisewise.privacy.composition import composed_epsilon
from noisewise.privacy.plan import LocalPlan, make_plan, non_private_plan
from noisewise.privacy.shared_budget import plan_with_releases


def plan_for(epsilon: float, batch: int, rounds: int, accountant: str = "pld") -> LocalPlan:
    spec = ClientSpec("a", n_examples=600, batch_size=batch, epsilon=epsilon, delta=1e-5)
    return make_plan(spec, rounds=rounds, clip_norm=1.0, accountant=accountant)


def spent(plan: LocalPlan, others: dict[tuple[float, float], int]) -> float:
    steps = plan.rounds * plan.steps_per_round
    counts = {(plan.sample_rate, plan.noise_multiplier): steps, **others}
    return composed_epsilon(counts, 1e-5, plan.accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("epsilon", "batch", "rounds", "noise", "releases"),
    [(0.5, 30, 50, 100.0, 20), (2.0, 30, 20, 20.0, 5), (8.0, 60, 3, 3.0, 2), (2.0, 30, 20, 1e4, 1)],
)
def test_both_fit_and_little_is_left(
    accountant: str, epsilon: float, batch: int, rounds: int, noise: float, releases: int
) -> None:
    alone = plan_for(epsilon, batch, rounds, accountant)
    others = {(1.0, noise): releases}
    shared = plan_with_releases(alone, others)
    assert 0.985 * epsilon < spent(shared, others) <= epsilon
    if noise < 1e4:
        assert spent(alone, others) > epsilon  # without more noise it would not fit
    assert plan_with_releases(alone, others) == shared  # a redelivery needs the very same plan


def test_without_sampling_it_is_the_closed_form() -> None:
    """Gaussian steps add up as 1 / z^2: T / z^2 + R / m^2 = 1 / s^2, s for the whole budget."""
    alone = plan_for(1.0, 600, 10)
    assert alone.sample_rate == 1
    noise, releases = 40.0, 8
    shared = plan_with_releases(alone, {(1.0, noise): releases})
    whole = 10 / alone.noise_multiplier**2
    exact = math.sqrt(10 / (whole - releases / noise**2))
    assert shared.noise_multiplier == pytest.approx(exact, rel=5e-3)
    steps = 10 / shared.noise_multiplier**2 + releases / noise**2
    assert epsilon_of(1.0, steps**-0.5, 1, 1e-5, "pld") <= 1.0


def test_what_leaves_no_room_is_refused_and_nothing_asks_for_none() -> None:
    plan = plan_for(1.0, 30, 10)
    assert plan_with_releases(plan, {}) is plan
    with pytest.raises(InvalidValueError, match=r"of the budget's epsilon 1;"):
        plan_with_releases(plan, {(1.0, 1.0): 5})
    spec = ClientSpec("a", n_examples=600, batch_size=30, epsilon=1.0, delta=1e-5)
    with pytest.raises(InvalidValueError, match="must have a budget"):
        plan_with_releases(non_private_plan(spec, rounds=3), {(1.0, 50.0): 1})
