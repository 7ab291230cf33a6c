"""Estimates over rounds: averaging, schedules, new clients, changed noise levels, exact state."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from matrices import planted

from noisewise.errors import InvalidValueError, UpdateError
from noisewise.noise.estimate import NoiseEstimate, WarmStart
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.variance import excess_noise


@dataclass
class Scripted:
    """Returns given values, and counts the calls."""

    answers: list[list[float]]
    name: str = "scripted"
    asked: int = field(default=0)

    def estimate(self, updates: np.ndarray) -> NoiseEstimate:
        self.asked += 1
        return NoiseEstimate(np.array(self.answers[self.asked - 1], dtype=float), self.name)


def play(tracker: NoiseTracker, rounds: list[list[str]]) -> list[np.ndarray]:
    state, seen = {}, []
    for ids in rounds:
        estimate, state = tracker.estimate(np.ones((3, len(ids))), ids, state)
        seen.append(estimate.variance)
    return seen


def inverse(variance: np.ndarray) -> np.ndarray:
    return (1 / variance) / np.sum(1 / variance)


def test_gets_better_round_by_round() -> None:
    rng = np.random.default_rng(0)
    p, n, rounds = 100, 8, 16
    truth = np.geomspace(1, 50, n)
    tracker, plain = NoiseTracker(Norm()), NoiseTracker(Norm(), memory=1)
    state, raw_state = {}, {}
    smooth, raw = [], []
    ids = [f"c{i}" for i in range(n)]
    for _ in range(rounds):
        updates = rng.normal(size=(p, n)) * np.sqrt(truth / p)
        estimate, state = tracker.estimate(updates, ids, state)
        smooth.append(excess_noise(inverse(estimate.variance), truth))
        estimate, raw_state = plain.estimate(updates, ids, raw_state)
        raw.append(excess_noise(inverse(estimate.variance), truth))
        assert np.array_equal(estimate.variance, Norm().estimate(updates).variance)
    assert np.mean(smooth[-5:]) - 1 < 0.3 * (np.mean(raw) - 1)


@pytest.mark.parametrize(("every", "asked"), [(1, 6), (2, 3), (4, 2), ("first", 1)])
def test_how_often_it_estimates(every: object, asked: int) -> None:
    scripted = Scripted([[1.0, 2.0]] * 6)
    play(NoiseTracker(scripted, every=every), [["a", "b"]] * 6)
    assert scripted.asked == asked


def test_first_keeps_the_first() -> None:
    scripted = Scripted([[1.0, 2.0], [100.0, 100.0, 3.0]])
    seen = play(NoiseTracker(scripted, every="first"), [["a", "b"], ["b"], ["a", "b", "c"], ["c"]])
    assert seen[1] == pytest.approx([2.0])
    # The second estimate is 50 to 100 times the first in common; c is put on the same scale.
    assert seen[2][1] / seen[2][0] == pytest.approx(2.0)
    assert seen[2][2] / seen[2][0] == pytest.approx(3 / np.sqrt(100 * 50))


def test_late_joiner_is_estimated_at_once() -> None:
    scripted = Scripted([[1.0, 2.0], [1.0, 2.0, 7.0]])
    seen = play(NoiseTracker(scripted, every=10), [["a", "b"], ["a", "b", "new"], ["new", "a"]])
    assert scripted.asked == 2
    assert seen[2] == pytest.approx([7.0, 1.0])


def test_common_factor_does_not_disturb() -> None:
    # A learning rate that halves in each round changes all variances by 4, but no weight.
    levels = np.array([1.0, 3.0, 9.0])
    scripted = Scripted([list(levels * 0.25**t) for t in range(5)])
    seen = play(NoiseTracker(scripted), [["a", "b", "c"]] * 5)
    for t, variance in enumerate(seen):
        assert variance == pytest.approx(levels * 0.25**t)


def test_changed_level_is_taken_over() -> None:
    scripted = Scripted([[1.0, 2.0, 4.0]] * 5 + [[1.0, 2.0, 40.0]] * 2)
    seen = play(NoiseTracker(scripted), [["a", "b", "c"]] * 7)
    assert seen[4] == pytest.approx([1, 2, 4])
    assert seen[5] == pytest.approx([1, 2, 40])
    # Power: without the check, the old level would remain for several rounds.
    lingering = Scripted([[1.0, 2.0, 4.0]] * 5 + [[1.0, 2.0, 40.0]] * 2)
    slow = play(NoiseTracker(lingering, change=1e6), [["a", "b", "c"]] * 7)
    assert slow[5][2] < 20


def test_factor_model_starts_from_what_is_known() -> None:
    case = planted(6000, 10, rank=2, signal=1.0)
    ids = [f"c{i}" for i in range(10)]
    tracker = NoiseTracker(Factor(), memory=1)
    cold, state = tracker.estimate(case.updates, ids, {})
    warm, _ = tracker.estimate(case.updates, ids, state)
    assert np.array_equal(cold.variance, Factor().estimate(case.updates).variance)
    assert warm.variance == pytest.approx(cold.variance, rel=0.01)


class Cold:
    """Your own estimator without a warm start; records the starts."""

    name = "own"

    def __init__(self) -> None:
        self.starts: list[list[float] | None] = []

    def estimate(self, updates: np.ndarray) -> NoiseEstimate:
        self.starts.append(None)
        return NoiseEstimate((updates**2).sum(axis=0), self.name)


class Warm(Cold):
    """Your own estimator with a warm start, without a base class of the package."""

    def estimate_from(self, updates: np.ndarray, start: np.ndarray) -> NoiseEstimate:
        self.starts.append([float(value) for value in start])
        return NoiseEstimate((updates**2).sum(axis=0), self.name)


def starts_of(estimator: Cold) -> list[list[float] | None]:
    tracker, state = NoiseTracker(estimator), {}
    levels = {"a": 1.0, "b": 4.0, "c": 9.0}
    for ids in (["a", "b"], ["b", "a"], ["a", "c"], ["c", "b", "a"]):
        _, state = tracker.estimate(np.sqrt([[levels[client] for client in ids]]), ids, state)
    return estimator.starts


def test_an_own_estimator_starts_from_what_is_known_of_these_clients() -> None:
    first, second, third, fourth = starts_of(Warm())
    assert (first, third) == (None, None)  # a, b and c are new
    assert second == pytest.approx([4.0, 1.0])
    assert fourth == pytest.approx([9.0, 4.0, 1.0])
    assert isinstance(Warm(), WarmStart)
    assert not isinstance(Cold(), WarmStart)


def test_an_estimator_that_cannot_start_warm_is_never_asked_to() -> None:
    assert starts_of(Cold()) == [None] * 4


def test_order_of_clients_does_not_matter() -> None:
    seen = play(
        NoiseTracker(Scripted([[1.0, 2.0, 3.0], [3.1, 1.1, 2.1]])),
        [["a", "b", "c"], ["c", "a", "b"]],
    )
    other = play(
        NoiseTracker(Scripted([[1.0, 2.0, 3.0], [1.1, 2.1, 3.1]])),
        [["a", "b", "c"], ["a", "b", "c"]],
    )
    assert seen[1] == pytest.approx(other[1][[2, 0, 1]])


def test_zero_noise_passes_through_unremembered() -> None:
    scripted = Scripted([[1.0, 0.0], [1.0, 2.0]])
    seen = play(NoiseTracker(scripted), [["a", "b"], ["a", "b"]])
    assert seen[0] == pytest.approx([1.0, 0.0])
    assert seen[1] == pytest.approx([1.0, 2.0])


def test_state_is_returned_not_changed() -> None:
    tracker = NoiseTracker(Scripted([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]))
    M = np.ones((3, 2))
    _, first = tracker.estimate(M, ["a", "b"], {})
    before = {key: value.copy() for key, value in first.items()}
    one, _ = tracker.estimate(M, ["a", "b"], first)
    assert all(np.array_equal(first[key], before[key]) for key in before)
    assert all(isinstance(value, np.ndarray) for value in first.values())
    _, again = tracker.estimate(M, ["a", "b"], {})
    two, _ = tracker.estimate(M, ["a", "b"], again)
    assert np.array_equal(one.variance, two.variance)


def test_bad_values_are_named() -> None:
    for field_name, options in [
        ("every", {"every": 0}),
        ("every", {"every": "last"}),
        ("memory", {"memory": 0}),
        ("change", {"change": 1.0}),
    ]:
        with pytest.raises(InvalidValueError, match=field_name):
            NoiseTracker(Norm(), **options)
    with pytest.raises(UpdateError, match="ids"):
        NoiseTracker(Norm()).estimate(np.ones((3, 2)), ["a", "a"], {})


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.ones(2), "must return a NoiseEstimate, not ndarray"),
        (None, "must return a NoiseEstimate, not NoneType"),
        (NoiseEstimate(np.ones(3), "x"), r"variance must have the shape \(2,\), not \(3,\)"),
        (NoiseEstimate(np.ones((2, 1)), "x"), r"variance must have the shape \(2,\), not \(2, 1\)"),
    ],
)
@pytest.mark.parametrize("kind", [Cold, Warm])
def test_what_an_own_estimator_returns_is_checked(
    kind: type[Cold], returned: object, words: str
) -> None:
    class Wrong(kind):  # type: ignore[misc, valid-type]
        def estimate(self, updates: np.ndarray) -> object:
            return returned

    with pytest.raises(UpdateError, match=f"estimator own: .*{words}"):
        NoiseTracker(Wrong()).estimate(np.ones((3, 2)), ["a", "b"], {})


def test_what_a_warm_start_returns_is_checked() -> None:
    class Wrong(Warm):
        def estimate_from(self, updates: np.ndarray, start: np.ndarray) -> NoiseEstimate:
            return NoiseEstimate(np.ones(3), self.name)

    tracker = NoiseTracker(Wrong())
    _, state = tracker.estimate(np.ones((3, 2)), ["a", "b"], {})
    with pytest.raises(UpdateError, match=r"shape \(2,\), not \(3,\)"):
        tracker.estimate(np.ones((3, 2)), ["a", "b"], state)
