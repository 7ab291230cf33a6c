"""Schedules, optimisers, stop_when, a share of evaluated clients, and runs that are extended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_helpers import small_clients, small_model
from torch import Tensor

import noisewise as nw
from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.aggregation.noise_floor import noise_floor
from noisewise.aggregation.schedules import Schedule
from noisewise.aggregation.server_optimisers import ServerOptimiser
from noisewise.errors import InvalidValueError
from noisewise.federation import Execution, Prepared, RunResult, TrainingSettings, simulate
from noisewise.federation.fingerprint import fingerprint
from noisewise.federation.round_record import RoundRecord
from noisewise.training.local_optimisers import LocalOptimiser


def prepared(
    name: str = "RobustHDP", *, rounds: int = 4, planned: int = 8, rate: float = 0.2,
    change: Callable[[nw.Method], nw.Method] = lambda method: method,
    more: dict[str, Any] | None = None, **settings: Any,
) -> Prepared:  # fmt: skip
    clients, method = small_clients(), change(make_method(name))
    plans = plan_clients([c.spec for c in clients], method, rounds=planned, clip_norm=1.0)
    return Prepared(
        clients, plans, method, small_model(), TrainingSettings(rounds, rate, **settings),
        **(more or {}),
    )  # fmt: skip


def theta(result: RunResult) -> Tensor:
    return torch.cat([value.reshape(-1) for value in result.state_dict().values()])


def test_a_schedule_is_the_learning_rate_of_each_round() -> None:
    half = Schedule("step", rounds=4, warmup_rounds=2)  # factor 0.5 in round 1
    given = simulate(prepared("DPFedAvg", rounds=1, change=lambda m: replace(m, schedule=half)))
    expected = simulate(prepared("DPFedAvg", rounds=1, rate=0.1))
    full = simulate(prepared("DPFedAvg", rounds=1))
    torch.testing.assert_close(theta(given), theta(expected), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(theta(given), theta(full), rtol=1e-2, atol=1e-4)  # power


def test_a_guard_drops_no_honest_client_under_a_schedule() -> None:
    cosine = Schedule("cosine", rounds=4)
    method = make_method("NoiseWise")
    clients = small_clients()
    plans = plan_clients([c.spec for c in clients], method, rounds=8, clip_norm=1.0)
    method = method.with_server_steps(plans)
    floor = noise_floor(plans, 650, 0.2, normalised=True)
    guarded = replace(method.guarded(floor, 1), schedule=cosine)
    result = simulate(Prepared(clients, plans, guarded, small_model(), TrainingSettings(4, 0.2)))
    assert [dict(record.dropped) for record in result.rounds] == [{}, {}, {}, {}]
    # Power: with the same floor and no correction, the small rate of the last round is below it.
    low = TrainingSettings(1, 0.2 * cosine.factor(4))
    plain = simulate(Prepared(clients, plans, method.guarded(floor, 1), small_model(), low))
    assert plain.rounds[0].dropped


@pytest.mark.parametrize("name", ["momentum", "fedadam", "fedyogi"])
def test_a_server_optimiser_survives_a_resume_bit_for_bit(name: str, tmp_path: Path) -> None:
    def change(method: nw.Method) -> nw.Method:
        return replace(method, optimiser=ServerOptimiser(name, rate=0.1))

    whole = simulate(prepared("NoiseWise", change=change))
    simulate(prepared("NoiseWise", rounds=2, change=change), folder=tmp_path)
    parts = simulate(prepared("NoiseWise", rounds=4, change=change), folder=tmp_path)
    assert torch.equal(theta(whole), theta(parts))
    assert not torch.equal(theta(whole), theta(simulate(prepared("NoiseWise"))))


def test_an_extended_run_is_the_long_run(tmp_path: Path) -> None:
    whole = simulate(prepared(rounds=5))
    short = simulate(prepared(rounds=3), folder=tmp_path)
    records: list[RoundRecord] = []
    longer = simulate(prepared(rounds=5), folder=tmp_path, on_round=records.append)
    assert len(short.rounds) == 3
    assert [record.round for record in records] == [1, 2, 3, 4, 5]
    assert torch.equal(theta(longer), theta(whole))
    assert longer.epsilon_spent == whole.epsilon_spent
    assert max(e for e in longer.epsilon_spent.values() if e is not None) <= 20.0
    assert nw.load_result(tmp_path).settings["rounds"] == 5


def test_an_extension_beyond_the_plans_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    simulate(prepared(rounds=3, planned=3), folder=tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(InvalidValueError, match=r"training\.rounds = 4.*no client.*planned_rounds"):
        simulate(prepared(rounds=4, planned=3), folder=tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before
    with pytest.raises(InvalidValueError, match="other settings"):  # other plans: another run
        simulate(prepared(rounds=4, planned=4), folder=tmp_path)
    with pytest.raises(InvalidValueError, match="give more"):
        simulate(prepared(rounds=2, planned=3), folder=tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def test_the_command_line_extends_with_planned_rounds_only(tmp_path: Path) -> None:
    config = {
        "data": {"name": "digits", "clients": 3},
        "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
        "model": {"name": "softmax"},
        "training": {"rounds": 2, "learning_rate": 0.5, "clip_norm": 1.0},
    }
    nw.run(config, folder=tmp_path / "short")
    with pytest.raises(InvalidValueError, match=r"population\.planned_rounds"):
        nw.run(config, folder=tmp_path / "short", set={"training.rounds": 3})
    long = {"population.planned_rounds": 4}
    nw.run(config, folder=tmp_path / "long", set=long)
    result = nw.run(config, folder=tmp_path / "long", set={**long, "training.rounds": 4})
    assert len(result.rounds) == 4
    assert "| rounds | 4, of" in (tmp_path / "long" / "model_card.md").read_text()


def stop_after_two(record: RoundRecord, released: Tensor) -> bool:
    assert record.accuracy is None
    assert record.train_loss is None
    assert not record.true_noise
    assert not record.epsilon_spent
    assert released.shape == (650,)
    return record.round == 2


def test_stop_when_ends_the_run_and_sees_released_values_only(tmp_path: Path) -> None:
    result = simulate(prepared(more={"stop_when": stop_after_two}), folder=tmp_path)
    assert result.status == "stopped"
    assert len(result.rounds) == 2
    assert result.rounds[1].accuracy is not None  # the simulator knows it, the function did not
    (tmp_path / "result.json").unlink()  # as after a crash before the end
    again = simulate(prepared(more={"stop_when": stop_after_two}), folder=tmp_path)
    assert (again.status, len(again.rounds)) == ("stopped", 2)


def test_stop_when_must_return_a_truth_value() -> None:
    with pytest.raises(InvalidValueError, match="stop_when"):
        simulate(prepared(more={"stop_when": lambda record, released: None}))


def test_stop_when_that_raises_is_one_line() -> None:
    def fails(record: RoundRecord, released: Tensor) -> bool:
        raise KeyError("a\nb")

    with pytest.raises(InvalidValueError, match=r"stop_when.*round 1.*KeyError") as caught:
        simulate(prepared(more={"stop_when": fails}))
    assert "\n" not in str(caught.value)


def test_stop_when_with_other_arguments_is_refused_before_a_round() -> None:
    rounds: list[RoundRecord] = []
    with pytest.raises(InvalidValueError, match=r"stop_when.*must take a round"):
        simulate(prepared(more={"stop_when": lambda record: True}), on_round=rounds.append)
    assert rounds == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_share_of_the_clients_is_evaluated(workers: int) -> None:
    run = prepared(evaluate_clients=0.5)
    result = simulate(run, execution=Execution(workers))
    everyone = simulate(prepared())
    seen = [set(record.accuracy or ()) for record in result.rounds]
    assert all(len(clients) == 2 for clients in seen)
    assert all(clients == seen[0] for clients in seen)
    for few, all_of_them in zip(result.rounds, everyone.rounds, strict=True):
        assert few.accuracy is not None
        assert all_of_them.accuracy is not None
        assert few.accuracy == {client: all_of_them.accuracy[client] for client in few.accuracy}
    assert torch.equal(theta(result), theta(everyone))
    assert any(set(replace(run, seed=seed).evaluated) != set(run.evaluated) for seed in range(1, 9))


def test_local_momentum_has_its_own_noise_and_adam_has_none() -> None:
    momentum = LocalOptimiser("momentum")
    result = simulate(prepared("Oracle", local_optimiser=momentum))
    plain = simulate(prepared("Oracle"))
    assert result.status == "finished"
    for client, noise in result.rounds[0].true_noise.items():
        assert noise > 2 * plain.rounds[0].true_noise[client]
    adam = simulate(prepared("NoiseWise", rate=0.01, local_optimiser=LocalOptimiser("adam")))
    assert adam.status == "finished"
    assert not adam.rounds[0].true_noise
    assert adam.rounds[0].aggregate_noise is None


@pytest.mark.parametrize("case", ["Oracle", "Alone", "guard", "attacks"])
def test_adam_is_refused_where_the_noise_must_be_known(case: str) -> None:
    more: dict[str, Any] = {}
    if case == "attacks":
        more["attacks"] = [nw.Attack("zero", (small_clients()[0].spec.id,))]
    name = case if case in ("Oracle", "Alone") else "RobustHDP"
    with pytest.raises(InvalidValueError, match="local_optimiser"):
        prepared(
            name, local_optimiser=LocalOptimiser("adam"), more=more,
            change=lambda m: m.guarded(1.0, 1) if case == "guard" else m,
        )  # fmt: skip


def test_options_are_part_of_the_fingerprint_and_defaults_are_not() -> None:
    base = fingerprint(prepared())
    assert base == fingerprint(prepared(rounds=6))
    assert base != fingerprint(prepared(), with_rounds=True)
    others = [
        prepared(evaluate_clients=0.5),
        prepared(local_optimiser=LocalOptimiser("momentum")),
        prepared(change=lambda m: replace(m, schedule=Schedule("linear", rounds=4))),
        prepared(change=lambda m: replace(m, optimiser=ServerOptimiser("momentum"))),
        prepared(more={"stop_when": stop_after_two}),
    ]
    assert len({base, *map(fingerprint, others)}) == 6


def test_a_config_with_all_options_runs() -> None:
    config = {
        "data": {"name": "digits", "clients": 3},
        "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
        "model": {"name": "softmax"},
        "training": {
            "rounds": 3, "learning_rate": 0.05, "clip_norm": 1.0, "clip": "normalise",
            "evaluate_clients": 0.5,
            "schedule": {"name": "cosine", "warmup_rounds": 1},
            "local_optimiser": {"name": "adam"},
            "server_optimiser": {"name": "fedyogi", "rate": 0.1},
        },
    }  # fmt: skip
    result = nw.run(config, "NoiseWise")
    assert result.status == "finished"
    with pytest.raises(InvalidValueError, match=r"training\.local_optimiser"):
        nw.run(config, "NoiseWise", set={"policy.tolerated_attackers": 1})
    with pytest.raises(InvalidValueError, match=r"training\.schedule"):
        nw.run(config, set={"training.schedule": {"name": "zigzag"}})
