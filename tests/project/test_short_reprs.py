"""Every object of the public API shows itself in one short line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_model, small_run

import noisewise as nw
from noisewise.aggregation import Disclosure, ServerView, UpdateMatrix
from noisewise.aggregation.base import Aggregation
from noisewise.aggregation.screening import Screened
from noisewise.data import ClientData, Examples, TextDataset
from noisewise.training import LocalUpdate, TensorData
from noisewise.training.tasks import make_task

CONTENT = {
    "data": {"name": "digits", "clients": 60},
    "population": {"epsilon": [0.1 * n for n in range(1, 61)], "batch_size": 16, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 3, "learning_rate": 0.5, "clip_norm": 1.0},
}
IDS = tuple(f"hospital-{n}" for n in range(60))
RECORDS = Examples(np.zeros((500, 3, 32, 32), np.float32), np.arange(500))
UPDATES = UpdateMatrix(torch.zeros(1000, 60), IDS)
ESTIMATE = nw.NoiseEstimate(np.linspace(1, 9, 60), "pcp", details={"scores": list(range(900))})


def small_prepared() -> nw.Prepared:
    clients, method = small_clients(), nw.make_method("RobustHDP")
    plans = nw.plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
    return nw.Prepared(clients, plans, method, small_model(), nw.TrainingSettings(2, 0.2))


def ledger(folder: Path) -> nw.Ledger:
    path = folder / "ledger.sqlite"
    nw.Ledger.create(path, nw.PrivacyBudget(1.0, 1e-5), dataset_id="ward-7")
    return nw.Ledger.open(path, dataset_id="ward-7", budget=nw.PrivacyBudget(1.0, 1e-5))


# The object (made in a folder) and what its repr must say.
OBJECTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "Aggregation": (lambda _: Aggregation(torch.zeros(9), np.full(60, 1 / 60)), ("float32[9]",)),
    "Attack": (lambda _: nw.Attack("nan", IDS), ("nan", "hospital-0")),
    "Client": (lambda _: small_prepared().clients[0], ("epsilon", "id=")),
    "ClientData": (lambda _: ClientData(RECORDS, RECORDS, "ward"), ("ward", "train=500")),
    "ClientSpec": (lambda _: nw.ClientSpec("ward", 90, 8, 1.0, 1e-3), ("ward", "epsilon=1.0")),
    "Comparison": (lambda _: nw.Comparison((small_run(rounds=1),) * 40, {}), ("runs=40",)),
    "Dataset": (lambda _: nw.load_dataset("digits"), ("digits", "n_classes=10", "1797")),
    "Examples": (lambda _: RECORDS, ("float32[500, 3, 32, 32]",)),
    "Execution": (lambda _: nw.Execution(2), ("workers=2",)),
    "ExperimentConfig": (
        lambda _: nw.ExperimentConfig.model_validate(CONTENT),
        ("digits", "softmax", "rounds=3"),
    ),
    "Guard": (lambda _: nw.Guard(1.0), ("Guard",)),
    "InvalidValueError": (lambda _: nw.InvalidValueError("a", 1, "must be 2"), ("must be 2",)),
    "Ledger": (ledger, ("ledger.sqlite",)),
    "LocalPlan": (lambda _: small_prepared().plans[0], ("epsilon", "noise_multiplier")),
    "LocalUpdate": (lambda _: LocalUpdate(torch.zeros(99)), ("float32[99]",)),
    "Method": (lambda _: nw.make_method("RobustHDP"), ("'RobustHDP'",)),
    "MethodConfig": (lambda _: nw.MethodConfig(name="PFA", options={"k": 1}), ("PFA", "k")),
    "NoiseEstimate": (lambda _: ESTIMATE, ("pcp", "updates=60", "largest=9")),
    "NoiseWise": (lambda _: nw.NoiseWise(), ("NoiseWise",)),
    "NoisewiseError": (lambda _: nw.NoisewiseError("wrong"), ("wrong",)),
    "Prepared": (lambda _: small_prepared(), ("method=", "seed=", "clients=", "rounds=")),
    "PrivacyBudget": (lambda _: nw.PrivacyBudget(1.0, 1e-5), ("epsilon=1.0",)),
    "RoundRecord": (lambda _: small_run(rounds=1).rounds[0], ("round=1", "accuracy=")),
    "RunResult": (lambda _: small_run(rounds=1), ("status='finished'", "accuracy=")),
    "Screened": (lambda _: Screened(UPDATES, dict.fromkeys(IDS, "is late")), ("usable=60",)),
    "ServerView": (
        lambda _: ServerView(UPDATES, 3, {Disclosure.EPSILON: np.ones(60)}),
        ("round=3", "float32[1000, 60]"),
    ),
    "Task": (lambda _: make_task("binary"), ("binary", "accuracy")),
    "TensorData": (lambda _: TensorData(torch.zeros(7, 2), torch.zeros(7)), ("float32[7, 2]",)),
    "TextDataset": (
        lambda _: TextDataset("t", ("a",) * 900, np.zeros(900, int), 1, np.zeros(900, int), ("x",)),
        ("texts=900",),
    ),
    "TrainingSettings": (
        lambda _: nw.TrainingSettings(3, 0.5, participation=0.5),
        ("rounds=3", "participation=0.5"),
    ),
    "UpdateMatrix": (lambda _: UPDATES, ("float32[1000, 60]", "hospital-0")),
}


def public_classes() -> Iterator[str]:
    return (name for name in nw.__all__ if isinstance(getattr(nw, name), type))


def test_every_public_class_is_listed() -> None:
    assert set(public_classes()) <= set(OBJECTS)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_short_and_says_which_object_it_is(name: str, tmp_path: Path) -> None:
    make, facts = OBJECTS[name]
    text = repr(make(tmp_path))
    assert len(text) <= 200, f"{len(text)} characters: {text}"
    assert text.isprintable()
    assert re.match(rf"{name}\(", text)
    for fact in facts:
        assert fact in text
