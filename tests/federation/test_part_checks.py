"""`simulate` refuses parts that do not fit in one line, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import noisewise as nw
from noisewise.data import dataset_from_arrays, make_specs, split_dataset
from noisewise.training.tasks import CLASSIFICATION, Task, make_task

RECORDS = 60


class Rotated(nn.Module):
    """It has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.turn.abs()


def inputs(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(RECORDS, 5)).astype(np.float32)


def classes(largest: int = 2) -> np.ndarray:
    targets = np.arange(RECORDS) % 3
    targets[5] = largest
    return targets


def simulate(model: nn.Module, task: Task, targets: np.ndarray) -> nw.RunResult:
    records = split_dataset(dataset_from_arrays(inputs(), targets), 2)
    specs = make_specs(records, epsilons=[2.0, 4.0], batch_sizes=8, delta=1e-3)
    method = nw.make_method("WeiAvg")
    plans = nw.plan_clients(specs, method, rounds=1, clip_norm=1.0)
    settings = nw.TrainingSettings(rounds=1, learning_rate=0.1)
    clients = nw.make_clients(specs, records)
    return nw.simulate(nw.Prepared(clients, plans, method, model, settings, task=task))


def with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Task:
    return replace(CLASSIFICATION, loss=loss)


@pytest.mark.parametrize(
    ("model", "task", "targets", "said"),
    [
        (nn.Linear(5, 3), CLASSIFICATION, classes(7), "= 7: must be in 0..2; declare task.classes"),
        (
            nn.Linear(5, 3),
            with_loss(nn.CrossEntropyLoss(reduction="none")),
            classes(),
            "one number",
        ),
        (nn.Linear(5, 3), with_loss(nn.CrossEntropyLoss(reduction="sum")), classes(), "their sum"),
        (nn.LazyLinear(3), CLASSIFICATION, classes(), "has no shape yet: call the model once"),
        (Rotated(), CLASSIFICATION, classes(), "parameter 'turn'"),
    ],
    ids=["class", "loss of each record", "sum", "lazy layer", "complex parameter"],
)
def test_parts_that_do_not_fit_are_one_line(
    model: nn.Module, task: Task, targets: np.ndarray, said: str
) -> None:
    with pytest.raises(nw.InvalidValueError) as error:
        simulate(model, task, targets)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_that_fit_train() -> None:
    assert simulate(nn.Linear(5, 3), CLASSIFICATION, classes()).status == "finished"


def test_metrics_are_a_list() -> None:
    with pytest.raises(nw.InvalidValueError, match=r'must be a list: \["accuracy"\]'):
        make_task("classification", metrics="accuracy")
