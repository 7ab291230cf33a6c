"""Attackers that add the required noise are found by other clients' later updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_run
from scipy import optimize, stats

from noisewise.aggregation import ServerView, UpdateMatrix
from noisewise.aggregation.agreement import (
    _HUBER,
    _INEFFICIENCY,
    Agreement,
    AgreementTracker,
    _Memory,
    huber_mean,
    sketch,
)
from noisewise.aggregation.guard import Guard
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack, attacked
from noisewise.noise import Norm

P, N, ROUNDS, FLOOR = 4000, 20, 30, 1.0
SIGNAL = 0.08  # length of the common signal: S2 of the study has 0.07 sqrt(F)
IDS = tuple(f"c{k:02d}" for k in range(N))
VARIANCE = np.geomspace(30 * FLOOR, FLOOR, N)

Craft = Callable[[np.ndarray, np.ndarray, int, list[np.ndarray]], np.ndarray]
"""(common direction, noise of energy F, round, the model's moves) -> what an attacker sends."""


def antisign(g: np.ndarray, noise: np.ndarray, *_: Any) -> np.ndarray:
    return -np.sign(g) * np.abs(noise)


def beside_past_moves(
    g: np.ndarray, noise: np.ndarray, number: int, moves: list[np.ndarray]
) -> np.ndarray:
    if moves:
        basis, _ = np.linalg.qr(np.stack(moves[-8:], 1))
        g = g - basis @ (basis.T @ g)
    return antisign(g, noise)


def loud_then_antisign(g: np.ndarray, noise: np.ndarray, number: int, *_: Any) -> np.ndarray:
    return 1e12 * noise if number == 1 else antisign(g, noise)


ATTACKS: dict[str, Craft] = {
    "flip": lambda g, noise, *_: noise - g,
    "flip, five times": lambda g, noise, *_: noise - 5 * g,
    "antisign": antisign,
    "beside past moves": beside_past_moves,
    "honest for 8 rounds": lambda g, noise, number, _: (
        noise + g if number <= 8 else antisign(g, noise)
    ),
    "loud once": loud_then_antisign,
}


def updates(rng: np.random.Generator, g: np.ndarray) -> np.ndarray:
    return g[:, None] + rng.normal(size=(P, N)) * np.sqrt(VARIANCE / P)


def play(aggregator: Any, craft: Craft | None, f: int, seed: int = 0) -> tuple[float, list[Any]]:
    """Progress along the common direction in the last 15 rounds; 1 without an attack."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=P)
    g *= SIGNAL / np.linalg.norm(g)
    state: Any = {}
    answers: list[Any] = []
    moves: list[np.ndarray] = []
    for number in range(1, ROUNDS + 1):
        values = updates(rng, g)
        for k in range(f if craft else 0):
            noise = rng.normal(size=P) * math.sqrt(FLOOR / P)
            share = np.arange(P) % f == k
            assert craft is not None
            crafted = craft(g, noise, number, moves)
            coherent = craft is ATTACKS["flip"] or craft is ATTACKS["flip, five times"]
            values[:, k] = crafted if coherent else np.where(share, crafted, noise)
        view = ServerView(UpdateMatrix(torch.from_numpy(values), IDS), number)
        answers.append(aggregator.aggregate(view, state))
        state = answers[-1].state
        moves.append(answers[-1].delta.numpy())
    late = np.mean([move @ g for move in moves[ROUNDS // 2 :]])
    return float(late / (g @ g)), answers


def guarded(f: int) -> NoiseWise:
    return NoiseWise(Norm(), guard=Guard(FLOOR, f, clip=True))


def believes_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted flaw: the guard without the comparison over rounds."""
    monkeypatch.setattr(Agreement, "trust", lambda self, weights, errors: np.ones(len(weights)))


@pytest.mark.parametrize("f", [1, 3])
@pytest.mark.parametrize("name", ATTACKS)
def test_attackers_that_keep_the_policy_lose_their_weight(
    name: str, f: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, answers = play(guarded(f), ATTACKS[name], f)
    assert not answers[-1].refused
    assert reached > (0.55 if name == "flip" else 0.7)
    believes_everybody(monkeypatch)
    lost, flawed = play(guarded(f), ATTACKS[name], f)
    assert lost < reached - 0.1
    late = [np.mean([a.weights[:f].sum() for a in run[ROUNDS // 2 :]]) for run in (answers, flawed)]
    assert late[0] < (0.6 if name == "flip" else 0.3) * late[1]


def test_robust_hdp_is_bounded_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator = RobustHDP(Norm(), guard=Guard(FLOOR, 1))
    assert play(aggregator, antisign, 1)[0] > 0.75
    believes_everybody(monkeypatch)
    assert play(aggregator, antisign, 1)[0] < 0


@pytest.mark.parametrize("f", [1, 3])
def test_honest_clients_keep_their_weights(f: int) -> None:
    for seed in range(3):
        reached, answers = play(guarded(f), None, f, seed)
        assert reached == pytest.approx(1, abs=0.2)
        weights = np.array([answer.weights for answer in answers])
        assert np.allclose(weights[1:], weights[:-1], rtol=0.2)  # only estimates of noise differ


def test_a_site_with_other_data_keeps_the_weight_of_an_average_one() -> None:
    """It moves the model back with the same strength as the others move it forward."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=P)
    g *= 4 * SIGNAL / np.linalg.norm(g)
    tracker, state, trust = AgreementTracker(), {}, np.ones(N)
    for _ in range(ROUNDS):
        values = g[:, None] + rng.normal(size=(P, N)) * math.sqrt(5 * FLOOR / P)
        values[:, 0] -= 2 * g
        trust, state = tracker.judge(
            torch.from_numpy(values), IDS, np.full(N, 5 * FLOOR), np.full(N, 1 / N), state
        )
    assert trust[0] > 0.7
    assert np.all(trust[1:] == 1)


class TestBound:
    """The bound that `Agreement.trust` states, and the votes behind it."""

    def test_no_client_pulls_back_by_more_than_the_limit(self) -> None:
        rng = np.random.default_rng(1)
        weights = rng.dirichlet(np.ones(N))
        found = Agreement(
            value=rng.normal(size=N) * 5, error=np.full(N, 0.5), typical=1.0, typical_error=0.2
        )
        trust = found.trust(weights, 2.0)
        best = found.value + 1.0
        assert np.all((trust > 0) & (trust <= 1))
        assert np.all(weights * trust * -best <= 1.2 / N + 1e-12)
        assert np.all(trust[weights * -best <= 1.2 / N] == 1)
        assert np.any(trust < 0.5)

    def test_nothing_known_changes_nothing(self) -> None:
        unknown = Agreement(np.zeros(3), np.full(3, np.inf), 0.0, 0.0)
        assert np.all(unknown.trust(np.full(3, 1 / 3), 2.5) == 1)

    @pytest.mark.parametrize("f", [1, 2, 3])
    def test_attackers_cannot_frame_an_honest_client(self, f: int) -> None:
        """f clients can change the benefit of client 10 only by a few standard errors."""
        rng = np.random.default_rng(f)
        noise = np.outer(VARIANCE, VARIANCE) / P
        noise[:, -f:] = noise[:, -1:]  # the attackers have the least noise
        product = SIGNAL**2 + rng.normal(size=(N, N)) * np.sqrt(noise)
        tracker, here = AgreementTracker(tolerated_attackers=f), list(range(N))
        before = tracker.agreement(product, noise, here, np.ones(N))
        product[10, -f:] = -1e6
        after = tracker.agreement(product, noise, here, np.ones(N))
        assert 0 < before.value[10] - after.value[10] < 3 * after.error[10]
        votes = np.delete(noise[10], 10)
        plain = np.average(np.delete(product[10], 10), weights=1 / votes)  # the planted flaw
        assert plain < -1e3

    def test_quiet_attackers_are_never_the_majority(self) -> None:
        """Without the limit on votes, three clients with little noise would have the majority."""
        noise = np.full((N, N), 1e4)
        noise[:, :3] = 1.0
        product = np.full((N, N), 10.0)
        product[:, :3] = -1e6
        found = AgreementTracker(tolerated_attackers=3).agreement(
            product, noise, list(range(N)), np.ones(N)
        )
        assert found.value[10] > -100
        unlimited = AgreementTracker(tolerated_attackers=1).agreement(
            product, noise, list(range(N)), np.ones(N)
        )
        assert unlimited.value[10] < -1e5  # power: a limit for one attacker does not hold three

    def test_a_loud_round_does_not_blur_the_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert play(guarded(1), loud_then_antisign, 1)[0] > 0.9
        add = _Memory.add

        def in_full(self: _Memory, k: int, decay: float, rows: Any, here: Sequence[int]) -> None:
            energy = (rows**2).sum(axis=0)
            add(self, k, decay, rows / energy, here)  # d instead of d / v

        monkeypatch.setattr(_Memory, "add", in_full)
        assert play(guarded(1), loud_then_antisign, 1)[0] < 0.7


class TestStatistics:
    """Distributions of the estimates."""

    def test_benefits_of_pure_noise_are_standard_normal(self) -> None:
        rng = np.random.default_rng(0)
        tracker, state = AgreementTracker(tolerated_attackers=1), {}
        scores = []
        for number in range(60):
            values = rng.normal(size=(800, N)) * np.sqrt(VARIANCE / 800)
            _, state = tracker.judge(
                torch.from_numpy(values), IDS, VARIANCE, np.full(N, 1 / N), state
            )
            if number % 6 == 5:
                found = tracker.agreement(
                    state["product0"], state["noise0"], list(range(N)), VARIANCE
                )
                scores.append(found.value / found.error)
        spread = float(np.std(np.concatenate(scores)))
        assert 0.75 < spread < 1.1  # votes are limited, so the error is not too small

    def test_huber_mean_is_the_minimum(self) -> None:
        rng = np.random.default_rng(0)
        values, errors = rng.normal(size=(4, 9)), rng.uniform(0.5, 2, size=(4, 9))
        values[0, 0], errors[1, 3] = 50.0, np.inf
        means, _ = huber_mean(values, errors)
        for row in range(4):

            def loss(mean: float, row: int = row) -> float:
                away = np.abs(values[row] - mean) / errors[row]
                inner = away**2 / 2
                return float(np.where(away < _HUBER, inner, _HUBER * (away - _HUBER / 2)).sum())

            best = optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded")
            assert loss(means[row]) <= best.fun + 1e-4

    def test_inefficiency_follows_from_the_constant(self) -> None:
        inside = 2 * stats.norm.cdf(_HUBER) - 1
        square = inside - 2 * _HUBER * stats.norm.pdf(_HUBER) + _HUBER**2 * (1 - inside)
        assert pytest.approx(math.sqrt(square) / inside, abs=1e-3) == _INEFFICIENCY

    def test_rows_without_observations(self) -> None:
        mean, error = huber_mean(np.zeros((1, 3)), np.full((1, 3), np.inf))
        assert mean[0] == 0
        assert np.isinf(error[0])

    def test_a_sketch_keeps_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(0)
        values = torch.from_numpy(rng.normal(size=(6000, 4)))
        values[:, 1] += values[:, 0]
        assert np.array_equal(sketch(values, "ab"), values.numpy())
        monkeypatch.setattr("noisewise.aggregation.agreement._ROWS", 1000)
        small = sketch(values, "ab")
        assert small.shape == (1000, 4)
        error = np.abs(small.T @ small - values.T.numpy() @ values.numpy())
        assert error.max() < 5 * 2 * 6000 / math.sqrt(1000)
        assert not np.array_equal(small, sketch(values, "ac"))
        assert play(guarded(1), antisign, 1)[0] > 0.7  # the guard with a sketch


class TestState:
    """The state that is kept from round to round."""

    def judge(self, tracker: AgreementTracker, values: np.ndarray, ids: Any, state: Any) -> Any:
        n = len(ids)
        return tracker.judge(
            torch.from_numpy(values), tuple(ids), np.ones(n), np.full(n, 1 / n), state
        )

    def test_clients_come_and_go_and_stay_judged(self) -> None:
        rng = np.random.default_rng(0)
        g = np.full(500, 0.05)
        tracker = AgreementTracker()
        ids = [f"c{k}" for k in range(9)]

        def values(n: int) -> np.ndarray:
            return g[:, None] + rng.normal(size=(500, n)) / math.sqrt(500)

        first = values(9)
        first[:, 0] -= 4 * g
        _, state = self.judge(tracker, first, ids, {})
        for _ in range(4):  # client 0 is absent, but its past updates are still compared
            _, state = self.judge(tracker, values(9), [*ids[1:], "new"], state)
        trust, state = self.judge(tracker, values(10), [*ids, "new"], state)
        assert trust[0] < 0.9
        assert np.all(trust[1:] == 1)
        assert list(state["ids"]) == [*ids, "new"]

    def test_judging_changes_no_argument(self) -> None:
        rng = np.random.default_rng(0)
        tracker, ids = AgreementTracker(), ["a", "b", "c"]
        _, state = self.judge(tracker, rng.normal(size=(50, 3)), ids, {})
        before = {name: array.copy() for name, array in state.items()}
        self.judge(tracker, rng.normal(size=(50, 4)), [*ids, "d"], state)
        assert all(np.array_equal(before[name], state[name]) for name in before)

    def test_a_guarded_run_resumes_bit_by_bit(self, tmp_path: Path) -> None:
        clients = small_clients()
        attack = Attack("fixed", tuple(c.spec.id for c in clients[:1]))
        options: dict[str, Any] = {
            "method": "NoiseWise", "clients": clients, "attacks": [attack],
            "options": {"guard": Guard(1e-9, 1, clip=True)}, "rounds": 5,
        }  # fmt: skip
        whole = small_run(folder=tmp_path / "whole", **options)

        def stop(record: Any) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            small_run(folder=tmp_path / "parts", on_round=stop, **options)
        resumed = small_run(folder=tmp_path / "parts", **options)
        assert resumed.rounds == whole.rounds
        models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "parts")]
        assert models[0] == models[1]

    def test_without_a_guard_nothing_is_remembered(self) -> None:
        rng = np.random.default_rng(0)
        view = ServerView(UpdateMatrix(torch.from_numpy(rng.normal(size=(60, 5))), IDS[:5]), 1)
        for aggregator in (NoiseWise(), RobustHDP(Norm())):
            state = aggregator.aggregate(view, {}).state
            assert not any(name.startswith("guard.") for name in state)

    def test_bad_settings_are_named(self) -> None:
        with pytest.raises(InvalidValueError, match="decays"):
            AgreementTracker(decays=(1.0,))
        with pytest.raises(InvalidValueError, match="tolerated_attackers"):
            AgreementTracker(tolerated_attackers=0)


class TestAttacks:
    """The attacks that follow the policy."""

    def sent(self, kind: str, clients: tuple[str, ...], number: int = 1, **first: Any) -> Any:
        rng = np.random.default_rng(number)
        own = {client: torch.from_numpy(rng.normal(size=P)) for client in clients}
        return own, attacked(own, [Attack(kind, clients)], FLOOR, 0, number, **first)

    def test_antisign_has_the_magnitudes_of_permitted_noise(self) -> None:
        own, sent = self.sent("antisign", ("a",))
        assert torch.equal(sent["a"].sign(), -own["a"].sign())
        _, plain = self.sent("sign_flip_at_floor", ("a",))
        noise = plain["a"] + own["a"]
        assert torch.allclose(sent["a"].abs(), noise.abs())
        assert float(sent["a"].square().sum()) == pytest.approx(FLOOR, rel=0.1)

    def test_several_attackers_divide_the_coordinates(self) -> None:
        own, sent = self.sent("antisign", ("a", "b", "c"))
        for k, client in enumerate(("a", "b", "c")):
            opposite = sent[client].sign() == -own[client].sign()
            share = torch.arange(P) % 3 == k
            assert bool(opposite[share].all())
            assert float(opposite[~share].double().mean()) == pytest.approx(0.5, abs=0.05)

    def test_fixed_keeps_the_signs_of_the_first_round(self) -> None:
        first, _ = self.sent("fixed", ("a",), 1)
        own, sent = self.sent("fixed", ("a",), 2, first=first)
        assert torch.equal(sent["a"].sign(), -first["a"].sign())
        assert not torch.equal(sent["a"].sign(), -own["a"].sign())


@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e37, 1e97])
def test_extreme_updates_and_few_clients_leave_finite_weights(n: int, size: float) -> None:
    """One client sends updates of any size; NaN and overflow must not reach the model."""
    rng = np.random.default_rng(0)
    aggregator = NoiseWise(Norm(), guard=Guard(FLOOR, 1, clip=True))
    state: Any = {}
    for number in range(1, 6):
        values = rng.normal(size=(P, n)) * math.sqrt(2 * FLOOR / P)
        if n > 1 and number % 2:
            values[:, 0] *= size
        view = ServerView(UpdateMatrix(torch.from_numpy(values), IDS[:n]), number)
        answer = aggregator.aggregate(view, state)
        state = answer.state
        assert answer.weights.sum() == pytest.approx(1)
        assert bool(torch.isfinite(answer.delta).all())
        assert all(np.isfinite(a).all() for a in state.values() if a.dtype.kind == "f")
