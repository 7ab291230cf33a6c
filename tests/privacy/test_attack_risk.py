"""The attacker's rates against a closed form and an independent computation of the likelihoods."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from noisewise.privacy import attack_risk
from noisewise.privacy.attack_risk import FALSE_POSITIVE_RATES, risk_of_budget, risk_of_steps
from noisewise.privacy.composition import Counts, composed_epsilon, kinds_of
from noisewise.privacy.pld_accountant import composed_distribution, grid_widths

DELTA = 1e-5
RATES = np.array(FALSE_POSITIVE_RATES)
TOLERANCE = 1e-4  # a statement prints hundredths of a percent


def bounds(counts: Counts) -> np.ndarray:
    """Rates and advantage of our bound."""
    risk = risk_of_steps(counts, composed_epsilon(counts, DELTA), DELTA)
    assert risk.source == "steps"
    return np.array([*risk.true_positive_rates, risk.advantage])


def exact_gaussian(mu: float) -> np.ndarray:
    return np.array([*ndtr(ndtri(RATES) + mu), 2 * ndtr(mu / 2) - 1])


@pytest.mark.parametrize(
    "counts",
    [{(1.0, 1.0): 1}, {(1.0, 50.0): 1}, {(1.0, 50.0): 30}, {(1.0, 0.3): 1},
     {(1.0, 5.0): 7, (1.0, 60.0): 10}, {(1.0, 0.1): 1}],
)  # fmt: skip
def test_gaussian_steps_have_the_rates_of_the_closed_form(counts: Counts) -> None:
    """Phi(Phi^-1(FPR) + mu) with mu^2 = sum of steps / z^2; never below it."""
    exact = exact_gaussian(math.sqrt(sum(steps / z**2 for (_, z), steps in counts.items())))
    found = bounds(counts)
    assert np.all(found >= exact)
    assert np.all(found <= exact + TOLERANCE)


def likelihood_rates(q: float, z: float, steps: int, width: float) -> np.ndarray:
    """Rates of the likelihood-ratio test, the best one, for each direction; then their maximum.

    Without dp-accounting: the loss log(1 - q + q exp((2x - 1) / 2z^2)) of many values x, rounded to
    a grid without changing its mean, has its probabilities under "absent" and "present" composed by
    Fourier transforms. The error is that of the rounding: steps width^2 / 4 in the loss's variance.
    """
    x = np.linspace(-12 * z, 12 * z + 1, 500_001)
    absent = np.exp(-(x**2) / (2 * z**2))
    present = (1 - q) * absent + q * np.exp(-((x - 1) ** 2) / (2 * z**2))
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2)) / width
    low = np.floor(loss).astype(int)
    start, share = int(low.min()), loss - low
    total = 1 << 20
    composed = []
    for density in (absent, present):
        density = density / density.sum()
        grid = np.bincount(low - start, density * (1 - share), total)
        grid += np.bincount(low - start + 1, density * share, total)
        composed.append(np.fft.irfft(np.fft.rfft(grid, total) ** steps, total))
    # The circle begins opposite of the mean, so that both tails are on their own side.
    mean = round(float(np.dot(loss, absent / absent.sum()) - start) * steps)
    under_absent, under_present = (np.roll(part, total // 2 - mean) for part in composed)
    says_present = [np.cumsum(part[::-1]) for part in (under_absent, under_present)]
    says_absent = [np.cumsum(part) for part in (under_present, under_absent)]
    rates = [np.interp(RATES, *says_present), np.interp(RATES, *says_absent)]
    advantage = np.max(says_present[1] - says_present[0])
    return np.array([*np.maximum(*rates), advantage])


@pytest.mark.parametrize(
    ("q", "z", "steps", "width"),
    [(0.001, 0.7, 20_000, 2e-5), (0.0133, 2.94, 15_000, 2e-5), (0.01, 1.0, 500, 2e-5),
     (0.01, 0.5, 3, 1e-4), (0.5, 5.0, 10, 2e-5), (0.9, 1.0, 3, 1e-4), (0.1, 4.0, 100, 2e-5)],
)  # fmt: skip
def test_sampled_steps_have_the_rates_of_the_likelihood_ratio(
    q: float, z: float, steps: int, width: float
) -> None:
    exact, found = likelihood_rates(q, z, steps, width), bounds({(q, z): steps})
    assert np.all(found >= exact - 5e-6)  # the error of the comparison
    assert np.all(found <= 1.002 * exact + TOLERANCE)


def test_the_comparison_itself_has_the_closed_form_without_sampling() -> None:
    exact = exact_gaussian(math.sqrt(10) / 5)
    assert likelihood_rates(1 - 1e-12, 5.0, 10, 2e-5) == pytest.approx(exact, abs=5e-6)


def test_kinds_of_steps_are_composed() -> None:
    """Parts of a plan give its rates; another kind of step adds to them."""
    one, both = bounds({(0.02, 3.0): 250}), bounds({(0.02, 3.0): 250, (1.0, 60.0): 10})
    more = bounds({(0.02, 3.0): 250, (1.0, 60.0): 10, (0.05, 2.0): 40})
    assert np.all(one < both)
    assert np.all(both < more)
    almost = bounds({(0.02, 3.0): 125, (0.02, 3.0 + 1e-9): 125})
    assert almost == pytest.approx(one, abs=TOLERANCE)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_comparison_sees_ten_percent_more_or_less_noise(factor: float) -> None:
    exact, found = likelihood_rates(0.01, 1.0, 500, 2e-5), bounds({(0.01, factor): 500})
    assert np.any((found < exact - 5e-6) | (found > 1.002 * exact + TOLERANCE))


def test_a_budget_alone_is_the_worst_case_of_every_mechanism_with_it() -> None:
    for counts in ({(1.0, 1.0): 1}, {(0.01, 1.0): 500}, {(0.5, 0.6): 5}):
        epsilon = composed_epsilon(counts, DELTA)
        risk = risk_of_budget(epsilon, DELTA)
        assert risk.source == "budget"
        assert np.all(bounds(counts) <= np.array([*risk.true_positive_rates, risk.advantage]))
    mild = risk_of_budget(1.0, 0.01)
    assert mild.true_positive_rates == pytest.approx([0.01 + math.e * a for a in RATES])
    assert mild.advantage == pytest.approx((math.e - 1 + 0.02) / (math.e + 1))


def test_nothing_spent_is_a_guess_and_a_huge_budget_certainty() -> None:
    assert risk_of_steps({}, 0.0, DELTA).true_positive_rates == FALSE_POSITIVE_RATES
    assert risk_of_steps({}, 0.0, DELTA).advantage == 0
    for risk in (risk_of_budget(1e4, DELTA), risk_of_steps({(0.5, 0.01): 10}, 9e3, DELTA)):
        assert (risk.true_positive_rates, risk.advantage) == ((1.0, 1.0, 1.0), 1.0)
        assert risk.source == "budget"


def test_steps_without_a_distribution_fall_back_to_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(attack_risk, "composed_distribution", fail)
    assert risk_of_steps({(0.01, 1.0): 500}, 1.5, DELTA) == risk_of_budget(1.5, DELTA)
    many = {(0.01, 1 + k / 100): 1 for k in range(65)}
    assert risk_of_steps(many, 1.5, DELTA) == risk_of_budget(1.5, DELTA)


def test_grids_are_those_of_the_accountant() -> None:
    kinds = kinds_of({(0.01, 1.0): 500})
    delta = composed_distribution(kinds, grid_widths(kinds)[-1], large=False)
    epsilon = composed_epsilon({(0.01, 1.0): 500}, DELTA)
    assert float(delta.get_delta_for_epsilon(epsilon)) <= DELTA * (1 + 1e-6)
