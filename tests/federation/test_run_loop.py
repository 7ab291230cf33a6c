"""The run loop of simulations and servers: how runs end, and what a resumed run contains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import small_run

from noisewise.aggregation import Aggregation, weighted_sum
from noisewise.aggregation.methods import Method, make_method
from noisewise.federation import Attack, load_run
from noisewise.federation.checkpoint import RunFolder
from noisewise.federation.result_facts import RunSettings
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.run_loop import RunLoop, result_before_training
from noisewise.federation.server_rules import ServerRules
from noisewise.federation.server_step import unchanged
from noisewise.federation.spool import Spool
from noisewise.federation.trained_model import ModelStructure
from noisewise.privacy.declaration import Declaration
from noisewise.training.parameters import ParameterLayout

P = 6
DECLARED = Declaration("record", 2.0, 1e-5)


class Mean:
    """Equal weights."""

    needs: frozenset[Any] = frozenset()

    def aggregate(self, view: Any, state: Any) -> Aggregation:
        weights = np.full(view.updates.n_clients, 1 / view.updates.n_clients)
        return Aggregation(weighted_sum(view.updates.values, weights), weights)


METHOD = Method("Mean", Mean())
RULES = ServerRules(METHOD, {}, min_clients=2)


def server_loop(folder: Path | None, rounds: int = 3, start: float = 0.0) -> RunLoop:
    settings = RunSettings(rounds=rounds, learning_rate=0.1)
    before = result_before_training(METHOD, 0, settings, deployed=True)
    files = None if folder is None else RunFolder(folder, "fingerprint")
    structure = ModelStructure(ParameterLayout(("weight",), (torch.Size([P]),)))
    return RunLoop(before, torch.full((P,), start), structure, files)


def play(loop: RunLoop, values: Iterable[float], **absent: str) -> RoundRecord:
    """One round of sites "0", "1", ... that send a constant update each."""
    with Spool() as spool:
        for number, value in enumerate(values):
            spool.add(str(number), torch.full((P,), value))
        step = RULES.aggregate(loop.snapshot, spool, absent)
    record = step.record()
    loop.save(step.snapshot, record)
    return record


def test_a_server_and_its_folder_know_the_same_run(tmp_path: Path) -> None:
    loop = server_loop(tmp_path)
    loop.declare({"1": DECLARED, "7": DECLARED})
    play(loop, [1.0, 3.0], x="did not answer")
    assert load_run(tmp_path).status == "unfinished"
    resumed = server_loop(tmp_path, start=9.0)
    assert resumed.records == loop.records
    assert resumed.declarations == {"1": DECLARED, "7": DECLARED}
    assert resumed.next_round == 2
    assert torch.equal(resumed.snapshot.theta, torch.full((P,), 2.0))
    play(resumed, [1.0, 1.0])
    assert not resumed.ended
    play(resumed, [1.0, 1.0])
    assert resumed.ended
    result = resumed.finish()
    assert result == load_run(tmp_path)
    assert (result.status, result.deployed) == ("finished", True)
    assert list(result.clients) == ["0", "1", "7", "x"]
    assert result.clients["x"] == {"declared": None}
    assert result.declarations == {"1": DECLARED, "7": DECLARED}


def test_a_server_with_too_few_updates_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    loop = server_loop(tmp_path, rounds=1, start=4.0)
    record = play(loop, [1.0], x="did not answer")
    assert record.dropped == {
        "0": "1 of at least 2 updates: the model does not change",
        "x": "did not answer",
    }
    assert loop.finish().status == "no_updates"
    assert not (tmp_path / "model.safetensors").exists()
    again = server_loop(tmp_path, rounds=1, start=5.0)  # of the first attempt's model
    assert (again.next_round, again.records) == (1, [])
    assert torch.equal(again.snapshot.theta, torch.full((P,), 4.0))


def test_a_run_with_rounds_left_stays_unfinished_but_has_a_model(tmp_path: Path) -> None:
    loop = server_loop(tmp_path, rounds=2)
    play(loop, [1.0, 1.0])
    assert loop.finish().status == "unfinished"
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_diverged_server_is_still_diverged_after_a_restart(tmp_path: Path, value: float) -> None:
    loop = server_loop(tmp_path)
    step = RULES.aggregate(loop.snapshot, {"0": torch.ones(P), "1": torch.ones(P)}, {})
    loop.save(replace(step.snapshot, theta=torch.full((P,), value)), step.record())
    for run in (loop, server_loop(tmp_path)):
        assert run.ended
        assert run.finish().status == "diverged"


def test_initial_parameters_that_are_not_finite_are_no_divergence() -> None:
    """Sites refuse them, so no round changes the model: the status says that."""
    loop = server_loop(None, rounds=1, start=torch.nan)
    step = unchanged(loop.snapshot, {"0": "gave no update (code 451)"})
    loop.save(step.snapshot, step.record())
    assert loop.finish().status == "no_updates"


DIVERGING: dict[str, dict[str, Any]] = {
    "loss": {"method": "FedAvg", "learning_rate": 1e38},
    "every update": {
        "attacks": (Attack("nan", tuple(f"client-{k:02d}" for k in range(4))),),
    },
}


class StopHereError(Exception):
    """Raised to leave a run in the middle."""


@pytest.mark.parametrize("cause", DIVERGING)
def test_a_run_that_is_killed_after_it_diverged_ends_like_one_that_is_not(
    cause: str, tmp_path: Path
) -> None:
    def stop(record: RoundRecord) -> None:
        if last == record.round:
            raise StopHereError

    def files(folder: Path) -> list[bytes]:
        names = ("rounds.jsonl", "result.json", "model.safetensors")
        return [(folder / name).read_bytes() for name in names]

    options = DIVERGING[cause] | {"rounds": 30}
    whole = small_run(folder=tmp_path / "whole", **options)
    last = len(whole.rounds)
    assert whole.status == "diverged"
    assert last < 30
    with pytest.raises(StopHereError):
        small_run(folder=tmp_path / "cut", on_round=stop, **options)
    assert load_run(tmp_path / "cut").status == "unfinished"
    small_run(folder=tmp_path / "cut", **options)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_spool_reads_back_what_was_written_and_deletes_its_files(tmp_path: Path) -> None:
    updates = {name: torch.randn(P) for name in ("b", "a", "c")}
    with Spool(tmp_path / "incoming") as spool:
        for client, update in updates.items():
            spool.add(client, update)
        assert list(spool) == ["b", "a", "c"]
        assert "a" in spool
        assert "x" not in spool
        assert all(torch.equal(spool[client], update) for client, update in updates.items())
    assert not any((tmp_path / "incoming").iterdir())


def test_what_a_server_may_not_know_is_refused() -> None:
    from noisewise.errors import InvalidValueError

    refused: dict[str, Callable[[], Any]] = {
        "true noise": lambda: ServerRules(make_method("Oracle"), {}, 2),
        "no privacy": lambda: ServerRules(make_method("FedAvg"), {}, 2),
        "must hold epsilon": lambda: ServerRules(make_method("WeiAvg"), {}, 2),
        "min_clients": lambda: ServerRules(METHOD, {}, 0),
    }
    for words, make in refused.items():
        with pytest.raises(InvalidValueError, match=words):
            make()
