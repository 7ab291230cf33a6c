"""Runs of heads: the same bits for any number of workers and after kill -9, and no copied records.

Up to rounding, they also agree with the general engine and with runs in lock step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executor_cases import hashes
from federation_helpers import small_run

from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.data.examples import Examples, Scaling
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec
from noisewise.federation import (
    Execution,
    Prepared,
    RunResult,
    TrainingSettings,
    executors,
    lockstep,
    make_clients,
    simulate,
)
from noisewise.federation.clients import Client, to_tensors
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.training.models import softmax

FEATURES, CLASSES, RECORDS = 1500, 3, 120
ROUNDS = 3


def wide_clients() -> tuple[Client, ...]:
    """Clients whose products need several tiles; some have one full batch."""
    rng = np.random.default_rng(0)
    specs, data = [], []
    for number, batch in enumerate((RECORDS, RECORDS, 40, 15)):
        inputs = rng.standard_normal((RECORDS + 20, FEATURES), dtype=np.float32)
        inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
        records = Examples(inputs, rng.integers(0, CLASSES, len(inputs)))
        specs.append(ClientSpec(f"client-{number}", RECORDS, batch, 2.0 + number, 1e-3))
        test = records.take(slice(RECORDS, None))
        data.append(ClientData(records.take(slice(RECORDS)), test))
    return make_clients(specs, data)


CLIENTS = wide_clients()


def wide_run(method: str = "NoiseWise", rate: float = 0.5, every: int = 1) -> Prepared:
    chosen = make_method(method)
    plans = plan_clients(
        [c.spec for c in CLIENTS], chosen, rounds=ROUNDS, clip_norm=1.0, accountant="rdp"
    )
    torch_model = softmax((FEATURES,), CLASSES)
    for parameter in torch_model.parameters():
        torch.nn.init.zeros_(parameter)
    settings = TrainingSettings(ROUNDS, rate, evaluate_every=every)
    return Prepared(CLIENTS, plans, chosen, torch_model, settings)


def playing(prepared: Prepared) -> Callable[[MakeExecutor], RunResult]:
    return lambda make: simulate(prepared, execution=Execution(executor=make))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    simulate(wide_run(), folder=folder)
    return folder


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bits_do_not_depend_on_the_workers(
    reference: Path, tmp_path: Path, workers: int
) -> None:
    simulate(wide_run(), execution=Execution(workers, "processes"), folder=tmp_path)
    assert hashes(tmp_path) == hashes(reference)


def killed_run(folder: str, workers: int) -> None:
    """Run in a process of its own that kills itself after the second round."""

    def on_round(record: Any) -> None:
        if record.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    simulate(wide_run(), execution=Execution(workers), folder=folder, on_round=on_round)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bits_are_the_same_after_kill_9_and_resume(
    reference: Path, tmp_path: Path, workers: int
) -> None:
    code = f"import test_head_runs; test_head_runs.killed_run({str(tmp_path)!r}, {workers})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    simulate(wide_run(), execution=Execution(3 - workers), folder=tmp_path)
    assert hashes(tmp_path) == hashes(reference)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_agrees_with_the_general_engine(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = small_run(method, rounds=3)
    monkeypatch.setattr(executors, "head_of", lambda model, loss: None)
    general = small_run(method, rounds=3)
    for mine, other in zip(fast.rounds, general.rounds, strict=True):
        assert mine.mean_train_loss == pytest.approx(other.mean_train_loss, rel=1e-5)
        for client, weight in other.weights.items():
            assert mine.weights[client] == pytest.approx(weight, rel=2e-3, abs=1e-6)


def test_lock_step_does_not_depend_on_its_threads() -> None:
    names = ["NoiseWise", "WeiAvg", "FedAvg"]
    one, two = (
        in_lock_step([playing(wide_run(name)) for name in names], workers=workers)
        for workers in (1, 2)
    )
    assert one == two


def test_runs_that_evaluate_at_other_rounds_stay_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [wide_run("NoiseWise"), wide_run("WeiAvg", every=2), wide_run("DPFedAvg", 0.1, 3)]
    counts: dict[str, list[int]] = {"head_updates": [], "head_outputs": []}

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(lockstep, name)

        def count(head: object, thetas: list[Any], *more: Any) -> Any:
            counts[name].append(len(thetas))
            return original(head, thetas, *more)

        return count

    for name in counts:
        monkeypatch.setattr(lockstep, name, counting(name))
    results = in_lock_step([playing(run) for run in runs])
    assert counts["head_updates"] == [3] * (ROUNDS * len(CLIENTS))
    assert sorted(set(counts["head_outputs"])) == [1, 2, 3]  # rounds 1, 2 and 3
    for run, result in zip(runs, results, strict=True):
        alone = simulate(run)
        for mine, other in zip(result.rounds, alone.rounds, strict=True):
            assert (mine.accuracy is None) == (other.accuracy is None)
            if other.accuracy is not None:
                assert mine.mean_train_loss == pytest.approx(other.mean_train_loss, rel=1e-5)


def test_records_are_hashed_once_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    add_records = lockstep.add_records

    def count(digest: Any, examples: Examples) -> None:
        hashed.append(id(examples))
        add_records(digest, examples)

    monkeypatch.setattr(lockstep, "add_records", count)
    in_lock_step([playing(wide_run(name)) for name in ("NoiseWise", "WeiAvg", "DPFedAvg")])
    assert len(hashed) == 2 * len(CLIENTS)


def test_float32_records_are_not_copied(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).random((5, 4), dtype=np.float32)
    np.save(tmp_path / "inputs.npy", inputs)
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    for array in (inputs, mapped):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = to_tensors(Examples(array, np.zeros(5, np.int64)))
        assert data.inputs.data_ptr() == array.ctypes.data
    scaled = to_tensors(Examples(inputs, np.zeros(5, np.int64), Scaling((1.0,), (2.0,))))
    np.testing.assert_allclose(scaled.inputs.numpy(), (inputs - 1) / 2)
    assert scaled.inputs.data_ptr() != inputs.ctypes.data


def test_training_and_evaluation_leave_the_records_alone() -> None:
    before = [np.array(client.data.train.inputs) for client in CLIENTS]
    in_lock_step([playing(wide_run()), playing(wide_run("WeiAvg"))])
    simulate(wide_run())
    for client, inputs in zip(CLIENTS, before, strict=True):
        np.testing.assert_array_equal(client.data.train.inputs, inputs)
