"""A small federation on the digits dataset, for many tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.data import load_dataset, make_specs, split_dataset
from noisewise.federation import (
    Client,
    Execution,
    Prepared,
    RunResult,
    TrainingSettings,
    make_clients,
    simulate,
)
from noisewise.training.metrics import own_metric
from noisewise.training.models import make_model
from noisewise.training.tasks import CLASSIFICATION, make_task

EPSILONS = [1.0, 4.0, 20.0, 20.0]
BATCHES = [8, 16, 8, 32]
_OF_THE_RUN = ("seed", "task", "reference_plans", "attacks", "noise_floor")


def small_clients(
    seed: int = 0, epsilons: list[float] = EPSILONS, **options: Any
) -> tuple[Client, ...]:
    data = split_dataset(load_dataset("digits"), 40, seed=seed)[: len(epsilons)]
    specs = make_specs(data, epsilons=epsilons, batch_sizes=BATCHES[: len(epsilons)], delta=1e-3)
    return make_clients(specs, data, **options)


def small_model(seed: int = 0) -> nn.Module:
    return make_model("softmax", (1, 8, 8), 10, seed=seed)


def small_run(
    method: str = "RobustHDP",
    *,
    rounds: int = 4,
    planned: int | list[int] | None = None,
    clients: tuple[Client, ...] | None = None,
    learning_rate: float = 0.2,
    options: dict[str, Any] | None = None,
    participation: float = 1.0,
    evaluate_every: int = 1,
    **more: Any,
) -> RunResult:
    clients = clients or small_clients()
    chosen = make_method(method, options)
    plans = plan_clients([c.spec for c in clients], chosen, rounds=planned or rounds, clip_norm=1.0)
    settings = TrainingSettings(rounds, learning_rate, participation, evaluate_every)
    if {"loss", "metric"} & set(more):
        loss = more.pop("loss", CLASSIFICATION.loss)
        metric = more.pop("metric", CLASSIFICATION.main)
        more["task"] = make_task("own", loss=loss, metrics=[own_metric(metric, "metric", "metric")])
    run = {name: more.pop(name) for name in _OF_THE_RUN if name in more}
    ways = {name: more.pop(name) for name in ("workers", "executor", "ray_address") if name in more}
    prepared = Prepared(clients, plans, chosen, small_model(), settings, **run)
    return simulate(prepared, execution=Execution(**ways), **more)
