"""Signal scales are accurate if the common signal is strong, and 1 if it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.noise import SignalTracker, signal_share

P, N = 4000, 12
STEPS = np.array([1.0, 2, 4, 8] * 3)
VARIANCE = np.geomspace(2, 60, N)
Vector = NDArray[np.float64]


def rounds(strength: float, number: int, seed: int = 0) -> list[Vector]:
    """Updates with a common signal, which has a new direction in each round."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        direction = rng.normal(size=(P, 1)) * strength / np.sqrt(P)
        found.append(direction * STEPS + rng.normal(size=(P, N)) * np.sqrt(VARIANCE / P))
    return found


def scales(played: list[Vector], members: list[list[int]] | None = None) -> Vector:
    state: dict[str, NDArray[np.float64]] = {}
    for number, updates in enumerate(played):
        here = list(range(N)) if members is None else members[number]
        found, following = SignalTracker().estimate(
            torch.from_numpy(updates[:, here]), [f"c{k}" for k in here], VARIANCE[here], state
        )
        state = dict(following)
    return found


def share(found: Vector) -> float:
    return signal_share(found / VARIANCE, VARIANCE, STEPS)


def test_a_clear_signal_gives_the_steps() -> None:
    assert scales(rounds(3.0, 5)) == pytest.approx(STEPS / np.median(STEPS), rel=0.05)


@pytest.mark.parametrize("strength", [0.01, 0.0])
def test_without_a_clear_signal_all_count_alike(strength: float) -> None:
    assert np.array_equal(scales(rounds(strength, 40)), np.ones(N))


@pytest.mark.parametrize("strength", [0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_a_weak_signal_is_never_worse_than_none(strength: float, seed: int) -> None:
    plain = signal_share(inverse_variance_weights(VARIANCE), VARIANCE, STEPS)
    for number in (1, 5, 20, 40):
        assert share(scales(rounds(strength, number, seed))) >= plain - 0.02


def test_rounds_add_up() -> None:
    one, many = (share(scales(rounds(0.5, number))) for number in (1, 30))
    assert many > max(0.97, one)


def test_clients_may_come_and_go() -> None:
    members = [[k for k in range(N) if (k + number) % 3] for number in range(30)]
    found = scales(rounds(2.0, 30), members)
    steps = STEPS[members[-1]]
    assert found == pytest.approx(steps / np.median(steps), rel=0.25)


def test_alone_or_without_noise_nothing_is_known() -> None:
    lone, _ = SignalTracker().estimate(torch.ones(5, 1), ["a"], np.array([1.0]), {})
    assert lone.tolist() == [1.0]
    silent, _ = SignalTracker().estimate(torch.ones(5, 2), ["a", "b"], np.zeros(2), {})
    assert silent.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("known", [0, 1])
def test_a_round_whose_noise_is_not_known_says_nothing(known: int) -> None:
    ids, state = [f"c{k}" for k in range(N)], {}
    for updates in rounds(3.0, 3):
        _, state = SignalTracker().estimate(torch.from_numpy(updates), ids, VARIANCE, state)
    variance = np.where(np.arange(N) < known, VARIANCE, 0.0)
    found, _ = SignalTracker().estimate(
        torch.zeros(P, N, dtype=torch.float64), ids, variance, state
    )
    assert np.array_equal(found, np.ones(N))
