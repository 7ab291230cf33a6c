"""Tasks from a config to a report, and bad input that ends in one line before training."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import compare
from noisewise.experiments.config import load_config
from noisewise.experiments.prepare import prepare
from noisewise.experiments.runner import run
from noisewise.federation.results import load_result
from noisewise.federation.round_table import round_rows
from noisewise.report.tables import as_csv, as_text, method_rows

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
SHORT = {"training.rounds": 1, "data.clients": 2, "population.epsilon": 8.0}
MAIN = {
    "regression": "mae",
    "binary": "accuracy",
    "multilabel": "micro_f1",
    "segmentation": "mean_iou",
    "language_model": "perplexity",
}

OWN = """
import numpy as np
import torch
from noisewise.data import dataset_from_arrays


def ids():
    rng = np.random.default_rng(0)
    return dataset_from_arrays(rng.integers(0, 30, (40, 4), dtype=np.uint8), rng.integers(0, 2, 40))


def fractions():
    rng = np.random.default_rng(0)
    return dataset_from_arrays(rng.normal(size=(40, 4)), rng.normal(size=40), values=True)


class Small(torch.nn.Module):
    def __init__(self, input_shape, n_classes):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(20, 3), torch.nn.Linear(3, n_classes)

    def forward(self, x):
        return self.last(self.embedding(x).mean(1))


class Deaf(torch.nn.Module):
    def __init__(self, input_shape, n_classes):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(n_classes))

    def forward(self, x):
        return self.bias.expand(len(x), -1)


def one_logit(input_shape, n_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(input_shape[0], 1))


def weighted(outputs, targets):
    weight = torch.arange(1.0, outputs.shape[1] + 1)
    return torch.nn.functional.cross_entropy(outputs, targets, weight=weight)


def summed(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")


def contrastive(outputs, targets):
    scores = outputs @ outputs.T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(outputs)))


def infinite(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets) / 0.0


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).double()


def three(input_shape, n_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(input_shape[0], 3))


class Half(torch.nn.Module):
    def __init__(self, input_shape, n_classes):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], n_classes).bfloat16()

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype))


def mean(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def blobs():
    rng = np.random.default_rng(0)
    return dataset_from_arrays(rng.normal(size=(60, 4)), rng.integers(0, 3, 60))
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("bad_parts", "own_tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.parametrize("name", MAIN)
def test_the_examples_run_and_are_read_back(name: str, tmp_path: Path) -> None:
    config = load_config(EXAMPLES / f"{name}.toml", SHORT)
    result = run(config, folder=tmp_path / "run")
    assert result.status == "finished"
    assert result.metric.name == MAIN[name]
    assert all(math.isfinite(value) for value in result.metrics.values())
    again = load_result(tmp_path / "run")
    assert (again.task, again.metrics) == (result.task, result.metrics)
    table = as_text(method_rows([result]))
    assert f"{MAIN[name]} ± standard error" in table
    assert ("accuracy ±" in table) == (name == "binary")
    assert MAIN[name] in as_csv(method_rows([result])).splitlines()[0].split(",")
    assert math.isnan(result.accuracy) == (name != "binary")
    columns = round_rows(result)[0]
    assert ("accuracy" in columns) == ("accuracy_spread" in columns) == (name == "binary")
    assert MAIN[name] in columns


def test_a_comparison_by_an_error_prefers_the_smaller_one(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "regression.toml", SHORT | {"training.rounds": 3})
    comparison = compare(config, ["DPFedAvg", "FedAvg", "Alone"], 1, folder=tmp_path)
    page = comparison.write_report()[0].read_text()
    assert "Mae over rounds" in page
    assert "lowest" in page or "same final mae" in page or "Lower is better" in page
    assert "accuracy" not in page.split("<footer")[0].lower().replace("noised accuracy", "")
    rows = comparison.to_rows()
    assert {"mae", "rmse", "r2"} <= set(rows[0])


def test_a_confusion_matrix_after_the_last_round(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "binary.toml", SHORT | {"training.rounds": 2})
    result = run(config, folder=tmp_path)
    assert result.rounds[0].confusion is None
    counts = result.rounds[-1].confusion
    assert counts is not None
    clients = prepare(config).clients
    assert sum(map(sum, counts)) == sum(len(client.data.test) for client in clients)
    stored = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])
    assert stored["confusion"] == counts


def bad(fields: dict[str, Any]) -> str:
    base = {
        "data": {"name": "bad_parts:blobs", "clients": 2},
        "population": {"epsilon": 8.0, "batch_size": 8, "delta": 1e-3},
        "model": {"name": "softmax"},
        "training": {"rounds": 1, "learning_rate": 0.5, "clip_norm": 1.0},
    }
    for field, value in fields.items():
        table, _, key = field.partition(".")
        base.setdefault(table, {})[key] = value
    with pytest.raises(InvalidValueError) as caught:
        prepare(base, "DPFedAvg")
    assert "\n" not in str(caught.value)
    return str(caught.value)


OWN_TASK = {
    "task.name": "own",
    "task.metrics": ["bad_parts:hits"],
    "model.name": "bad_parts:three",
}


def test_an_own_task_with_a_mean_of_records_is_accepted() -> None:
    loss = {"training.loss": "torch.nn.functional:cross_entropy"}
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        bad(OWN_TASK | loss)


def test_a_model_in_half_precision_that_converts_its_inputs_is_accepted() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        bad({"model.name": "bad_parts:Half"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data.name": "bad_parts:fractions"}, "regression"),
        ({"model.name": "bad_parts:one_logit"}, 'task.name = "binary"'),
        ({"model.name": "bad_parts:Deaf"}, "must use its inputs"),
        ({"training.loss": "bad_parts:weighted"}, "weights cancel"),
        (OWN_TASK | {"training.loss": "bad_parts:weighted"}, "weights cancel"),
        (OWN_TASK | {"training.loss": "bad_parts:summed"}, "is their sum"),
        (OWN_TASK | {"training.loss": "bad_parts:contrastive"}, "compares records"),
        (OWN_TASK | {"training.loss": "bad_parts:infinite"}, "must be finite: a batch has inf"),
        ({"training.loss": "bad_parts:infinite"}, "must be finite: a batch has inf"),
        ({"training.metric": "bad_parts:mean"}, "one number for each record"),
        ({"task.metrics": ["bad_parts:mean"]}, "one number for each record"),
        ({"data.name": "bad_parts:ids"}, 'data.dtype = "float32"'),
        (
            {"data.name": "bad_parts:ids", "model.name": "bad_parts:Small"},
            "inputs are in 0..29, embeddings have [20] rows",
        ),
        ({"task.classes": 2}, "must be in 0..1"),
        ({"task.name": "segmentation"}, "targets"),
        ({"task.name": "regression", "task.metrics": ["accuracy"]}, "task.metrics = 'accuracy'"),
        (
            {"data.partition": "shards", "data.max_labels": 1, "task.name": "regression"},
            "partition",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_line_before_training(fields: dict[str, Any], said: str) -> None:
    assert said in bad(fields)


def test_a_sweep_of_the_rate_that_methods_override_is_refused() -> None:
    config = load_config(
        EXAMPLES / "binary.toml",
        SHORT | {"compare.methods": [{"name": "WeiAvg", "learning_rate": 0.5}, "DPFedAvg"]},
    )
    with pytest.raises(InvalidValueError, match="would change nothing for WeiAvg"):
        compare(config, seeds=1, sweep={"training.learning_rate": [0.1, 0.2]})
