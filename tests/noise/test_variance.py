"""Closed forms of the noise of gradients and updates, compared with simulation and by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from noisewise.errors import InvalidValueError
from noisewise.noise.variance import (
    aggregate_noise,
    common_factor,
    excess_noise,
    gradient_noise_variance,
    oracle_noise,
    signal_share,
    update_noise_variance,
)

P, C, Z, B = 50, 1.5, 0.8, 8


def noisy_gradients(rng: np.random.Generator, mean: np.ndarray, *, clip: bool, count: int):
    """[count, P] noisy batch gradients (eq. noisy_sg) of samples around ``mean``."""
    samples = mean + rng.normal(size=(count, B, P)) * (3.0 if clip else 0.01)
    if clip:  # effective for every sample: all are far longer than C
        samples *= C / np.linalg.norm(samples, axis=2, keepdims=True)
    noise = rng.normal(size=(count, P)) * C * Z
    return (samples.sum(axis=1) + noise) / B


@pytest.mark.parametrize("clip", [True, False])
def test_gradient_variance_against_simulation(clip: bool) -> None:
    rng = np.random.default_rng(1)
    mean = np.zeros(P)
    mean[0] = 20.0 if clip else 0.5  # clipped: ||G|| is two thirds of c
    draws = noisy_gradients(rng, mean, clip=clip, count=20_000)
    measured = draws.var(axis=0).sum()
    G = np.linalg.norm(draws.mean(axis=0))
    exact = gradient_noise_variance(
        P, C, Z, B, **({"mean_gradient_norm": G} if clip else {"gradient_variance": P * 1e-4 / B})
    )
    assert measured == pytest.approx(float(exact), rel=0.005)
    # Power: noise x 0.8, and the sampling part forgotten, are both seen.
    wrong = gradient_noise_variance(P, C, 0.8 * Z, B)
    assert abs(measured / float(wrong) - 1) > 0.1
    if clip:
        assert abs(measured / float(gradient_noise_variance(P, C, Z, B)) - 1) > 0.02
        assert (
            abs(measured / float(gradient_noise_variance(P, C, Z, B, mean_gradient_norm=0)) - 1)
            > 0.02
        )


def test_update_variance_against_simulation() -> None:
    rng = np.random.default_rng(2)
    steps, lr = 6, 0.05
    noise = rng.normal(size=(4000, steps, P)) * (lr * C * Z / B)
    measured = noise.sum(axis=1).var(axis=0).sum()
    assert measured == pytest.approx(float(update_noise_variance(P, steps, lr, C, Z, B)), rel=0.01)


def test_broadcasts_over_clients() -> None:
    got = update_noise_variance(10, [1, 2], 0.1, 1.0, [1.0, 2.0], [4, 8])
    assert got == pytest.approx([1 * 0.01 * 10 / 16, 2 * 0.01 * 10 * 4 / 64])


def test_update_of_the_figure() -> None:
    # Figure var_epsilon_b: K=1, N=2400, lr=0.01, c=3, p=28939; steps are ceil(N/b).
    got = update_noise_variance(28939, 75, 0.01, 3.0, 5.0, 32)
    assert float(got) == pytest.approx(75 * 1e-4 * 28939 * 9 * 25 / 1024)


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("clip_norm", {"clip_norm": 0.0}),
        ("noise_multiplier", {"noise_multiplier": float("nan")}),
        ("batch_size", {"batch_size": -1}),
        ("steps", {"steps": "many"}),
        ("learning_rate", {"learning_rate": float("inf")}),
        ("mean_gradient_norm", {"mean_gradient_norm": 2.0}),
        ("gradient_variance", {"mean_gradient_norm": 0.5, "gradient_variance": 1.0}),
    ],
)
def test_bad_values_are_named(field: str, kwargs: dict) -> None:
    good = {
        "p": 10, "steps": 1, "learning_rate": 0.1, "clip_norm": 1.0,
        "noise_multiplier": 1.0, "batch_size": 4,
    }  # fmt: skip
    with pytest.raises(InvalidValueError, match=field):
        update_noise_variance(**(good | kwargs))


def test_noise_of_the_aggregate() -> None:
    variance = [1.0, 4.0, 2.0]
    assert aggregate_noise([0.5, 0.25, 0.25], variance) == pytest.approx(0.25 + 0.25 + 0.125)
    assert oracle_noise(variance) == pytest.approx(1 / 1.75)
    best = np.array([1, 0.25, 0.5]) / 1.75
    assert aggregate_noise(best, variance) == pytest.approx(oracle_noise(variance))
    assert excess_noise(best, variance) == pytest.approx(1.0)
    assert excess_noise([1 / 3] * 3, variance) == pytest.approx(7 / 9 * 1.75)


def test_common_factor() -> None:
    assert common_factor([2.0, 4.4, 6.0, 0.0], [1.0, 2.0, 3.0, 0.0]) == pytest.approx(2.0)
    assert np.isnan(common_factor([1.0], [0.0]))
    with pytest.raises(InvalidValueError, match="estimate"):
        common_factor([1.0, 2.0], [1.0])


def test_noise_of_the_aggregate_at_the_edges() -> None:
    assert oracle_noise([0.0, 1.0]) == 0.0
    assert excess_noise([1.0, 0.0], [0.0, 1.0]) == 1.0
    assert excess_noise([0.5, 0.5], [0.0, 1.0]) == float("inf")
    assert aggregate_noise([1.0, 0.0], [2.0, np.inf]) == 2.0
    assert oracle_noise([2.0, np.inf]) == 2.0
    assert oracle_noise([1e-320, 1e-320]) == pytest.approx(5e-321, rel=0.01)
    with pytest.raises(InvalidValueError, match="weights"):
        aggregate_noise([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("weights", ([], [])), ("weights", ([1.0], [1.0, 2.0])), ("weights", (["a"], [1.0])),
        ("variance", ([1.0], ["a"])), ("steps", ([0.5, 0.5], [1.0, 2.0], [1, 2, 3])),
        ("steps", ([0.5, 0.5], [1.0, 2.0], [2])), ("steps", ([0.5, 0.5], [1.0, 2.0], "ab")),
        ("reference", ([0.5, 0.5], [1.0, 2.0], 1.0, [1.0, 2.0, 3.0])),
        ("reference", ([0.5, 0.5], [1.0, 2.0], 1.0, [1.0])),
        ("reference", ([0.5, 0.5], [1.0, 2.0], 1.0, [])),
    ],
)  # fmt: skip
def test_bad_shapes_of_a_signal_share_are_named(field: str, arguments: tuple) -> None:
    with pytest.raises(InvalidValueError) as error:
        signal_share(*arguments)
    assert error.value.field == field


def test_signal_share_where_all_is_noise() -> None:
    assert signal_share([0.5, 0.5], [np.inf, np.inf]) == 0.0
    assert signal_share([0.5, 0.5], [1.0, np.inf]) == 0.0
    assert signal_share([1.0, 0.0], [1.0, np.inf]) == pytest.approx(1.0)


@pytest.mark.parametrize("call", [oracle_noise, lambda v: excess_noise([], v)])
def test_no_clients_are_named(call: Callable[[list], float]) -> None:
    with pytest.raises(InvalidValueError, match="variance"):
        call([])


def test_weights_that_are_no_numbers_are_named() -> None:
    with pytest.raises(InvalidValueError, match="weights"):
        aggregate_noise(["a"], [1.0])  # type: ignore[list-item]
