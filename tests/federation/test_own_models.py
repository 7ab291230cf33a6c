"""`Alone`: every client trains its own model; one result with a row of all clients a round."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_model, small_run
from model_files import trained_vector

from noisewise.aggregation.auto_steps import AutoSteps
from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.experiments.comparison import compare
from noisewise.experiments.config import as_config
from noisewise.experiments.runner import find_methods
from noisewise.federation import Prepared, RunResult, TrainingSettings, own_models, simulate
from noisewise.federation.attacks import Attack
from noisewise.federation.clients import to_tensors
from noisewise.federation.executors import SerialExecutor
from noisewise.federation.results import load_run
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.server_rules import ServerRules
from noisewise.randomness import SeededRandom
from noisewise.report.run_sets import find_runs
from noisewise.training.local import local_update
from noisewise.training.parameters import ParameterLayout

RATE, SEED = 0.2, 5


def models(folder: Path) -> dict[str, torch.Tensor]:
    """The trained parameters by client id."""
    files = sorted((folder / "clients").glob("*/model.safetensors"))
    return {file.parent.name.partition("-")[2]: trained_vector(file) for file in files}


def trained_by_hand(rounds: int) -> dict[str, torch.Tensor]:
    """Local DP-SGD of each client from its own last model, without any server."""
    clients, loss = small_clients(), torch.nn.functional.cross_entropy
    plans = plan_clients(
        [c.spec for c in clients], make_method("DPFedAvg"), rounds=rounds, clip_norm=1.0
    )
    trained = {}
    for client, plan in zip(clients, plans, strict=True):
        model, records = small_model(), to_tensors(client.data.train)
        theta = ParameterLayout.of(model).flatten(model)
        for number in range(1, rounds + 1):
            source = SeededRandom(SEED, number, client.spec.id)
            theta = theta + local_update(model, theta, records, plan, RATE, loss, source).delta
        trained[client.spec.id] = theta
    return trained


def test_every_model_is_that_of_local_training_by_hand(tmp_path: Path) -> None:
    result = small_run("Alone", rounds=3, seed=SEED, learning_rate=RATE, folder=tmp_path)
    expected = trained_by_hand(3)
    found = models(tmp_path)
    assert found.keys() == expected.keys() == result.clients.keys()
    for client, theta in expected.items():
        torch.testing.assert_close(found[client], theta, rtol=0, atol=1e-6)
    assert not (tmp_path / "model.safetensors").exists()  # there is no common model


def test_one_row_of_all_clients_for_each_round() -> None:
    seen: list[RoundRecord] = []
    result = small_run("Alone", rounds=3, seed=SEED, on_round=seen.append)
    ids = [client.spec.id for client in small_clients()]
    assert tuple(seen) == result.rounds
    assert (result.status, result.needs, result.shares_model) == ("finished", (), False)
    assert result.is_reference
    for number, record in enumerate(result.rounds, start=1):
        assert record.round == number
        assert record.weights == dict.fromkeys(ids, 1.0)
        assert list(record.true_noise) == list(record.epsilon_spent) == ids
        assert record.noise_estimate is None
        assert record.aggregate_noise is None
        assert list(record.accuracy or ()) == list(record.train_loss or ()) == ids
    for client in small_clients():
        spent = result.epsilon_spent[client.spec.id]
        assert spent is not None
        assert 0.99 * client.spec.epsilon <= spent <= client.spec.epsilon
    assert result.guarantee == small_run("DPFedAvg", rounds=1, seed=SEED).guarantee


def test_the_accuracy_of_a_client_is_that_of_a_federation_of_one() -> None:
    result = small_run("Alone", rounds=4, seed=SEED)
    for position, client in enumerate(small_clients()):
        single = small_run("DPFedAvg", rounds=4, seed=SEED, clients=(client,))
        for one, whole in zip(single.rounds, result.rounds, strict=True):
            assert whole.accuracy is not None
            assert one.accuracy == {client.spec.id: whole.accuracy[client.spec.id]}
            assert one.true_noise[client.spec.id] == list(whole.true_noise.values())[position]


def same(one: RunResult, other: RunResult) -> None:
    assert json.dumps(one.summary(), sort_keys=True) == json.dumps(other.summary(), sort_keys=True)
    assert one.rounds == other.rounds


@pytest.mark.parametrize(
    "way", [{"workers": 2}, {"workers": 3, "executor": "processes"}, {"executor": "serial"}]
)
def test_results_do_not_depend_on_processes(tmp_path: Path, way: dict[str, object]) -> None:
    here = small_run("Alone", rounds=3, folder=tmp_path / "here")
    seen: list[int] = []
    there = small_run(
        "Alone", rounds=3, folder=tmp_path / "there", on_round=lambda r: seen.append(r.round), **way
    )
    same(here, there)
    assert seen == [1, 2, 3]
    before, after = models(tmp_path / "here"), models(tmp_path / "there")
    assert all(torch.equal(before[client], after[client]) for client in before)
    rounds = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("here", "there")]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_is_resumed(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_run("Alone", rounds=5, folder=tmp_path / "whole")

    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        small_run("Alone", rounds=5, folder=folder, on_round=stop, workers=workers)
    unfinished = load_run(folder)
    assert (unfinished.status, unfinished.shares_model) == ("unfinished", False)
    assert unfinished.rounds == whole.rounds[:3]
    assert workers > 1 or not list(folder.glob("**/.training.lock"))

    updates: list[int] = []
    update = SerialExecutor.update
    monkeypatch.setattr(
        SerialExecutor, "update", lambda self, t, r, m: updates.append(r) or update(self, t, r, m)
    )
    same(whole, small_run("Alone", rounds=5, folder=folder))
    assert max(map(updates.count, {4, 5})) <= 4
    assert not {1, 2, 3} & set(updates)  # checkpoints hold these rounds of every client
    assert (folder / "rounds.jsonl").read_bytes() == (
        tmp_path / "whole" / "rounds.jsonl"
    ).read_bytes()


_KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from federation_helpers import small_run
kill = lambda record: record.round == 3 and os.kill(os.getpid(), signal.SIGKILL)
small_run("Alone", rounds=5, folder=sys.argv[2], on_round=kill, workers=int(sys.argv[3]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path: Path, workers: int) -> None:
    helpers = Path(__file__).parents[1] / "helpers"
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", _KILLED, str(helpers), str(folder), str(workers)]
    assert subprocess.run(command, check=False, timeout=600).returncode == -signal.SIGKILL
    whole = small_run("Alone", rounds=5, folder=tmp_path / "whole")
    same(whole, small_run("Alone", rounds=5, folder=folder, workers=3 - workers))
    before, after = models(tmp_path / "whole"), models(folder)
    assert all(torch.equal(before[client], after[client]) for client in before)


def test_finished_clients_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_run("Alone", rounds=2, folder=tmp_path)
    (tmp_path / "result.json").unlink()
    last = sorted((tmp_path / "clients").iterdir())[-1]
    for file in (last / "result.json", *last.glob("checkpoints/*")):
        file.unlink()
    trained: list[str] = []
    update = SerialExecutor.update

    def counted(self: SerialExecutor, theta: torch.Tensor, number: int, member: int) -> object:
        trained.append(self._workload.clients[member].spec.id)
        return update(self, theta, number, member)

    monkeypatch.setattr(SerialExecutor, "update", counted)
    same(whole, small_run("Alone", rounds=2, folder=tmp_path))
    assert trained == [small_clients()[-1].spec.id] * 2


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    small_run("Alone", rounds=2, folder=tmp_path)
    with pytest.raises(InvalidValueError, match="other settings"):
        small_run("Alone", rounds=2, seed=1, folder=tmp_path)


def test_a_worker_that_dies_is_reported() -> None:
    def dying(prepared: Prepared, *_: object) -> own_models.Rounds:
        raise SystemExit(1)
        yield

    prepared = small_prepared()
    runs = [(own_models._run_of_client(prepared, k), None) for k in range(2)]
    clock = own_models.Stopwatch()
    with own_models._streams(runs, own_models.Execution(2), clock, dying) as streams:
        for stream in streams:
            with pytest.raises(NoisewiseError, match="run the same command again"):
                next(stream)


def test_an_error_in_a_worker_reaches_the_user() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in my own metric")

    with pytest.raises(NoisewiseError, match="ZeroDivisionError: in my own metric"):
        small_run("Alone", rounds=1, metric=broken, workers=2)


def test_a_client_ends_with_its_plan_and_keeps_its_last_values() -> None:
    result = small_run("Alone", rounds=6, planned=[6, 3, 6, 6], evaluate_every=2)
    ended = "client-01"
    assert result.status == "finished"
    assert [ended in record.weights for record in result.rounds] == [True] * 3 + [False] * 3
    scored = [record for record in result.rounds if record.accuracy is not None]
    assert [record.round for record in scored] == [2, 4, 6]
    accuracies = [(record.accuracy or {})[ended] for record in scored]
    single = small_run(
        "DPFedAvg", rounds=3, clients=(small_clients()[1],), evaluate_every=2
    )  # its third round is its last and is evaluated
    assert accuracies[1] == accuracies[2] == single.accuracy
    spent = [record.epsilon_spent[ended] for record in result.rounds]
    assert spent[2] == spent[5]


def test_a_run_whose_plans_all_end_early_says_so() -> None:
    result = small_run("Alone", rounds=6, planned=[2, 3, 3, 1], evaluate_every=5)
    assert (result.status, len(result.rounds)) == ("budgets_spent", 3)
    assert math.isfinite(result.accuracy)


def test_one_diverged_client_does_not_stop_the_others() -> None:
    prepared = small_prepared()
    clients = list(prepared.clients)
    data = clients[1].data  # a loss that is not finite counts as divergence
    spoiled = replace(data.train, inputs=np.full(data.train.inputs.shape, np.nan, np.float32))
    clients[1] = replace(clients[1], data=replace(data, train=spoiled))
    result = simulate(replace(prepared, clients=clients))
    assert result.status == "diverged"
    assert [len(record.weights) for record in result.rounds] == [4, 3]
    last = result.rounds[-1]
    assert math.isnan((last.train_loss or {})["client-01"])
    assert all(math.isfinite(score) for score in (last.accuracy or {}).values())


def small_prepared(**settings: float) -> Prepared:
    clients, method = small_clients(), make_method("Alone")
    plans = plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
    return Prepared(clients, plans, method, small_model(), TrainingSettings(2, RATE, **settings))


def test_what_does_not_apply_is_refused_in_one_line() -> None:
    prepared = small_prepared()
    with pytest.raises(InvalidValueError, match=r"attacks = \['nan'\]: must be empty for Alone"):
        replace(prepared, attacks=[Attack("nan", ("client-00",))])
    with pytest.raises(InvalidValueError, match=r"participation = 0.5: must be 1 for Alone"):
        small_prepared(participation=0.5)
    with pytest.raises(InvalidValueError, match="must be serial or processes for Alone"):
        small_run("Alone", rounds=1, executor="ray")
    with pytest.raises(InvalidValueError, match=r"Alone.*shares no model: for simulations only"):
        ServerRules(make_method("Alone"), {}, 2)
    with pytest.raises(InvalidValueError, match="Alone"):
        make_method("Alone").guarded(1.0, 1)


CONTENT = {
    "data": {"name": "digits", "clients": 3},
    "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 1, "learning_rate": 0.5, "clip_norm": 1.0},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"training.participation": 0.5},
        {"training.executor": "ray"},
        {"attacks": [{"kind": "nan", "clients": ["client-00"]}]},
    ],
)
def test_all_methods_are_all_that_the_config_permits(changed: dict[str, object]) -> None:
    default = [method.name for method in find_methods(as_config(CONTENT))]
    permitted = [method.name for method in find_methods(as_config(CONTENT, changed))]
    assert set(default) - set(permitted) == {"Alone"}


def test_a_comparison_with_alone_is_resumed_and_found_again(tmp_path: Path) -> None:
    swept = compare(CONTENT, ["Alone"], 1, sweep={"training.clip_norm": [0.5, 1.0]})
    assert [row["training.clip_norm"] for row in swept.to_rows()] == [0.5, 1.0]
    made, again = (
        compare(CONTENT, ["DPFedAvg", "Alone"], 1, folder=tmp_path, workers=workers)
        for workers in (2, 1)
    )
    assert not made.failures
    assert made.results == again.results  # read from disk
    assert made.results[1].rounds == swept.results[1].rounds
    found = find_runs([tmp_path])  # the clients' runs are no runs of the comparison
    assert [run.method for run in found.sets[0].results] == ["DPFedAvg", "Alone"]


def test_automatic_steps_follow_the_rounds_of_each_client(tmp_path: Path) -> None:
    clients = small_clients()
    method = replace(make_method("Alone"), auto=AutoSteps(4))
    plans = plan_clients([c.spec for c in clients], method, rounds=[4, 2, 4, 4], clip_norm=1.0)
    settings = TrainingSettings(4, RATE)
    result = simulate(Prepared(clients, plans, method, small_model(), settings), folder=tmp_path)
    assert result.settings["server_rate"] == "auto"
    short = plan_clients([clients[1].spec], method, rounds=2, clip_norm=1.0)
    single = Prepared(
        clients[1:2],
        short,
        replace(method, auto=AutoSteps(2), shares_model=True),
        small_model(),
        TrainingSettings(2, RATE),
    )
    last = result.last_evaluated
    assert last is not None
    assert last.accuracy is not None
    assert last.accuracy["client-01"] == simulate(single).accuracy
