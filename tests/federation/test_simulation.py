"""The simulator: participation, budgets, false reports, divergence, workers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_model, small_run
from torch import nn

from noisewise.aggregation.base import Aggregation, Aggregator, Disclosure, ServerView, State
from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import Method, make_method, plan_clients
from noisewise.errors import InvalidValueError, UnsupportedModelError, UpdateError
from noisewise.federation import Prepared, TrainingSettings, simulate
from noisewise.noise import NoiseEstimate
from noisewise.privacy.spending import epsilon_spent


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_learns_something(method: str) -> None:
    result = small_run(method, rounds=6, learning_rate=0.5)
    assert result.status == "finished"
    assert len(result.rounds) == 6
    last = result.rounds[-1]
    alone = method == "Alone"  # each client has weight 1 in its own model
    assert sum(last.weights.values()) == pytest.approx(len(result.clients) if alone else 1)
    assert last.accuracy is not None
    assert set(last.accuracy) == set(result.clients)
    if method == "FedAvg":
        assert result.accuracy > 0.6
        assert result.guarantee is None
        assert math.isinf(result.largest_epsilon)
    else:
        assert result.guarantee is not None
        assert result.largest_epsilon <= result.guarantee["epsilon"]


def test_epsilon_spent_grows_and_ends_within_each_budget() -> None:
    clients = small_clients()
    result = small_run(rounds=5, clients=clients)
    for client in clients:
        curve = [record.epsilon_spent[client.spec.id] for record in result.rounds]
        assert all(e is not None and e > 0 for e in curve)
        assert curve == sorted(curve)  # type: ignore[type-var]
        assert 0.99 * client.spec.epsilon <= curve[-1] <= client.spec.epsilon  # type: ignore[operator]


def test_minimum_epsilon_spends_only_the_smallest_budget() -> None:
    result = small_run("MinEpsilon", rounds=3)
    assert result.largest_epsilon <= 1.0


def test_a_client_that_has_spent_its_budget_stays_away() -> None:
    result = small_run("DPFedAvg", rounds=5, planned=[5, 2, 5, 3])
    took_part = [sorted(record.weights) for record in result.rounds]
    assert all("client-01" in who for who in took_part[:2])
    assert not any("client-01" in who for who in took_part[2:])
    assert [("client-03" in who) for who in took_part] == [True] * 3 + [False] * 2
    spent = [record.epsilon_spent["client-01"] for record in result.rounds]
    assert spent[1] == spent[-1] <= 4.0  # type: ignore[operator]


def test_a_run_ends_when_all_budgets_are_spent() -> None:
    result = small_run("DPFedAvg", rounds=5, planned=2)
    assert result.status == "budgets_spent"
    assert len(result.rounds) == 2


def test_partial_participation_is_a_random_share_that_the_seed_decides() -> None:
    result = small_run("DPFedAvg", rounds=8, participation=0.5)
    groups = [tuple(record.weights) for record in result.rounds]
    assert all(len(group) == 2 for group in groups)
    assert len(set(groups)) > 1
    again = small_run("DPFedAvg", rounds=8, participation=0.5)
    assert [tuple(r.weights) for r in again.rounds] == groups
    plans = plan_clients(
        [c.spec for c in small_clients()], make_method("DPFedAvg"), rounds=8, clip_norm=1.0
    )
    for position, client in enumerate(result.clients):
        rounds = sum(client in group for group in groups)
        expected = epsilon_spent(plans[position], rounds) if rounds else 0.0
        assert result.epsilon_spent[client] == expected


def test_a_falsified_epsilon_moves_weiavg_but_neither_training_nor_robust_hdp() -> None:
    honest, liars = small_clients(), small_clients(reported_epsilons={"client-00": 1000.0})
    truth, lie = small_run("WeiAvg", clients=honest), small_run("WeiAvg", clients=liars)
    assert lie.rounds[0].weights["client-00"] > 0.9 > truth.rounds[0].weights["client-00"]
    assert lie.rounds[0].true_noise == truth.rounds[0].true_noise
    assert lie.epsilon_spent == truth.epsilon_spent
    robust_truth = small_run("RobustHDP", clients=honest)
    robust_lie = small_run("RobustHDP", clients=liars)
    assert robust_truth.rounds == robust_lie.rounds


def test_divergence_is_a_result() -> None:
    result = small_run("FedAvg", rounds=30, learning_rate=1e38)
    assert result.status == "diverged"
    assert 0 < len(result.rounds) < 30


class Recorder:
    """Another aggregator that keeps what the server received."""

    def __init__(self, inner: Aggregator) -> None:
        self.inner, self.seen = inner, []

    @property
    def needs(self) -> frozenset[Disclosure]:
        return self.inner.needs

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        self.seen.append(view.updates.values.clone())
        return self.inner.aggregate(view, state)


def received(name: str, seed: int) -> list[torch.Tensor]:
    clients, method = small_clients(), make_method(name)
    recorder = Recorder(method.aggregator)
    plans = plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
    settings = TrainingSettings(2, 0.2)
    method = replace(method, aggregator=recorder)
    simulate(Prepared(clients, plans, method, small_model(), settings, seed=seed))
    return recorder.seen


def test_methods_are_paired_under_one_seed() -> None:
    """Until their weights part them, methods see the very same updates."""
    first, second = received("DPFedAvg", 0), received("Oracle", 0)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[0], received("DPFedAvg", 1)[0])


def test_noise_is_fresh_in_every_round() -> None:
    one, two = received("DPFedAvg", 0)
    correlation = torch.nn.functional.cosine_similarity(one[:, 0], two[:, 0], dim=0)
    assert abs(float(correlation)) < 0.3  # the noisiest client: common signal is small


@pytest.mark.parametrize("workers", [2, 3])
def test_results_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    assert small_run(rounds=3, workers=workers) == small_run(rounds=3)


def test_results_do_not_depend_on_torch_threads_or_global_seeds() -> None:
    before = torch.get_num_threads()
    reference = small_run(rounds=2)
    try:
        torch.set_num_threads(2)
        torch.manual_seed(123)
        np.random.seed(7)  # noqa: NPY002
        state = torch.random.get_rng_state()
        assert small_run(rounds=2) == reference
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_other_seeds_give_other_runs() -> None:
    assert small_run(rounds=1, seed=1).rounds != small_run(rounds=1).rounds


def test_one_client() -> None:
    clients = small_clients(epsilons=[20.0])
    result = small_run(clients=clients, rounds=2)
    assert result.rounds[0].weights == {"client-00": 1.0}
    assert result.noise_ratio == pytest.approx(1)


def test_all_clients_equal_get_nearly_equal_weights() -> None:
    clients = small_clients(epsilons=[5.0] * 4)
    data = [c.data for c in clients]
    from noisewise.data import make_specs
    from noisewise.federation import make_clients

    equal = make_clients(make_specs(data, epsilons=5.0, batch_sizes=8, delta=1e-3), data)
    result = small_run(clients=equal, rounds=1)
    assert np.ptp(list(result.rounds[0].weights.values())) < 0.15


def test_huge_epsilon_means_almost_no_noise() -> None:
    clients = small_clients(epsilons=[1e4] * 4)
    result = small_run("DPFedAvg", clients=clients, rounds=6, learning_rate=0.5)
    assert result.accuracy > 0.6


def test_evaluation_can_be_rarer_but_covers_the_last_round() -> None:
    result = small_run(rounds=5, evaluate_every=2)
    assert [record.accuracy is not None for record in result.rounds] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert result.accuracy == small_run(rounds=5).accuracy


def test_accuracy_figures_are_those_of_the_clients() -> None:
    result = small_run(rounds=2)
    accuracy = result.rounds[-1].accuracy
    assert accuracy is not None
    assert result.accuracy == pytest.approx(np.mean(list(accuracy.values())))
    assert result.accuracy_spread == pytest.approx(np.std(list(accuracy.values())))
    assert result.smallest_client_accuracy in accuracy.values()


class TestBadInput:
    def test_batchnorm_is_refused_before_anything_is_charged(self) -> None:
        clients = small_clients()
        method = make_method("DPFedAvg")
        plans = plan_clients([c.spec for c in clients], method, rounds=1, clip_norm=1.0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        with pytest.raises(UnsupportedModelError, match="GroupNorm"):
            Prepared(clients, plans, method, model, TrainingSettings(1, 0.1))

    def test_plans_must_fit_clients(self) -> None:
        clients = small_clients()
        with pytest.raises(InvalidValueError, match="plans"):
            Prepared(clients, [], make_method("PFA"), small_model(), TrainingSettings(1, 0.1))

    @pytest.mark.parametrize(
        "change",
        [{"rounds": 0}, {"learning_rate": 0.0}, {"participation": 1.5}, {"device": "nowhere"},
         {"evaluate_every": 0}, {"learning_rate": math.nan}],
    )  # fmt: skip
    def test_settings_name_the_field(self, change: dict[str, object]) -> None:
        field = next(iter(change))
        with pytest.raises(InvalidValueError, match=field):
            TrainingSettings(**({"rounds": 2, "learning_rate": 0.1} | change))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("part", "value", "words"),
        [
            ("delta", torch.zeros(1), r"delta must have the shape \(650,\), not \(1,\)"),
            ("delta", torch.zeros(650, 1), r"delta must have the shape \(650,\), not \(650, 1\)"),
            ("delta", np.zeros(650), "delta must be a tensor, not ndarray"),
            ("weights", np.ones(3) / 3, r"weights must have the shape \(4,\), not \(3,\)"),
            ("weights", 0.25, r"weights must have the shape \(4,\), not \(\)"),
            ("noise", NoiseEstimate(np.ones(5), "x"), r"noise.variance must have the shape \(4,\)"),
            ("state", {"n": 3}, r"state\['n'\] must be a numpy array of floats or texts, not int"),
            ("state", {"n": np.array([3])}, r"state\['n'\] must be .*, not int64"),
            ("state", {"optimiser.m": np.ones(1)}, "state.* must not begin with"),
        ],
    )
    def test_what_an_own_aggregator_returns_is_checked(
        self, part: str, value: object, words: str
    ) -> None:
        """Without the check, a delta of shape (1,) moves all parameters by the same number."""

        class Wrong(Recorder):
            def aggregate(self, view: ServerView, state: State) -> Aggregation:
                return replace(self.inner.aggregate(view, state), **{part: value})

        clients = small_clients()
        method = Method("mine", Wrong(make_method("DPFedAvg").aggregator))
        plans = plan_clients([c.spec for c in clients], method, rounds=1, clip_norm=1.0)
        prepared = Prepared(clients, plans, method, small_model(), TrainingSettings(1, 0.1))
        with pytest.raises(UpdateError, match=f"mine: Aggregation.{words}"):
            simulate(prepared)

    def test_unknown_liar(self) -> None:
        with pytest.raises(InvalidValueError, match="nobody"):
            small_clients(reported_epsilons={"nobody": 3.0})
