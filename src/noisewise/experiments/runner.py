"""From a config to results: one run, or many runs of a comparison side by side."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from typing import Any, cast

import torch
from torch import nn

from noisewise.aggregation.methods import METHODS, Method, make_method, plan_clients
from noisewise.data.datasets import Dataset, load_dataset
from noisewise.data.partition import split_dataset
from noisewise.data.populations import (
    authors_population,
    make_specs,
    sample_batch_sizes,
    sample_epsilons,
)
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.experiments.config import ExperimentConfig, MethodConfig, dump_config
from noisewise.federation.clients import Client, make_clients
from noisewise.federation.results import RoundRecord, RunResult
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.simulation import simulate
from noisewise.plugins import load_object
from noisewise.privacy.plan import LocalPlan, epsilon_spent
from noisewise.storage import write_atomic
from noisewise.training.models import make_model

__all__ = ["Comparison", "Job", "compare", "comparison_jobs", "make_population", "run", "warm_up"]


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


@dataclass(frozen=True)
class Comparison:
    """Results of all jobs that ended well, and what went wrong with the others."""

    results: tuple[RunResult, ...]
    failures: dict[str, str]


def _dataset(name: str) -> Dataset:
    """A dataset by name, or what an own function ``"package.module:function"`` returns."""
    if ":" not in name:
        return load_dataset(name)
    found = load_object(name, "data.name")
    made = found() if callable(found) else found
    if not isinstance(made, Dataset):
        raise InvalidValueError("data.name", name, "must give a noisewise Dataset")
    return made


def make_population(config: ExperimentConfig, seed: int) -> tuple[Client, ...]:
    """The clients of a config: the split depends on ``seed``, their settings do not."""
    data, wish = config.data, config.population
    partition: Any = data.partition
    if ":" in data.partition:
        partition = load_object(data.partition, "data.partition")
    parts = split_dataset(
        _dataset(data.name),
        data.clients,
        partition=partition,
        test_fraction=data.test_fraction,
        seed=seed,
        max_labels=data.max_labels,
        alpha=data.alpha,
    )
    epsilons: Any = wish.epsilon
    batch_sizes: Any = wish.batch_size
    if isinstance(epsilons, str):
        epsilons = (
            authors_population(epsilons, data.clients).epsilons
            if wish.draws == "authors"
            else sample_epsilons(epsilons, data.clients, wish.seed)
        )
    if wish.batch_share is not None:
        batch_sizes = [max(1, round(wish.batch_share * len(part.train))) for part in parts]
    elif batch_sizes == "mixed":
        batch_sizes = (
            authors_population("Dist1", data.clients).batch_sizes
            if wish.draws == "authors"
            else sample_batch_sizes(data.clients, wish.seed)
        )
    if wish.epsilon_scale != 1:
        scale = wish.epsilon_scale
        several = isinstance(epsilons, Sequence)
        epsilons = [scale * e for e in epsilons] if several else scale * epsilons
    specs = make_specs(
        parts,
        epsilons=epsilons,
        batch_sizes=batch_sizes,
        delta=wish.delta,
        local_epochs=wish.local_epochs,
    )
    return make_clients(specs, parts, wish.reported_epsilon)


def _model(config: ExperimentConfig, clients: Sequence[Client], seed: int) -> nn.Module:
    train = clients[0].data.train
    n_classes = 1 + max(
        int(part.targets.max())
        for client in clients
        for part in (client.data.train, client.data.test)
    )
    shape = train.inputs.shape[1:]
    return make_model(config.model.name, shape, n_classes, seed, **config.model.options)


def _plans(
    config: ExperimentConfig, clients: Sequence[Client], method: Method
) -> tuple[LocalPlan, ...]:
    planned = config.population.planned_rounds
    return plan_clients(
        [client.spec for client in clients],
        method,
        rounds=config.training.rounds if planned is None else planned,
        clip_norm=config.training.clip_norm,
        accountant=config.training.accountant,
    )


def _method(wanted: MethodConfig, label: str) -> Method:
    return replace(make_method(wanted.name, wanted.options), name=label)


def _callable(spec: str, field: str) -> Callable[..., torch.Tensor]:
    found = load_object(spec, field)
    if not callable(found):
        raise InvalidValueError(field, spec, "must be a function")
    return cast(Callable[..., torch.Tensor], found)


def run(
    config: ExperimentConfig,
    job: Job,
    *,
    folder: Path | None = None,
    workers: int = 1,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> RunResult:
    """Run one job of a config; see `noisewise.federation.simulate` for folders and resuming."""
    training = config.training
    clients = make_population(config, job.seed)
    method = _method(job.method, job.label)
    own_budgets = _method(MethodConfig(name="DPFedAvg"), "own budgets")
    return simulate(
        clients,
        _plans(config, clients, method),
        method,
        _model(config, clients, job.seed),
        TrainingSettings(
            rounds=training.rounds,
            learning_rate=job.method.learning_rate or training.learning_rate,
            participation=training.participation,
            evaluate_every=training.evaluate_every,
            physical_batch=training.physical_batch,
            device=training.device,
        ),
        seed=job.seed,
        loss=_callable(training.loss, "training.loss"),
        metric=_callable(training.metric, "training.metric"),
        workers=workers,
        folder=folder,
        reference_plans=_plans(config, clients, own_budgets),
        on_round=on_round,
    )


def comparison_jobs(
    config: ExperimentConfig, methods: Sequence[str] | None = None, seeds: int | None = None
) -> tuple[Job, ...]:
    """The jobs of a comparison, seed by seed, so that early results compare all methods.

    Args:
        config: its ``compare`` table gives the defaults.
        methods: names; those that the config describes keep its options.
        seeds: how many, from ``config.seed`` on.
    """
    described = [
        MethodConfig(name=method) if isinstance(method, str) else method
        for method in config.compare.methods or list(METHODS)
    ]
    if methods is not None:
        known = {method.name: method for method in reversed(described)}
        described = [known.get(name, MethodConfig(name=name)) for name in methods]
    for method in described:
        make_method(method.name, method.options)  # fails now rather than after an hour
    jobs = tuple(
        Job(method, config.seed + number)
        for number in range(config.compare.seeds if seeds is None else seeds)
        for method in described
    )
    names = [job.folder_name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError("compare.methods", name, "stands there twice")
    return jobs


def warm_up(config: ExperimentConfig, jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
    """Calibrate the first seed's plans and their spending over the rounds before workers start.

    Forked workers inherit the accountants' memory, so nothing is computed twice where the seeds
    share their plans, which they do unless the split gives clients other numbers of records.

    Yields:
        (done, total) for a progress display.
    """
    clients = make_population(config, config.seed)
    methods = {job.label: _method(job.method, job.label) for job in jobs}
    total = len(methods) * len(clients)
    for number, method in enumerate(methods.values()):
        for place, plan in enumerate(_plans(config, clients, method)):
            if plan.is_private:
                for done in range(1, min(plan.rounds, config.training.rounds) + 1):
                    epsilon_spent(plan, done)
            yield number * len(clients) + place + 1, total


_channel: Any = None


def _start_worker(channel: Any) -> None:
    global _channel
    _channel = channel


def _run_in_worker(config: ExperimentConfig, job: Job, number: int, folder: Path) -> RunResult:
    return run(config, job, folder=folder, on_round=lambda record: _channel.put((number, record)))


OnProgress = Callable[[Job, RoundRecord], None]


def compare(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    folder: Path,
    *,
    workers: int = 1,
    on_round: OnProgress | None = None,
) -> Comparison:
    """Run all jobs, several at a time, each in its own folder below ``folder``.

    A comparison that was interrupted goes on where it stopped; finished runs are read back. A run
    that fails does not touch the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", dump_config(config).encode())
    paths = [folder / "runs" / job.folder_name for job in jobs]
    outcomes: dict[int, RunResult | Exception] = {}
    if workers == 1:
        for number, (job, path) in enumerate(zip(jobs, paths, strict=True)):
            listen = None if on_round is None else _bound(on_round, job)
            try:
                outcomes[number] = run(config, job, folder=path, on_round=listen)
            except NoisewiseError as error:
                outcomes[number] = error
    else:
        outcomes = _side_by_side(config, jobs, paths, workers, on_round)
    results, failures = [], {}
    for number, job in enumerate(jobs):
        outcome = outcomes[number]
        if isinstance(outcome, RunResult):
            results.append(outcome)
        else:
            failures[f"{job.label}, seed {job.seed}"] = f"{type(outcome).__name__}: {outcome}"
    return Comparison(tuple(results), failures)


def _bound(on_round: OnProgress, job: Job) -> Callable[[RoundRecord], None]:
    return lambda record: on_round(job, record)


def _side_by_side(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    paths: Sequence[Path],
    workers: int,
    on_round: OnProgress | None,
) -> dict[int, RunResult | Exception]:
    """Jobs over processes; their rounds come back through a queue for the display."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    channel = context.Queue()
    outcomes: dict[int, RunResult | Exception] = {}
    with ProcessPoolExecutor(
        min(workers, len(jobs)), context, initializer=_start_worker, initargs=(channel,)
    ) as pool:
        futures: dict[Future[RunResult], int] = {
            pool.submit(_run_in_worker, config, job, number, path): number
            for number, (job, path) in enumerate(zip(jobs, paths, strict=True))
        }
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.2)
            for number, record in _drain(channel):
                if on_round is not None:
                    on_round(jobs[number], record)
            for future in done:
                try:
                    outcomes[futures[future]] = future.result()
                except Exception as error:  # a failed run must not take the others with it
                    outcomes[futures[future]] = error
    return outcomes


def _drain(channel: Any) -> Iterator[tuple[int, RoundRecord]]:
    while True:
        try:
            yield channel.get_nowait()
        except Empty:
            return
