"""Calibration of thousands of clients is fast, and safe even if our own estimates are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
from long_proofs import LONG_PROOFS

from noisewise.errors import AccountingError
from noisewise.privacy import PrivacyBudget, accounting, calibrate, calibration, epsilon_of
from noisewise.privacy.gaussian_dp import gaussian_mu
from noisewise.privacy.renyi_accountant import MOMENTS_ORDERS, RENYI
from noisewise.privacy.renyi_estimates import Conversion, renyi_divergences


@pytest.fixture(autouse=True)
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing cached, on disk or in memory, before or after."""
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))
    epsilon_of.cache_clear()
    yield
    epsilon_of.cache_clear()


def mechanisms(n: int, seed: int) -> list[tuple[float, float, int, float]]:
    """Random (q, z, steps, delta), from tame to extreme."""
    rng = np.random.default_rng(seed)
    return [
        (
            float(np.exp(rng.uniform(math.log(1e-4), math.log(0.9)))),
            float(np.exp(rng.uniform(math.log(0.4), math.log(60)))),
            int(np.exp(rng.uniform(0, math.log(20_000)))),
            float(10 ** rng.uniform(-8, -3)),
        )
        for _ in range(n)
    ]


def by_dp_accounting(
    orders: tuple[float, ...] | None, q: float, z: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every order, as dp-accounting has it."""
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)), steps)
    sound = np.isfinite(accountant.rdp) & (accountant.rdp > 0)
    return accountant.orders[sound], accountant.rdp[sound]


def test_estimates_are_dp_accountings_divergences() -> None:
    orders = RENYI["rdp"].orders
    for q, z, _, _ in mechanisms(60, seed=0):
        used, expected = by_dp_accounting(orders, q, z, 1)
        found = renyi_divergences(orders, q, z)[np.isin(orders, used)]
        large = (expected > 1e-9) & np.isfinite(found)  # below, both are rounding noise
        assert np.allclose(found[large], expected[large], rtol=1e-5), (q, z)
        # a series that one of the two gives up on is rare, and of a low order
        assert np.isfinite(found).mean() > 0.95
    assert np.array_equal(renyi_divergences((2.0, 4.5), 1.0, 2.0), [0.25, 0.5625])


@pytest.mark.parametrize("accountant", ["rdp", "moments"])
def test_few_orders_give_the_epsilon_of_all(accountant: str) -> None:
    for q, z, steps, delta in mechanisms(60, seed=1):
        orders, values = by_dp_accounting(
            None if accountant == "rdp" else MOMENTS_ORDERS, q, z, steps
        )
        if accountant == "rdp":
            expected = rdp.compute_epsilon(orders, values, delta)[0]
        else:
            expected = float(np.min(values + math.log(1 / delta) / (orders - 1)))
        if expected == 0:
            with pytest.raises(AccountingError):
                epsilon_of(q, z, steps, delta, accountant)
            continue
        assert epsilon_of(q, z, steps, delta, accountant) == pytest.approx(expected, rel=1e-9)


def test_a_wrong_choice_of_orders_is_loose_but_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    q, z, steps, delta = 0.01, 1.1, 5000, 1e-5
    right = epsilon_of(q, z, steps, delta, "rdp")
    epsilon_of.cache_clear()
    monkeypatch.setattr(Conversion, "promising", lambda self, *_: (2.0, 63.0))
    assert epsilon_of(q, z, steps, delta, "rdp") > 1.05 * right


def clients(n: int, seed: int = 0) -> list[tuple[PrivacyBudget, float, int]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        size, epsilon = int(rng.integers(200, 5000)), float(np.exp(rng.uniform(-1.2, 2.3)))
        batch = int(rng.integers(8, min(size, 256)))
        found.append((PrivacyBudget(epsilon, 1e-5), batch / size, 100 * math.ceil(size / batch)))
    return found


def check_safe_and_tight(population: list[tuple[PrivacyBudget, float, int]], name: str) -> None:
    for budget, q, steps in population:
        found = calibrate(budget, q, steps, name)
        assert found.epsilon == epsilon_of(q, found.noise_multiplier, steps, budget.delta, name)
        assert (1 - calibration.SLACK) * budget.epsilon <= found.epsilon <= budget.epsilon


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.0, 1.2, 4.0, math.nan, math.inf])
@pytest.mark.parametrize("accountant", ["rdp", "moments"])
def test_wrong_estimates_cost_time_and_nothing_else(
    factor: float, accountant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: divergences wrong by a factor. The answer is confirmed, so it stays right."""
    right = Conversion.estimates
    monkeypatch.setattr(Conversion, "estimates", lambda self, *a: factor * right(self, *a))
    check_safe_and_tight(clients(4, seed=3), accountant)


def count_evaluations(accountant: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that gets an item for each evaluation, also for those of ``pld`` on coarser grids."""
    evaluations: list[object] = []

    def counted(evaluate: Callable[..., float]) -> Callable[..., float]:
        return lambda *arguments: evaluations.append(arguments) or evaluate(*arguments)

    table = accounting.ACCOUNTANTS
    changed = {**table, accountant: counted(table[accountant])}
    monkeypatch.setattr(accounting, "ACCOUNTANTS", changed)
    on_grid = counted(calibration.pld_epsilon_on_grid)
    monkeypatch.setattr(calibration, "pld_epsilon_on_grid", on_grid)
    return evaluations


def test_one_evaluation_confirms_nearly_always(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = count_evaluations("rdp", monkeypatch)
    population = clients(60)
    for budget, q, steps in population:
        calibrate(budget, q, steps, "rdp")
    assert len(population) <= len(evaluations) <= 1.1 * len(population)


@pytest.mark.parametrize(("accountant", "most"), [("rdp", 1.2), ("moments", 2), ("pld", 6)])
def test_twenty_different_clients_cold(
    accountant: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few evaluations for each client, and none for the same clients again.

    benchmarks/calibration.py measures seconds.
    """
    evaluations = count_evaluations(accountant, monkeypatch)
    population = clients(20)
    found = [calibrate(budget, q, steps, accountant) for budget, q, steps in population]
    assert 20 <= len(evaluations) <= most * 20
    assert len({one.noise_multiplier for one in found}) == 20
    evaluations.clear()
    again = [calibrate(budget, q, steps, accountant) for budget, q, steps in population]
    assert evaluations == []
    assert again == found


@pytest.mark.slow
def test_ten_thousand_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are safe and tight, nearly all by one evaluation; in CI for every tenth of them."""
    evaluations = count_evaluations("rdp", monkeypatch)
    population = clients(10_000, seed=5)[:: 1 if LONG_PROOFS else 10]
    found = [calibrate(budget, q, steps, "rdp") for budget, q, steps in population]
    assert len(evaluations) <= 1.1 * len(population)
    for (budget, _, _), one in zip(population, found, strict=True):
        assert (1 - calibration.SLACK) * budget.epsilon <= one.epsilon <= budget.epsilon


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_mu_solves_its_equation(epsilon: float, delta: float) -> None:
    from scipy.stats import norm

    mu = gaussian_mu(epsilon, delta)
    left = norm.cdf(-epsilon / mu + mu / 2)
    right = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
    assert left - right == pytest.approx(delta, rel=1e-3)
