"""One run of a config: a method under a seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from noisewise.aggregation.methods import Method, make_method
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig, MethodConfig
from noisewise.experiments.preflight import check_own_parts
from noisewise.experiments.setup import (
    make_initial_model,
    make_plans,
    make_population,
    under_policy,
)
from noisewise.experiments.tracking import check_tracking, run_name, tracked
from noisewise.federation.attacks import Attack
from noisewise.federation.executors import Executor, Workload
from noisewise.federation.results import RoundRecord, RunResult
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.simulation import simulate
from noisewise.federation.timing import Stopwatch
from noisewise.plugins import load_object
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["Job", "check_runnable", "run", "training_loss"]


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a method under a seed."""

    method: MethodConfig
    seed: int

    @property
    def label(self) -> str:
        """The method's name with its options, as tables show it."""
        options = ", ".join(f"{key}={value}" for key, value in self.method.options.items())
        return f"{self.method.name}({options})" if options else self.method.name

    @property
    def folder_name(self) -> str:
        """A name for files."""
        return re.sub(r"[^A-Za-z0-9.=]+", "-", self.label).strip("-") + f"-seed{self.seed}"


def _method(wanted: MethodConfig, label: str) -> Method:
    return replace(make_method(wanted.name, wanted.options), name=label)


def _callable(spec: str, field: str) -> Callable[..., torch.Tensor]:
    found = load_object(spec, field)
    if not callable(found):
        raise InvalidValueError(field, spec, "must be a function")
    return cast(Callable[..., torch.Tensor], found)


def training_loss(config: ExperimentConfig) -> Callable[..., torch.Tensor]:
    """The loss function that a config names."""
    return _callable(config.training.loss, "training.loss")


def _settings(config: ExperimentConfig, method: MethodConfig) -> TrainingSettings:
    training = config.training
    return TrainingSettings(
        rounds=training.rounds,
        learning_rate=method.learning_rate or training.learning_rate,
        participation=training.participation,
        evaluate_every=training.evaluate_every,
        physical_batch=training.physical_batch,
        device=training.device,
        loss_records=training.loss_records,
    )


def check_runnable(config: ExperimentConfig, job: Job) -> None:
    """Make all that a job names, but train nothing: a wrong value shows now, not after an hour.

    Raises:
        InvalidValueError: what `run` would raise.
    """
    check_tracking(config)
    clients, model = make_population(config, job.seed), make_initial_model(config, job.seed)
    check_model(model)
    _settings(config, job.method)
    loss, metric = training_loss(config), _callable(config.training.metric, "training.metric")
    check_own_parts(config, model, loss, metric, clients[0].data.train)


def run(
    config: ExperimentConfig,
    job: Job,
    *,
    folder: Path | None = None,
    workers: int = 1,
    on_round: Callable[[RoundRecord], None] | None = None,
    clock: Stopwatch | None = None,
    executor: Callable[[Workload], Executor] | None = None,
) -> RunResult:
    """Run one job of a config; see `noisewise.federation.simulate` for folders and resuming.

    ``executor`` replaces the config's, for runs in lock step.
    """
    training = config.training
    clients = make_population(config, job.seed)
    method = _method(job.method, job.label)
    own_budgets = _method(MethodConfig(name="DPFedAvg"), "own budgets")
    plans, model = make_plans(config, clients, method), make_initial_model(config, job.seed)
    settings = _settings(config, job.method)
    loss, metric = training_loss(config), _callable(training.metric, "training.metric")
    check_own_parts(config, model, loss, metric, clients[0].data.train)
    size = ParameterLayout.of(model).size
    method, floor = under_policy(config, method, plans, size, settings.learning_rate)
    facts = {"method": job.label, "seed": job.seed}
    with tracked(config, run_name(folder, job.folder_name), on_round, facts) as listener:
        result = simulate(
            clients,
            plans,
            method,
            model,
            settings,
            seed=job.seed,
            loss=loss,
            metric=metric,
            workers=workers,
            executor=executor or training.executor,
            ray_address=None if executor else training.ray_address,
            folder=folder,
            reference_plans=make_plans(config, clients, own_budgets),
            attacks=[Attack(a.kind, tuple(a.clients), a.strength) for a in config.attacks],
            noise_floor=floor,
            on_round=listener.on_round,
            clock=clock,
        )
        listener.end(result)
    return result
