"""Epsilon of steps with different (q, z), compared with closed forms, dp-accounting and sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import epsilon_of
from noisewise.privacy.composition import add_steps, composed_epsilon
from noisewise.privacy.spending_limit import SpendingLimit

Kinds = dict[tuple[float, float], int]
Epsilon = Callable[[Kinds, float], float]


def random_counts(count: int, seed: int) -> list[tuple[Kinds, float]]:
    """Two to four kinds of steps whose losses are of a similar order."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        kinds: Kinds = {}
        for _ in range(int(rng.integers(2, 5))):
            rate = 1.0 if rng.random() < 0.2 else float(10 ** rng.uniform(-2.3, -0.5))
            noise = float(rng.uniform(8, 40) if rate == 1 else rng.uniform(0.9, 6))
            kinds[rate, noise] = int(rng.integers(1, 20 if rate == 1 else 400))
        cases.append((kinds, float(10 ** rng.uniform(-7, -4))))
    return cases


def by_the_library(kinds: Kinds, delta: float, accountant: object) -> float:
    logging.getLogger("absl").setLevel(logging.ERROR)
    for (rate, noise), steps in kinds.items():
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, steps)  # type: ignore[attr-defined]
    return float(accountant.get_epsilon(delta))  # type: ignore[attr-defined]


def check_against_the_library(composed: Epsilon) -> None:
    """Never below a loss distribution on a much finer grid, and hardly above."""
    for kinds, delta in random_counts(3, seed=1):
        fine = by_the_library(kinds, delta, pld.PLDAccountant(value_discretization_interval=2e-4))
        ours = composed(kinds, delta)
        assert 0.9999 * fine <= ours <= 1.005 * fine, (kinds, delta, fine, ours)


def test_pld_against_a_finer_grid() -> None:
    check_against_the_library(composed_epsilon)


def forgets_one_kind(kinds: Mapping[tuple[float, float], int], delta: float) -> float:
    return composed_epsilon(dict(list(kinds.items())[1:]), delta)


def takes_the_mean_noise(kinds: Mapping[tuple[float, float], int], delta: float) -> float:
    steps = sum(kinds.values())
    rate = sum(q * n for (q, _), n in kinds.items()) / steps
    noise = sum(z * n for (_, z), n in kinds.items()) / steps
    return composed_epsilon({(rate, noise): steps}, delta)


def adds_up_epsilons(kinds: Mapping[tuple[float, float], int], delta: float) -> float:
    return sum(epsilon_of(*kind, steps, delta) for kind, steps in kinds.items())


@pytest.mark.parametrize("flaw", [forgets_one_kind, takes_the_mean_noise, adds_up_epsilons])
def test_a_wrong_sum_is_seen(flaw: Epsilon) -> None:
    with pytest.raises((AssertionError, AccountingError)):
        check_against_the_library(flaw)


def test_rdp_is_the_librarys() -> None:
    for kinds, delta in random_counts(4, seed=2):
        theirs = by_the_library(kinds, delta, rdp.RdpAccountant())
        assert composed_epsilon(kinds, delta, "rdp") == pytest.approx(theirs, rel=1e-9)


def test_pld_at_most_rdp_at_most_moments() -> None:
    for kinds, delta in random_counts(3, seed=3):
        found = [composed_epsilon(kinds, delta, name) for name in ("pld", "rdp", "moments")]
        assert found == sorted(found)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "moments"])
def test_one_kind_is_epsilon_of(accountant: str) -> None:
    """A plan that was calibrated for R rounds gets its R rounds from the ledger."""
    one = composed_epsilon({(0.02, 1.3): 700}, 1e-5, accountant)
    assert one == epsilon_of(0.02, 1.3, 700, 1e-5, accountant)


def test_gaussian_steps_have_a_closed_form() -> None:
    """At q = 1, mu^2 = sum of steps / z^2 (Dong, Roth and Su, 2019, corollary 3.3)."""
    kinds = {(1.0, 10.0): 7, (1.0, 3.0): 1, (1.0, 55.5): 40}
    mu = math.sqrt(sum(n / z**2 for (_, z), n in kinds.items()))

    def excess(e: float) -> float:
        return float(norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)) - 1e-6

    exact = brentq(excess, 1e-6, 50)
    assert exact <= composed_epsilon(kinds, 1e-6) <= 1.003 * exact


def test_more_steps_never_cost_less() -> None:
    counts: Mapping[tuple[float, float], int] = {(0.05, 2.0): 50, (0.2, 6.0): 30}
    last = 0.0
    for _ in range(12):
        now = composed_epsilon(counts, 1e-5)
        assert now > last
        last, counts = now, add_steps(counts, 0.05, 2.0, 10)


def test_noise_too_small_for_a_grid_falls_back_to_a_larger_bound() -> None:
    kinds = {(0.1, 0.1): 3, (0.1, 2.0): 10}
    assert composed_epsilon(kinds, 1e-5) == composed_epsilon(kinds, 1e-5, "rdp") > 100


def test_a_silent_accountant_is_no_free_round() -> None:
    """One nearly free step: the answer is that of the first multiple that is not 0."""
    silent = (0.01, 50.0)
    with pytest.raises(AccountingError):
        epsilon_of(*silent, 1, 1e-3)
    assert composed_epsilon({silent: 1}, 1e-3) > 0
    assert composed_epsilon({silent: 1, (0.02, 60.0): 1}, 1e-3) > 0
    assert composed_epsilon({}, 1e-3) == 0


@pytest.mark.parametrize(
    ("counts", "field"),
    [({(0.0, 1.0): 1}, "sample_rate"), ({(0.1, math.nan): 1}, "noise"), ({(0.1, 1.0): 0}, "steps"),
     ({(0.1, 1.0): 1.5}, "steps")],
)  # fmt: skip
def test_impossible_counts_are_named(counts: Kinds, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        composed_epsilon(counts, 1e-5)


# ---------------------------------------------------------------- the limit


def rounds_until_refused(limit: SpendingLimit, *costs: tuple[float, float, int]) -> Kinds:
    counts: Mapping[tuple[float, float], int] = {}
    number = 0
    while limit.allows(counts, *costs[number % len(costs)]):
        counts = add_steps(counts, *costs[number % len(costs)])
        number += 1
    return dict(counts)


def test_a_limit_grants_exactly_what_fits() -> None:
    cost = (0.02, 2.0, 10)
    limit = SpendingLimit(epsilon_of(0.02, 2.0, 37 * 10, 1e-5), 1e-5, "pld")
    assert limit.remaining({}, *cost) == 37
    assert rounds_until_refused(limit, *[cost]) == {(0.02, 2.0): 370}
    assert not limit.allows({(0.02, 2.0): 370}, *cost)
    assert limit.allows({(0.02, 2.0): 360}, *cost)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_plans_that_alternate_stay_within_and_use_it_up(accountant: str) -> None:
    costs = ((0.05, 2.0, 60), (0.02, 1.5, 90), (1.0, 30.0, 1))
    limit = SpendingLimit(3.0, 1e-5, accountant)
    counts = rounds_until_refused(limit, *costs)
    assert len(counts) == 3
    spent = composed_epsilon(counts, 1e-5, accountant)
    assert 2.6 < spent <= 3.0


def test_the_accountant_is_asked_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    fits = SpendingLimit._fits

    def counted(self: SpendingLimit, counts: Kinds) -> bool:
        asked.append(counts)
        return fits(self, counts)

    monkeypatch.setattr(SpendingLimit, "_fits", counted)
    limit = SpendingLimit(epsilon_of(1.0, 50.0, 500, 1e-5), 1e-5, "pld")
    assert rounds_until_refused(limit, (1.0, 50.0, 1)) == {(1.0, 50.0): 500}
    assert len(asked) < 40
