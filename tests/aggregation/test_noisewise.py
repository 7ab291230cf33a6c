"""NoiseWise and its parts: weights, spread across rounds, normalised updates, averaging."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_run
from scipy.optimize import minimize

from noisewise.aggregation import ServerView, UpdateMatrix, make_method
from noisewise.aggregation.guard import Guard
from noisewise.aggregation.noise_floor import plan_noise
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.weights import inverse_variance_weights, noise_and_bias_weights
from noisewise.data.populations import authors_population
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack
from noisewise.noise.update_spread import SpreadTracker
from noisewise.noise.variance import signal_share
from noisewise.privacy.plan import make_plan

P = 6000


class TestNoiseAndBiasWeights:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("cap", [1.0, 0.3])
    def test_against_a_general_solver(self, seed: int, cap: float) -> None:
        rng = np.random.default_rng(seed)
        v, zeta2 = np.exp(rng.normal(0, 1.5, 7)), float(np.exp(rng.normal(0, 1.5)))
        lam = rng.dirichlet(np.full(7, 5.0))

        def cost(w: np.ndarray) -> float:
            return float(np.sum(w**2 * v) + zeta2 * np.sum((w - lam) ** 2))

        ours = noise_and_bias_weights(v, zeta2, lam, cap)
        best = minimize(
            cost, np.full(7, 1 / 7), bounds=[(0, cap)] * 7, method="SLSQP",
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        assert ours.sum() == pytest.approx(1)
        assert ours.max() <= cap + 1e-12
        assert cost(ours) <= best.fun * (1 + 1e-6)
        np.testing.assert_allclose(ours, best.x, atol=2e-4)

    def test_limits(self) -> None:
        v, lam = np.array([1.0, 2.0, 50.0]), np.array([0.2, 0.3, 0.5])
        none, much = noise_and_bias_weights(v, 0.0, lam), noise_and_bias_weights(v, 1e12, lam)
        np.testing.assert_allclose(none, inverse_variance_weights(v))
        np.testing.assert_allclose(much, lam, rtol=1e-6)

    def test_a_client_without_a_finite_variance_gets_nothing(self) -> None:
        weights = noise_and_bias_weights([1.0, np.inf, 2.0], 1.0)
        assert weights[1] == 0
        assert weights.sum() == pytest.approx(1)

    @pytest.mark.parametrize("n", [4, 10])
    def test_a_cap_of_one_over_n_leaves_one_answer(self, n: int) -> None:
        weights = noise_and_bias_weights(np.geomspace(1, 9, n), 0.5, cap=1 / n)
        np.testing.assert_allclose(weights, 1 / n)

    @pytest.mark.parametrize("spread", [-1.0, np.nan, np.inf])
    def test_bad_spreads_are_named(self, spread: float) -> None:
        with pytest.raises(InvalidValueError, match="spread"):
            noise_and_bias_weights([1.0, 2.0], spread)


def two_sided(zeta2: float, rounds: int, seed: int, n: int = 12) -> list[np.ndarray]:
    """Rounds of updates with a common signal, own signals of energy zeta2 and fresh noise."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(P, 1)) / np.sqrt(P)
    own = rng.normal(size=(P, n)) * np.sqrt(zeta2 / P)
    variance = np.geomspace(0.3, 30, n)
    noises = (rng.normal(size=(P, n)) * np.sqrt(variance / P) for _ in range(rounds))
    return [common + own + noise for noise in noises]


class TestSpread:
    @pytest.mark.parametrize("zeta2", [0.0, 0.5, 4.0])
    def test_own_signal_is_found_and_noise_is_not(self, zeta2: float) -> None:
        ids, variance = [f"c{k}" for k in range(12)], np.geomspace(0.3, 30, 12)
        state: dict[str, np.ndarray] = {}
        for updates in two_sided(zeta2, 15, seed=1):
            found, state = SpreadTracker().estimate(torch.from_numpy(updates), ids, variance, state)
        assert found.rounds == 14
        assert found.value == pytest.approx(zeta2, abs=0.05 + 0.1 * zeta2)

    def test_its_error_is_what_it_claims(self) -> None:
        """Over many trials without own signals: unbiased, with the stated standard error."""
        ids, variance = [f"c{k}" for k in range(12)], np.geomspace(0.3, 30, 12)
        rng = np.random.default_rng(0)
        values, errors, certain = [], [], 0
        for _ in range(200):
            state: dict[str, np.ndarray] = {}
            for _ in range(3):
                noise = rng.normal(size=(400, 12)) * np.sqrt(variance / 400)
                found, state = SpreadTracker().estimate(
                    torch.from_numpy(noise), ids, variance, state
                )
            values.append(float(state["value"][0]))
            errors.append(found.error)
            certain += found.certain > 0
        assert np.std(values) == pytest.approx(np.mean(errors), rel=0.2)
        assert abs(np.mean(values)) < 4 * np.mean(errors) / np.sqrt(200)
        assert certain <= 16  # about 2.3 % would be 5

    def test_the_same_noise_twice_would_be_taken_for_signal(self) -> None:
        """Power: the estimate requires new noise in each round."""
        ids, variance = [f"c{k}" for k in range(12)], np.geomspace(0.3, 30, 12)
        updates = torch.from_numpy(two_sided(0.0, 1, seed=1)[0])
        _, state = SpreadTracker().estimate(updates, ids, variance, {})
        found, _ = SpreadTracker().estimate(updates, ids, variance, state)
        assert found.value > 0.2

    def test_clients_may_come_and_go(self) -> None:
        state: dict[str, np.ndarray] = {}
        for number, updates in enumerate(two_sided(2.0, 12, seed=2)):
            members = [k for k in range(12) if (k + number) % 3]
            found, state = SpreadTracker().estimate(
                torch.from_numpy(updates[:, members]),
                [f"c{k}" for k in members],
                np.geomspace(0.3, 30, 12)[members],
                state,
            )
        assert found.value == pytest.approx(2.0, rel=0.3)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("level", [0.0, np.inf])
    @pytest.mark.parametrize("memory", [1, 20])
    def test_rounds_without_known_noise_say_nothing(self, level: float, memory: int) -> None:
        """All updates zero or all variances infinite: the estimate is 0, or stays the same."""
        ids, variance = [f"c{k}" for k in range(12)], np.geomspace(0.3, 30, 12)
        first, second, third, fourth = map(torch.from_numpy, two_sided(4.0, 4, seed=3))
        tracker, state = SpreadTracker(memory), {}
        for _ in range(3):
            found, state = tracker.estimate(0 * first, ids, np.full(12, level), state)
            assert (found.value, found.error, found.certain, found.rounds) == (0, 0, 0, 0)
        for updates in (first, second):
            known, state = tracker.estimate(updates, ids, variance, state)
        assert known.rounds == 1
        assert known.certain > 1
        for updates, noise in ((0 * third, np.full(12, level)), (fourth, variance)):
            found, state = tracker.estimate(updates, ids, noise, state)
            assert found == known

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("scale", [1e-200, 1e-100, 1e100, 1e200])
    def test_its_units_do_not_matter(self, scale: float) -> None:
        """Products of precisions would overflow; updates this large or small have no spread."""
        ids, variance = [f"c{k}" for k in range(12)], np.geomspace(0.3, 30, 12)
        known, one, found, state = None, {}, None, {}
        for updates in map(torch.from_numpy, two_sided(4.0, 3, seed=3)):
            known, one = SpreadTracker().estimate(updates, ids, variance, one)
            shrunk = updates * np.sqrt(scale)
            found, state = SpreadTracker().estimate(shrunk, ids, variance * scale, state)
        assert known is not None
        assert found is not None
        assert found.value == pytest.approx(scale * known.value, rel=1e-9)
        assert found.rounds == known.rounds == 2
        assert np.isfinite(found.error)
        assert found.certain <= found.value


def played(aggregator: NoiseWise, rounds: list[np.ndarray]) -> np.ndarray:
    """Weights after the last of some rounds."""
    state: dict[str, np.ndarray] = {}
    for number, updates in enumerate(rounds):
        ids = tuple(f"c{k}" for k in range(updates.shape[1]))
        view = ServerView(UpdateMatrix(torch.from_numpy(updates), ids), number + 1)
        answer = aggregator.aggregate(view, state)
        state = dict(answer.state)
    return answer.weights


class TestWeights:
    @pytest.mark.parametrize("dist", ["Dist1", "Dist3", "Dist6", "Dist9"])
    def test_signal_share_on_the_authors_populations(self, dist: str) -> None:
        """The issue's target is 0.98; Robust-HDP with true variances reaches 0.60 to 0.79."""
        population = authors_population(dist, 20)
        pairs = zip(population.epsilons, population.batch_sizes, strict=True)
        specs = [ClientSpec(f"c{k}", 2400, b, e, 1e-4) for k, (e, b) in enumerate(pairs)]
        plans = [make_plan(s, rounds=200, clip_norm=1.0, accountant="rdp") for s in specs]
        variance = np.array([plan_noise(p, P, 0.01, normalised=True) for p in plans])
        plain = np.array([plan_noise(p, P, 0.01) for p in plans])
        steps = np.array([p.steps_per_round for p in plans])
        rng = np.random.default_rng(0)
        signal = rng.normal(size=(P, 1)) * 0.01 / np.sqrt(P)
        rounds = [signal + rng.normal(size=(P, 20)) * np.sqrt(variance / P) for _ in range(4)]
        assert signal_share(played(NoiseWise(), rounds), variance) >= 0.98
        assert signal_share(inverse_variance_weights(plain), plain, steps) < 0.85

    def test_loadings_stand_in_where_updates_are_not_normalised(self) -> None:
        rng = np.random.default_rng(3)
        steps, variance = np.array([1.0, 2, 4, 8] * 4), np.geomspace(2, 20, 16)
        direction = rng.normal(size=(P, 1)) / np.sqrt(P)
        rounds = [
            direction * steps + rng.normal(size=(P, 16)) * np.sqrt(variance / P) for _ in range(10)
        ]
        found = signal_share(played(NoiseWise(signal="loadings"), rounds), variance, steps)
        assert found > 0.97
        assert found > signal_share(inverse_variance_weights(variance), variance, steps) + 0.1

    def test_loadings_keep_to_a_cap_and_favour_strong_signals(self) -> None:
        rng = np.random.default_rng(5)
        steps = np.array([1.0, 1, 1, 8, 8, 8])
        direction = rng.normal(size=(P, 1)) / np.sqrt(P)
        rounds = [direction * steps + rng.normal(size=(P, 6)) / np.sqrt(P) for _ in range(10)]
        guarded = NoiseWise(signal="loadings", guard=Guard(0.5, 2))
        weights = played(guarded, rounds)
        assert weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(weights[3:], 0.2)
        np.testing.assert_allclose(weights[:3], 0.4 / 3, rtol=0.1)

    def test_own_signals_are_not_counted_twice(self) -> None:
        """The estimated noise contains them, because all rows are equal and none is quiet."""
        noise = np.geomspace(0.3, 30, 12)
        weights = played(NoiseWise(spread=2.0, horizon=1), two_sided(2.0, 12, seed=6))

        def cost(w: np.ndarray) -> float:
            return float(np.sum(w**2 * noise) + 2.0 * np.sum((w - 1 / 12) ** 2))

        least = cost(noise_and_bias_weights(noise, 2.0))
        assert cost(weights) < 1.005 * least
        assert cost(noise_and_bias_weights(noise + 2.0, 2.0)) > 1.01 * least  # twice

    def test_bias_adds_up_over_rounds_and_noise_does_not(self) -> None:
        """Compares the model's change after 40 rounds with the mean of the true updates."""

        def error(aggregator: NoiseWise) -> float:
            rounds, state = two_sided(0.5, 40, seed=7), {}
            rng = np.random.default_rng(7)
            common = rng.normal(size=(P, 1)) / np.sqrt(P)
            own = rng.normal(size=(P, 12)) * np.sqrt(0.5 / P)
            moved = -len(rounds) * (common + own).mean(axis=1)
            for number, updates in enumerate(rounds):
                ids = tuple(f"c{k}" for k in range(12))
                view = ServerView(UpdateMatrix(torch.from_numpy(updates), ids), number + 1)
                answer = aggregator.aggregate(view, state)
                state = dict(answer.state)
                moved += answer.delta.numpy()
            return float(moved @ moved)

        each = error(NoiseWise(horizon=1))
        assert error(NoiseWise()) < 0.6 * each
        assert error(NoiseWise(spread=0)) > 0.95 * each

    def test_alike_clients_get_inverse_variance_weights(self) -> None:
        weights = played(NoiseWise(), two_sided(0.0, 40, seed=8))
        assert signal_share(weights, np.geomspace(0.3, 30, 12)) > 0.99

    def test_different_data_move_weights_towards_the_target(self) -> None:
        far, near = (played(NoiseWise(), two_sided(z, 12, seed=4)) for z in (20.0, 0.0))
        assert far.max() < 0.5 * near.max()
        assert played(NoiseWise(spread=0), two_sided(20.0, 12, seed=4)).max() > far.max()

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("options", [{}, {"spread": 1.0}, {"target": "uniform", "smooth": 1}])
    @pytest.mark.parametrize("pattern", ["0000", "1000", "0101", "1010", "1001"])
    def test_rounds_of_zeros_leave_weights_sound(
        self, options: dict[str, object], pattern: str
    ) -> None:
        rounds = [int(c) * u for c, u in zip(pattern, two_sided(4.0, 4, seed=9), strict=True)]
        for played_so_far in range(1, 5):
            weights = played(NoiseWise(**options), rounds[:played_so_far])  # type: ignore[arg-type]
            assert np.all(weights >= 0)
            assert weights.sum() == pytest.approx(1)
            if pattern[played_so_far - 1] == "0":
                np.testing.assert_allclose(weights, 1 / 12)

    @pytest.mark.parametrize("options", [None, {"normalise": False}])
    def test_a_run_in_which_all_send_zeros_ends(self, options: dict[str, object] | None) -> None:
        clients = small_clients()
        attack = Attack("zero", tuple(client.spec.id for client in clients))
        run = small_run("NoiseWise", rounds=3, clients=clients, options=options, attacks=[attack])
        assert run.status == "finished"
        for record in run.rounds:
            assert list(record.weights.values()) == pytest.approx([1 / 4] * 4)
            assert record.noise_estimate == dict.fromkeys(record.weights, 0.0)

    def test_examples_as_target_are_a_disclosure(self) -> None:
        assert not NoiseWise().needs
        assert {need.value for need in NoiseWise(target="examples").needs} == {"n_examples"}

    @pytest.mark.parametrize(
        "options",
        [
            {"smooth": 0}, {"spread": "guessed"}, {"spread": -1}, {"spread": True},
            {"target": "epsilon"}, {"signal": "steps"}, {"horizon": 0}, {"horizon": "weeks"},
        ],
    )  # fmt: skip
    def test_bad_options_are_named(self, options: dict[str, object]) -> None:
        with pytest.raises(InvalidValueError, match=next(iter(options))):
            make_method("NoiseWise", options)


class TestMethod:
    def test_normalised_updates_are_divided_by_the_own_steps(self) -> None:
        """With one server step, DPFedAvg on normalised updates follows from plain updates."""
        clients = small_clients()
        plain = small_run("DPFedAvg", rounds=1, clients=clients)
        scaled = small_run("DPFedAvg", rounds=1, clients=clients, options={"normalise": True})
        steps = {name: row["steps_per_round"] for name, row in plain.clients.items()}
        for client, noise in plain.rounds[0].true_noise.items():
            ratio = noise / scaled.rounds[0].true_noise[client]
            assert ratio == pytest.approx(steps[client] ** 2)
        assert len(set(steps.values())) > 1

    def test_server_steps_scale_the_step(self) -> None:
        """With equal steps, normalising and multiplying by the steps is the plain method."""
        clients = small_clients(epsilons=[4.0, 20.0])
        batches = {c.spec.batch_size for c in clients}
        assert len(batches) == 2
        steps = 5
        same = tuple(
            type(c)(ClientSpec(c.spec.id, c.spec.n_examples, -(-c.spec.n_examples // steps),
                               c.spec.epsilon, c.spec.delta), c.data)
            for c in clients
        )  # fmt: skip
        plain = small_run("DPFedAvg", rounds=3, clients=same)
        assert {row["steps_per_round"] for row in plain.clients.values()} == {steps}
        options = {"normalise": True, "server_steps": float(steps)}
        scaled = small_run("DPFedAvg", rounds=3, clients=same, options=options)
        assert scaled.rounds[-1].mean_train_loss == pytest.approx(
            plain.rounds[-1].mean_train_loss, rel=1e-4
        )
        other = small_run(
            "DPFedAvg", rounds=3, clients=same, options={"normalise": True, "server_steps": 1.0}
        )
        assert other.rounds[-1].mean_train_loss > plain.rounds[-1].mean_train_loss * 1.01

    def test_average_is_released_and_resumed(self, tmp_path: Path) -> None:
        options = {"average_rounds": 3}
        whole = small_run(
            "NoiseWise", rounds=5, options=options, learning_rate=0.05, folder=tmp_path
        )
        released = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "result.json").unlink()
        (tmp_path / "checkpoints" / "round-000005.ckpt").unlink()
        resumed = small_run(
            "NoiseWise", rounds=5, options=options, learning_rate=0.05, folder=tmp_path
        )
        assert resumed.rounds == whole.rounds
        assert (tmp_path / "model.safetensors").read_bytes() == released
        again = small_run("NoiseWise", rounds=5, learning_rate=0.05)
        assert whole.rounds[0].accuracy == again.rounds[0].accuracy
        assert whole.rounds[-1].train_loss != again.rounds[-1].train_loss
        assert [r.weights for r in whole.rounds] == [r.weights for r in again.rounds]

    def test_records_tell_the_signal_share(self) -> None:
        run = small_run("NoiseWise", rounds=2)
        shares = [record.signal_share for record in run.rounds]
        assert all(share is not None and 0.5 < share <= 1 for share in shares)
        oracle = small_run("Oracle", rounds=1, options={"normalise": True})
        assert oracle.rounds[0].signal_share == pytest.approx(1)

    def test_more_noise_than_the_budgets_ask_for_counts(self) -> None:
        even = signal_share([0.5, 0.5], [1.0, 1.0])
        assert even == pytest.approx(1)
        assert signal_share([0.5, 0.5], [4.0, 4.0], 1.0, [1.0, 1.0]) == pytest.approx(0.25)

    @pytest.mark.parametrize(
        "options", [{"normalise": 1}, {"server_steps": 0}, {"average_rounds": -1}]
    )
    def test_bad_options_are_named(self, options: dict[str, object]) -> None:
        with pytest.raises(InvalidValueError, match=next(iter(options))):
            make_method("RobustHDP", options)
