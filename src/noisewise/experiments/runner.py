"""`run`: train one method under one seed; and many such runs, one by one or side by side."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import nn

from noisewise.aggregation.base import Disclosure
from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import make_method
from noisewise.checks import positive_int
from noisewise.errors import DiskFullError, InvalidValueError, NoisewiseError
from noisewise.experiments.config import ConfigSource, ExperimentConfig, MethodConfig, as_config
from noisewise.experiments.output_folders import check_run_folder, write_config
from noisewise.experiments.prepare import find_method, prepare
from noisewise.experiments.tracking import run_name, tracked
from noisewise.experiments.training_options import local_optimiser
from noisewise.federation.executors import Execution, ExecutorFactory, one_thread
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.simulation import simulate
from noisewise.federation.stopwatch import Stopwatch
from noisewise.federation.trained_model import ModelStructure
from noisewise.report.model_card import MODEL_CARD, write_model_card
from noisewise.storage import disk_full
from noisewise.worker_processes import follow_parent

__all__ = ["Failure", "Job", "comparison_jobs", "find_methods", "run", "train", "train_jobs"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a method under a seed."""

    method: MethodConfig
    seed: int

    @property
    def label(self) -> str:
        """The method's name with its options, as tables show it."""
        return self.method.label

    @property
    def name(self) -> str:
        """Method and seed, as messages show them."""
        return f"{self.label}, seed {self.seed}"

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        return _folder_name(self.label, self.seed)

    def folder_in(self, comparison: Path) -> Path:
        """The run's folder in that of a comparison."""
        return comparison / "runs" / self.folder_name


def _folder_name(label: str, seed: int) -> str:
    return re.sub(r"[^A-Za-z0-9.=]+", "-", label).strip("-") + f"-seed{seed}"


def find_methods(
    config: ExperimentConfig, methods: Sequence[str | MethodConfig] | None = None
) -> list[MethodConfig]:
    """The settings of the methods of a comparison.

    Args:
        config: its ``compare.methods`` are the default, or else all methods that it permits:
            `Alone` requires every client in every round, no attacks and no Ray.
        methods: names or settings; a name has the options that the config gives it.

    Raises:
        InvalidValueError: there is no such method, or one of its options is invalid.
    """
    if methods is None:
        listed = config.compare.methods or [name for name in METHODS if _permits(config, name)]
        chosen = [MethodConfig(name=m) if isinstance(m, str) else m for m in listed]
    else:
        several: Any = [methods] if isinstance(methods, (str, MethodConfig)) else methods
        if not isinstance(several, Iterable):
            allowed = "must be a list of names or MethodConfigs"
            raise InvalidValueError("methods", methods, allowed)
        chosen = [find_method(config, method) for method in several]
    if not chosen:
        raise InvalidValueError("methods", [], "must be one or more")
    for method in chosen:
        make_method(method.name, method.options)  # refuses unknown ones before records are read
    return chosen


def _permits(config: ExperimentConfig, name: str) -> bool:
    training = config.training
    shared_only = (
        config.attacks
        or training.participation != 1
        or training.executor == "ray"
        or training.stop_when is not None
    )
    method = make_method(name)
    if local_optimiser(config).noise_steps(1) is None:  # no method that needs the true noise
        return method.shares_model and Disclosure.TRUE_VARIANCE not in method.needs
    return not shared_only or method.shares_model


def comparison_jobs(
    config: ExperimentConfig,
    methods: Sequence[str | MethodConfig] | None = None,
    seeds: int | None = None,
) -> tuple[Job, ...]:
    """The runs of a comparison, seed by seed, so that early results compare all methods.

    Args:
        config: its ``compare`` table gives the defaults.
        methods: see `find_methods`.
        seeds: how many, from ``config.seed`` on.
    """
    described = find_methods(config, methods)
    n_seeds = config.compare.seeds if seeds is None else positive_int("seeds", seeds)
    jobs = tuple(
        Job(method, config.seed + number) for number in range(n_seeds) for method in described
    )
    names = [job.folder_name for job in jobs]
    repeats = [job.label for job in jobs if names.count(job.folder_name) > 1]
    if repeats:
        raise InvalidValueError("compare.methods", repeats[0], "is listed twice; list it once")
    return jobs


def run(
    config: ConfigSource,
    method: str | MethodConfig | None = None,
    seed: int | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    workers: int = 1,
    on_round: Callable[[RoundRecord], None] | None = None,
    clock: Stopwatch | None = None,
    executor: ExecutorFactory | None = None,
) -> RunResult:
    """Train once, with one method under one seed.

    Args:
        config: a config, its content as a mapping, or the path of a TOML file.
        method: a name or a `MethodConfig`; by default the config's.
        seed: by default the config's.
        set: config fields to replace, such as ``{"training.rounds": 5}``.
        folder: for the config, the checkpoints and the result. An interrupted run is resumed, a
            finished one is read. None keeps everything in memory.
        workers: processes for the clients' training.
        on_round: called with the record of each round.
        clock: measures where the time of the rounds goes.
        executor: replaces the config's, for runs in lock step.

    Returns:
        The records of all rounds; see `noisewise.RunResult`.

    Raises:
        InvalidValueError: an invalid field, or a folder that holds another run.

    Example:
        >>> content = {
        ...     "data": {"name": "digits", "clients": 2},
        ...     "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
        ...     "model": {"name": "softmax"},
        ...     "training": {"rounds": 3, "learning_rate": 0.5, "clip_norm": 1.0},
        ... }
        >>> run(content, "DPFedAvg", set={"training.rounds": 1}).status
        'finished'
    """
    config = as_config(config, set)
    path = None if folder is None else Path(folder)
    if path is not None:
        check_run_folder(config, path)
    prepared = prepare(config, method, seed)
    if path is not None:
        write_config(config, path)
    training = config.training
    execution = Execution(workers, training.executor, training.ray_address)
    if executor is not None:
        execution = Execution(executor=executor)
    return train(config, prepared, path, execution=execution, on_round=on_round, clock=clock)


def train(
    config: ExperimentConfig,
    prepared: Prepared,
    folder: Path | None = None,
    *,
    execution: Execution | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    clock: Stopwatch | None = None,
) -> RunResult:
    """Train a prepared run and send its rounds to the config's trackers.

    Args:
        config: its ``track`` table.
        prepared: from `prepare`.
        folder: see `noisewise.federation.simulate`.
        execution: which processes compute.
        on_round: called with the record of each round.
        clock: measures where the time of the rounds goes.
    """
    method, seed = prepared.method.name, prepared.seed
    name = run_name(folder, _folder_name(method, seed))
    with tracked(config, name, on_round, {"method": method, "seed": seed}) as listener:
        listen = listener.on_round
        result = simulate(
            prepared, execution=execution, folder=folder, on_round=listen, clock=clock
        )
        listener.end(result)
    if folder is not None and not _card_is_newer(folder):
        write_model_card(result, folder, config.model_dump(mode="json"))
    return result


def _card_is_newer(folder: Path) -> bool:
    """Whether the model card was written after the result: a finished run is only read."""
    card, result = folder / MODEL_CARD, folder / "result.json"
    return card.exists() and card.stat().st_mtime_ns >= result.stat().st_mtime_ns


@dataclass(frozen=True)
class Failure:
    """Why a run has no result.

    Attributes:
        reason: type and text of the error.
        disk_full: the error, if the disk is full.
    """

    reason: str
    disk_full: DiskFullError | None


Outcome = RunResult | Failure
_Tell = Callable[[Job, RoundRecord], None]


def train_jobs(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    prepared: Iterator[Prepared | Exception],
    folder: Path | None,
    workers: int,
    on_round: _Tell,
) -> list[Outcome]:
    """Train runs; one that fails does not affect the others.

    Args:
        config: of all runs.
        jobs: method and seed of each.
        prepared: in the same order, made when they are asked for; an error makes the run fail.
        folder: of the comparison; each run has its own below ``runs``.
        workers: processes. Each trains one run at a time, or all of them the clients of one run if
            the config names an executor of several processes.
        on_round: called with the job and the record of each round.

    Returns:
        An outcome for each job.

    Raises:
        DiskFullError: the disk is full, so that the other runs could not write either.
    """
    training = config.training
    if workers > 1 and training.executor not in ("processes", "ray"):
        return _side_by_side(config, jobs, prepared, folder, workers, on_round)
    execution = Execution(workers, training.executor, training.ray_address)
    outcomes: list[Outcome] = []
    for job, ready in zip(jobs, prepared, strict=True):
        listen = functools.partial(on_round, job)
        outcomes.append(_attempt(config, job, ready, folder, execution, listen))
        _stop_if_disk_full(outcomes[-1])
    return outcomes


def _attempt(
    config: ExperimentConfig,
    job: Job,
    prepared: Prepared | Exception,
    folder: Path | None,
    execution: Execution,
    on_round: Callable[[RoundRecord], None],
) -> Outcome:
    """Train a run; an error becomes a value."""
    try:
        if isinstance(prepared, Exception):
            raise prepared
        path = None if folder is None else job.folder_in(folder)
        result = train(config, prepared, path, execution=execution, on_round=on_round)
        # The results of a comparison do not hold models in memory that are in its folder.
        return result if path is None else result.with_model_in(path, prepared.model)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, NoisewiseError):  # in the user's own code, or a bug of ours
            _log.info("%s failed", job.name, exc_info=error)
            reason += " (`noisewise -v compare ...` shows the traceback)"
        return Failure(reason, disk_full(error))


def _stop_if_disk_full(outcome: Outcome) -> None:
    if isinstance(outcome, Failure) and outcome.disk_full is not None:
        raise outcome.disk_full


def _side_by_side(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    prepared: Iterator[Prepared | Exception],
    folder: Path | None,
    workers: int,
    on_round: _Tell,
) -> list[Outcome]:
    """Train each run in a process of its own, ``workers`` at a time.

    This process prepares the runs. Where the system can fork, a new process has its run in memory
    already and computes nothing of it again.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    outcomes: dict[int, Outcome] = {}
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    models: dict[int, nn.Module] = {}

    def collect() -> None:
        """Wait for messages and read them: records of rounds, and each run's outcome."""
        for receiver in wait(list(running)):
            assert isinstance(receiver, Connection)
            number, process = running[receiver]
            try:
                message = receiver.recv()
            except (EOFError, OSError):
                process.join()
                reason = f"its process ended with exit code {process.exitcode}; out of memory?"
                message = Failure(reason, None)
            if isinstance(message, RoundRecord):
                on_round(jobs[number], message)
                continue
            outcomes[number] = _with_structure(message, models.get(number))
            del running[receiver]
            process.join()
            _stop_if_disk_full(message)

    try:
        for number, (job, ready) in enumerate(zip(jobs, prepared, strict=True)):
            while len(running) == workers:
                collect()
            receiver, sender = context.Pipe(duplex=False)
            if isinstance(ready, Prepared):
                models[number] = ready.model
            attempt = functools.partial(_attempt, config, job, ready, folder, Execution())
            process = context.Process(target=_train_in_process, args=(sender, attempt))
            process.start()
            sender.close()
            running[receiver] = number, process
        while running:
            collect()
    except BaseException:
        for _, process in running.values():
            process.terminate()  # checkpoints hold what is done
        raise
    return [outcomes[number] for number in range(len(jobs))]


def _with_structure(outcome: Outcome, model: nn.Module | None) -> Outcome:
    """The outcome of another process, which sends parameters but no model, with its model."""
    if isinstance(outcome, Failure) or outcome.trained is None or model is None:
        return outcome
    return replace(outcome, trained=replace(outcome.trained, structure=ModelStructure.of(model)))


def _train_in_process(
    sender: Connection, attempt: Callable[[Callable[[RoundRecord], None]], Outcome]
) -> None:
    """Train one run in a process of its own and send the records of its rounds and its outcome.

    All of it runs on one thread: OpenMP's threads of the parent do not exist after a fork, and a
    parallel operation would wait for them forever.
    """
    follow_parent()
    sys.stderr = sys.__stderr__  # the parent's display may have held a lock on the other one
    messages: SimpleQueue[RoundRecord | Outcome] = SimpleQueue()

    def send() -> None:  # in a thread: the parent may be too busy to read
        while True:
            message = messages.get()
            sender.send(message)
            if not isinstance(message, RoundRecord):
                return

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    with one_thread():
        messages.put(attempt(messages.put))
    thread.join()
