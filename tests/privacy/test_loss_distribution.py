"""Our faster loss distributions equal dp-accounting's, and calibration stays within its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import (
    PrivacyBudget,
    accounting,
    calibrate,
    calibration,
    epsilon_of,
    pld_accountant,
)
from noisewise.privacy import loss_distribution as ours

Distribution = ours.PrivacyLossDistribution
OneStep = Callable[[float, float, float], Distribution]
CASES = (
    (0.3, 0.8, 0.01), (1.0, 2.0, 0.005), (32 / 2400, 9.67, 1.6e-4), (1e-3, 0.7, 2e-4),
    (1e-4, 0.5, 4e-4), (1e-6, 0.3, 1e-3), (0.999, 30.0, 0.003), (1e-6, 40.0, 2e-9),
)  # fmt: skip


def dense(part: object) -> tuple[int, np.ndarray, float]:
    whole = part.to_dense_pmf()  # type: ignore[attr-defined]
    return whole._lower_loss, whole._probs, whole._infinity_mass


def check_one_step(make: OneStep) -> None:
    """Every probability is dp-accounting's."""
    for q, z, width in CASES:
        theirs = privacy_loss_distribution.from_gaussian_mechanism(
            z, value_discretization_interval=width, sampling_prob=q
        )
        found = make(q, z, width)
        for one, other in (
            (theirs._pmf_remove, found._pmf_remove),
            (theirs._pmf_add, found._pmf_add),
        ):
            (low, expected, infinite), (start, reached, beyond) = dense(one), dense(other)
            assert (low, infinite) == (start, beyond)
            # Bit for bit where NumPy treats one number as it treats an array of them.
            assert np.allclose(expected, reached, rtol=0, atol=1e-15 / width)


def test_one_step_is_dp_accountings() -> None:
    check_one_step(ours.one_step_distribution)


@pytest.mark.parametrize("flaw", [(1.01, 1.0), (1.0, 1.01)])
def test_another_mechanism_is_seen(flaw: tuple[float, float]) -> None:
    with pytest.raises(AssertionError):
        check_one_step(
            lambda q, z, width: ours.one_step_distribution(
                min(1.0, q * flaw[0]), z * flaw[1], width
            )
        )


def check_composition(compose: Callable[..., Distribution]) -> None:
    """Epsilon is dp-accounting's to rounding, whether few points or many."""
    for q, z, width in CASES:
        one = ours.one_step_distribution(q, z, width)
        for steps in (1, 2, 70, 3000):
            expected = one.self_compose(steps)
            for large in (False, True):
                found = compose(one, steps, large=large)
                for epsilon in (0.5, 2.0):
                    right = expected.get_delta_for_epsilon(epsilon)
                    reached = found.get_delta_for_epsilon(epsilon)
                    assert abs(reached - right) <= 1e-9 * right + 1e-15 * steps


def test_composition_is_dp_accountings() -> None:
    check_composition(ours.compose_steps)


def test_a_support_cut_too_close_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours._support

    def upper_part_lost(probabilities: np.ndarray, steps: int) -> tuple[int, int]:
        low, high = whole(probabilities, steps)
        return low, low + (high - low) // 2

    monkeypatch.setattr(ours, "_support", upper_part_lost)
    with pytest.raises(AssertionError):
        check_composition(ours.compose_steps)


def test_the_support_holds_all_but_the_tail() -> None:
    """Sums of 40 indices by brute force."""
    for q, z, width in ((1.0, 2.0, 0.1), (32 / 2400, 9.67, 1.6e-4), (0.3, 2.0, 0.05)):
        probabilities = dense(ours.one_step_distribution(q, z, width)._pmf_remove)[1]
        sums = np.ones(1)
        for _ in range(40):
            sums = np.convolve(sums, probabilities)
        low, high = ours._support(probabilities, 40)
        assert 0 < low < high < len(sums)
        assert sums[:low].sum() + sums[high + 1 :].sum() <= 1e-15


# ---------------------------------------------------------------- bounds


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing cached on disk."""
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))


@pytest.fixture
def idle(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accountant that must not be asked: a refusal computes nothing."""

    def computes(*_: object) -> float:
        raise AssertionError("the accountant computes")

    monkeypatch.setattr(accounting, "ACCOUNTANTS", dict.fromkeys(accounting.ACCOUNTANTS, computes))
    monkeypatch.setattr(calibration, "pld_epsilon_on_grid", computes)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sample_rate", {"sample_rate": 1e-12}),
        ("sample_rate", {"sample_rate": 0.99e-6}),
        ("steps", {"steps": 2**62}),
        ("steps", {"steps": 10**8 + 1}),
        ("delta", {"delta": 1e-300}),
        ("delta", {"delta": 1e-10, "steps": 10**6}),
    ],
)
def test_requests_out_of_bounds_are_refused_at_once(
    idle: None, field: str, change: dict[str, object]
) -> None:
    request = {"sample_rate": 0.01, "noise_multiplier": 1.0, "steps": 100, "delta": 1e-5}
    with pytest.raises(InvalidValueError, match=f"{field} = "):
        epsilon_of(**{**request, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "epsilon", "delta", "rate", "steps"),
    [
        ("sample_rate", 1.0, 1e-5, 1e-12, 10), ("steps", 1.0, 1e-5, 0.1, 2**62),
        ("steps", 1.0, 1e-5, 0.1, 10**7 + 1), ("epsilon", 10_001.0, 1e-5, 0.1, 10),
        ("epsilon", 0.0099, 1e-5, 0.1, 10), ("delta", 1.0, 1e-3, 1e-5, 99),
        ("delta", 1.0, 1e-14, 0.1, 1000),
    ],
)  # fmt: skip
def test_plans_out_of_bounds_are_refused_at_once(
    idle: None, field: str, epsilon: float, delta: float, rate: float, steps: int
) -> None:
    with pytest.raises(InvalidValueError, match=f"{field} = "):
        calibrate(PrivacyBudget(epsilon, delta), rate, steps)


def test_the_idle_accountant_notices_a_request_that_is_computed(idle: None) -> None:
    with pytest.raises(AssertionError, match="the accountant computes"):
        epsilon_of(0.01, 1.0, 101, 1e-5)
    with pytest.raises(AssertionError, match="the accountant computes"):
        calibrate(PrivacyBudget(1.0, 1e-5), 0.01, 101)


SLOWEST = (  # measured as the slowest of some hundred random plans
    (1.12, 4.5e-3, 7.33e-6, 4_370_651), (0.137, 1.6e-7, 7.56e-5, 10_886),
    (16.6, 5.6e-3, 8.0e-6, 2374), (0.853, 1.6e-8, 2.84e-5, 3033), (2.6, 2e-7, 0.968, 7_673_820),
)  # fmt: skip


@pytest.mark.parametrize(("epsilon", "delta", "rate", "steps"), SLOWEST)
def test_the_slowest_plans_are_calibrated(
    cold: None, epsilon: float, delta: float, rate: float, steps: int
) -> None:
    epsilon_of.cache_clear()
    ours.one_step_distribution.cache_clear()
    found = calibrate(PrivacyBudget(epsilon, delta), rate, steps)
    assert found.epsilon == epsilon_of(rate, found.noise_multiplier, steps, delta) <= epsilon
    handed_over = math.isclose(
        found.noise_multiplier, pld_accountant.SMALLEST_PLD_NOISE, rel_tol=1e-3
    )
    assert found.epsilon >= (1 - calibration.SLACK) * epsilon or handed_over


def test_rounding_comes_off_delta() -> None:
    """A million steps at delta 1e-9: a tail of 2.3e-10 may be rounding, so it is not counted on."""
    request = (0.01, 30.0, 10**6)
    width = pld_accountant.grid_widths((request,))[0]
    plain = pld_accountant.pld_epsilon_on_grid((request,), 1e-9 - 2.3e-10, width, large=False)
    assert pld_accountant.reduced_delta(1e-9, 10**6) == pytest.approx(7.7e-10)
    assert pld_accountant.reduced_delta(1e-4, 15_000) == 1e-4
    assert epsilon_of(*request, 1e-9) == pytest.approx(plain, rel=0.05)
    assert epsilon_of(*request, 1e-9) > epsilon_of(*request, 1.3e-9)


def test_an_accountant_that_fails_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> float:
        raise MemoryError

    table = {**accounting.ACCOUNTANTS, "pld": out_of_memory}
    monkeypatch.setattr(accounting, "ACCOUNTANTS", table)
    with pytest.raises(AccountingError, match="not a valid upper bound"):
        epsilon_of(0.0123, 1.0, 10, 1e-5)
