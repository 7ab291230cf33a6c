"""Estimate how long an artefact takes on this machine, from a few timed steps."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from noisewise import __version__
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.populations import authors_population
from noisewise.data.specs import ClientSpec
from noisewise.errors import DiskFullError
from noisewise.experiments.config import ExperimentConfig
from noisewise.federation.executors import one_thread
from noisewise.noise.pursuit import principal_component_pursuit
from noisewise.paper.artefact_runs import Column, Overrides, make_columns
from noisewise.paper.artefacts import Artefact
from noisewise.privacy.accounting import epsilon_of
from noisewise.privacy.plan import make_plan
from noisewise.randomness import SeededRandom
from noisewise.storage import cache_dir, write_atomic
from noisewise.training.engine import make_engine
from noisewise.training.local import TensorData, local_update
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout

__all__ = ["artefact_seconds", "read_times", "times_file", "write_times"]

_BATCHES = (8, 32)
_ITERATIONS = 200  # typical number for principal component pursuit (docs/estimators.md)


@dataclass(frozen=True)
class _Speed:
    """Seconds on one core for a local step, for each record in it, for each evaluated record."""

    step: float
    record: float
    evaluated: float
    parameters: int


def _timed(work: Callable[[], object], least: float = 0.2) -> float:
    """Seconds of the fastest call, after a warm-up call; slower ones may have had to wait."""
    work()
    best, spent = float("inf"), 0.0
    while spent < least:
        begun = time.perf_counter()
        work()
        seconds = time.perf_counter() - begun
        best, spent = min(best, seconds), spent + seconds
    return best


@cache
def _speed(dataset: str, model_name: str) -> _Speed:
    """Time local steps with two batch sizes on random records of a dataset's shape."""
    info = CATALOGUE[dataset]
    model = make_model(model_name, info.shape, info.n_classes, seed=0)
    theta = ParameterLayout.of(model).flatten(model)
    loss = torch.nn.functional.cross_entropy
    engine = make_engine(model, loss, isolate=False)
    seconds = []
    with one_thread():
        for batch in _BATCHES:
            size = 2 * batch
            spec = ClientSpec("probe", size, batch, 1.0, 1e-4)
            plan = make_plan(spec, rounds=1, clip_norm=3.0, accountant="moments")
            generator = torch.Generator().manual_seed(0)
            data = TensorData(
                torch.randn((size, *info.shape), generator=generator),
                torch.randint(info.n_classes, (size,), generator=generator),
            )

            def update(data: TensorData = data, plan: object = plan) -> object:
                rng = SeededRandom(0, 1, "probe")
                return local_update(model, theta, data, plan, 0.001, loss, rng, engine=engine)  # type: ignore[arg-type]

            seconds.append(_timed(update) / plan.steps_per_round)
        with torch.no_grad():
            rows = data.tensor.to(memory_format=torch.channels_last)  # as in evaluation
            evaluated = _timed(lambda: model(rows)) / len(data)
    record = max((seconds[1] - seconds[0]) / (_BATCHES[1] - _BATCHES[0]), 0.0)
    return _Speed(max(seconds[0] - record * _BATCHES[0], 0.0), record, evaluated, len(theta))


@cache
def _estimation(rows: int, clients: int) -> float:
    """Seconds for one principal component pursuit."""
    matrix = np.random.default_rng(0).normal(size=(min(rows, 20_000), clients))

    def first_iterations() -> object:
        return principal_component_pursuit(matrix, max_iterations=20)

    with one_thread():
        return _timed(first_iterations) * _ITERATIONS / 20 * rows / len(matrix)


@cache
def _accounting(accountant: str) -> float:
    """Seconds for one evaluation of an accountant."""
    values = iter(np.linspace(2.0, 9.0, 1000).tolist())
    return _timed(lambda: epsilon_of(32 / 2400, next(values), 15_000, 1e-4, accountant), 0.05)


def _round_seconds(config: ExperimentConfig) -> tuple[float, float]:
    """Seconds for a round (without, with) noise estimation."""
    info = CATALOGUE[config.data.name]
    n = config.data.n_clients
    speed = _speed(config.data.name, config.model.name)
    train = info.n_train if info.deal_test else int(0.8 * info.n_train)
    test = info.n_test if info.deal_test else info.n_train - train
    batch_size = config.population.batch_size
    batches = (
        authors_population("Dist1", n).batch_sizes
        if batch_size == "mixed"
        else batch_size
        if isinstance(batch_size, list)
        else [batch_size or 32] * n
    )
    steps = sum(-(-train // n // batch) for batch in batches)
    plain = steps * speed.step + train * speed.record
    plain += speed.evaluated * (test + n * config.training.loss_records)
    rows = min(speed.parameters, 10**8 // n**2)
    return plain, plain + _estimation(rows, n)


def _column_seconds(column: Column, first_round: bool) -> float:
    without, with_estimate = _round_seconds(column.config)
    if first_round:
        return with_estimate * len({job.seed for job in column.jobs})
    return column.config.training.rounds * sum(
        with_estimate if job.method.name == "RobustHDP" else without for job in column.jobs
    )


def artefact_seconds(artefact: Artefact, overrides: Overrides | None = None) -> float:
    """Estimate the seconds on one core for an artefact without any finished run.

    The estimate leaves out the calibration of budgets, reading data and drawing figures.
    """
    about = artefact.about
    if about.kind in ("elsewhere", "exact"):
        return sum(count * _accounting(name) for name, count in about.evaluations.items())
    columns = make_columns(artefact, overrides or Overrides())
    if about.kind == "first round":
        assert about.sweep is not None
        columns = tuple(c for c in columns if c.name in about.sweep.columns)
    return sum(_column_seconds(column, about.kind == "first round") for column in columns)


def times_file() -> Path:
    """Return the file with the last estimates of this user."""
    return cache_dir() / "reproduce-times.json"


def read_times(names: Iterable[str]) -> dict[str, float] | None:
    """Return stored estimates in seconds by artefact.

    Args:
        names: of all artefacts.

    Returns:
        The estimates; None if there are none for exactly these artefacts on this machine with the
        installed versions.
    """
    try:
        content = json.loads(times_file().read_text())
        seconds = {str(name): float(value) for name, value in content["seconds"].items()}
        machine = content["machine"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    valid = all(0 <= value < math.inf for value in seconds.values())
    return seconds if valid and machine == _machine() and seconds.keys() == {*names} else None


def write_times(seconds: Mapping[str, float]) -> None:
    """Store estimates for `read_times`; without a cache folder they are not stored."""
    content = json.dumps({"machine": _machine(), "seconds": dict(seconds)}, indent=1)
    with suppress(OSError, DiskFullError):
        times_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(times_file(), content.encode())


def _machine() -> list[str]:
    """What the estimates depend on: the machine and the versions of the code."""
    return [platform.node(), platform.machine(), __version__, str(torch.__version__)]
