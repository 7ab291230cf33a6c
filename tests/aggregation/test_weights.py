"""Weights: the optimum with bounds compared with a quadratic program, and edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from noisewise.aggregation.weights import (
    inverse_variance_weights,
    noise_and_bias_weights,
    proportional_weights,
)
from noisewise.errors import InvalidValueError
from noisewise.noise.variance import aggregate_noise


def quadratic_program(variance: np.ndarray, floor: float, cap: float) -> np.ndarray:
    """Solve the same problem with a general solver."""
    n = variance.size
    scaled = variance / variance.mean()
    found = minimize(
        lambda w: float(np.sum(w**2 * scaled)),
        np.full(n, 1 / n),
        jac=lambda w: 2 * w * scaled,
        bounds=[(floor, cap)] * n,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return found.x


def clip_and_renormalise(variance: np.ndarray, floor: float, cap: float) -> np.ndarray:
    """A wrong method: clip the weights, then divide them by their sum."""
    w = np.clip(1 / variance / np.sum(1 / variance), floor, cap)
    return w / w.sum()


@pytest.mark.parametrize("seed", range(20))
def test_box_against_quadratic_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    variance = np.exp(rng.normal(0, 2, n))
    floor = float(rng.uniform(0, 0.9) / n)
    cap = float(rng.uniform(1.05 / n, 1.0))
    ours = inverse_variance_weights(variance, floor, cap)
    assert ours.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.all(ours >= floor - 1e-15)
    assert np.all(ours <= cap + 1e-15)
    other = quadratic_program(variance, floor, cap)
    assert aggregate_noise(ours, variance) <= aggregate_noise(other, variance) * (1 + 1e-9)
    assert ours == pytest.approx(other, abs=1e-4)


def test_box_test_has_power() -> None:
    variance, floor, cap = np.array([0.1, 1.0, 3.0, 9.0]), 0.1, 0.4
    wrong = clip_and_renormalise(variance, floor, cap)
    assert np.abs(wrong - quadratic_program(variance, floor, cap)).max() > 1e-2


def test_without_a_box_it_is_the_papers() -> None:
    v = np.array([3.0, 1.0, 0.5])
    assert inverse_variance_weights(v) == pytest.approx((1 / v) / np.sum(1 / v), rel=1e-14)


@pytest.mark.parametrize(
    ("variance", "floor", "cap", "expected"),
    [
        ([5.0], 0.0, 1.0, [1.0]),
        ([0.0], 0.0, 1.0, [1.0]),
        ([0.0, 1.0], 0.0, 1.0, [1.0, 0.0]),
        ([0.0, 1.0, 0.0], 0.0, 1.0, [0.5, 0.0, 0.5]),
        ([0.0, 0.0], 0.0, 1.0, [0.5, 0.5]),
        ([0.0, 1.0, 3.0], 0.0, 0.5, [0.5, 0.375, 0.125]),
        ([0.0, 1.0, 3.0], 0.1, 1.0, [0.8, 0.1, 0.1]),
        ([1.0, np.inf], 0.0, 1.0, [1.0, 0.0]),
        ([1.0, np.inf], 0.1, 1.0, [0.9, 0.1]),
        ([1.0, np.inf, np.inf], 0.0, 0.6, [0.6, 0.2, 0.2]),
        ([0.0, 1.0, np.inf], 0.0, 0.4, [0.4, 0.4, 0.2]),
        ([1.0, 1.0, 1.0], 1 / 3, 1 / 3, [1 / 3] * 3),
        ([1.0, 9.0, 9.0], 0.0, 1 / 3, [1 / 3] * 3),
        ([1e-320, 1.0], 0.0, 0.7, [0.7, 0.3]),
        ([1e300, 1e308], 0.0, 1.0, [1.0, 1e-8]),
    ],
)
def test_edges(variance: list, floor: float, cap: float, expected: list) -> None:
    got = inverse_variance_weights(variance, floor, cap)
    assert got == pytest.approx(expected, abs=1e-7)
    assert got.sum() == pytest.approx(1.0, abs=1e-14)


def test_zero_variance_is_the_limit() -> None:
    v = np.array([0.0, 2.0, 0.0, 5.0])
    for floor, cap in [(0.0, 1.0), (0.05, 0.45), (0.0, 0.3)]:
        at_zero = inverse_variance_weights(v, floor, cap)
        assert at_zero == pytest.approx(inverse_variance_weights(v + 1e-12, floor, cap), abs=1e-9)


def test_permuting_clients_permutes_weights() -> None:
    v, order = np.array([3.0, 1.0, 0.2, 8.0]), [2, 0, 3, 1]
    got = inverse_variance_weights(v, 0.05, 0.5)
    assert inverse_variance_weights(v[order], 0.05, 0.5) == pytest.approx(got[order], rel=1e-14)


@pytest.mark.parametrize(
    ("field", "args"),
    [
        ("cap", ([1.0, 1.0, 1.0], 0.0, 0.3)),
        ("floor", ([1.0, 1.0, 1.0], 0.4, 1.0)),
        ("floor", ([1.0, 1.0], -0.1, 1.0)),
        ("cap", ([1.0, 1.0], 0.0, float("nan"))),
        ("variance", ([], 0.0, 1.0)),
        (r"variance\[1\]", ([1.0, -2.0], 0.0, 1.0)),
        (r"variance\[0\]", ([float("nan")], 0.0, 1.0)),
        ("variance", ([np.inf, np.inf], 0.0, 1.0)),
    ],
)
def test_impossible_boxes_are_named(field: str, args: tuple) -> None:
    with pytest.raises(InvalidValueError, match=field):
        inverse_variance_weights(*args)


def test_proportional() -> None:
    assert proportional_weights([1, 3]) == pytest.approx([0.25, 0.75])
    assert proportional_weights([0.0, 1e308, 1e308]) == pytest.approx([0, 0.5, 0.5])
    with pytest.raises(InvalidValueError, match="values"):
        proportional_weights([0.0, 0.0])


@pytest.mark.parametrize("cap", [float("nan"), 0.3, -1.0])
def test_impossible_caps_are_named_where_noise_meets_bias(cap: float) -> None:
    for spread in (0.0, 1.0):
        with pytest.raises(InvalidValueError, match="cap"):
            noise_and_bias_weights([1.0, 4.0], spread, None, cap)


@pytest.mark.parametrize("cap", [1.5, float("inf")])
def test_a_cap_above_one_is_none(cap: float) -> None:
    v = [1.0, 4.0, np.inf]
    for spread in (0.0, 1.0):
        wanted = noise_and_bias_weights(v, spread)
        assert noise_and_bias_weights(v, spread, None, cap) == pytest.approx(wanted)
    assert inverse_variance_weights(v, 0.0, cap) == pytest.approx([0.8, 0.2, 0.0])


def test_a_spread_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidValueError, match="spread"):
        noise_and_bias_weights([1.0, 4.0], "much")  # type: ignore[arg-type]
    assert noise_and_bias_weights([1.0, 4.0], np.float64(0)) == pytest.approx([0.8, 0.2])
