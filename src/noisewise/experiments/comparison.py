"""Comparisons: several methods and seeds, run side by side and resumably."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from noisewise.aggregation.methods import METHODS, make_method
from noisewise.checks import no_repeats
from noisewise.errors import DiskFullError, NoisewiseError
from noisewise.experiments.config import ExperimentConfig, MethodConfig, dump_config
from noisewise.experiments.preflight import check_folder, check_own_config
from noisewise.experiments.runner import Job, run
from noisewise.experiments.setup import make_plans, make_population
from noisewise.experiments.tracking import check_tracking
from noisewise.federation.executors import end_workers, follow_parent
from noisewise.federation.results import RoundRecord, RunResult
from noisewise.privacy.spending import spending_curve
from noisewise.storage import disk_full, write_atomic

__all__ = ["Comparison", "check_output", "compare", "comparison_jobs", "wanted_methods", "warm_up"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """Results of all jobs that ended well, and what went wrong with the others."""

    results: tuple[RunResult, ...]
    failures: dict[str, str]


def wanted_methods(
    config: ExperimentConfig, methods: Sequence[str] | None = None
) -> list[MethodConfig]:
    """The methods of a comparison: those named, with the options that the config gives them."""
    described = [
        MethodConfig(name=method) if isinstance(method, str) else method
        for method in config.compare.methods or list(METHODS)
    ]
    if methods is not None:
        known = {method.name: method for method in reversed(described)}
        described = [known.get(name, MethodConfig(name=name)) for name in methods]
    for method in described:
        make_method(method.name, method.options)  # fails now rather than after an hour
    return described


def comparison_jobs(
    config: ExperimentConfig, methods: Sequence[str] | None = None, seeds: int | None = None
) -> tuple[Job, ...]:
    """The jobs of a comparison, seed by seed, so that early results compare all methods.

    Args:
        config: its ``compare`` table gives the defaults.
        methods: names; those that the config describes keep its options.
        seeds: how many, from ``config.seed`` on.
    """
    described = wanted_methods(config, methods)
    jobs = tuple(
        Job(method, config.seed + number)
        for number in range(config.compare.seeds if seeds is None else seeds)
        for method in described
    )
    no_repeats("compare.methods", [job.folder_name for job in jobs])
    return jobs


def warm_up(config: ExperimentConfig, jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
    """Calibrate the first seed's plans and their spending over the rounds before workers start.

    Forked workers inherit the accountants' memory, so nothing is computed twice where the seeds
    share their plans, which they do unless the split gives clients other numbers of records.

    Yields:
        (done, total) for a progress display.
    """
    clients = make_population(config, config.seed)
    methods = {job.label: make_method(job.method.name, job.method.options) for job in jobs}
    total = len(methods) * len(clients)
    for number, method in enumerate(methods.values()):
        for place, plan in enumerate(make_plans(config, clients, method)):
            if plan.is_private:
                spending_curve(plan)
            yield number * len(clients) + place + 1, total


def check_output(config: ExperimentConfig, jobs: Sequence[Job], folder: Path) -> None:
    """Refuse a folder that `compare` would refuse, before anything is planned or written.

    Raises:
        InvalidValueError: says what is there.
    """
    check_folder(config, folder, _run_folders(jobs, folder))
    check_own_config(config, folder)


def _run_folders(jobs: Sequence[Job], folder: Path) -> list[Path]:
    return [folder / "runs" / job.folder_name for job in jobs]


_channel: Any = None


def _start_worker(channel: Any) -> None:
    global _channel
    follow_parent()
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
    that fails does not touch the others. Where the config names an executor of several workers, the
    jobs run one after the other and each spreads its clients over the workers.

    Raises:
        InvalidValueError: if the folder holds runs with other settings, or a ``config.toml`` that
            is no comparison's.
        DiskFullError: if there is no room for a run's files; the other runs stop too.
    """
    check_tracking(config)
    check_output(config, jobs, folder)
    paths = _run_folders(jobs, folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)  # first: it says whose the config is
    write_atomic(folder / "config.toml", dump_config(config).encode())
    outcomes: dict[int, RunResult | Exception] = {}
    inside = config.training.executor in ("processes", "ray")
    if workers == 1 or inside:
        for number, (job, path) in enumerate(zip(jobs, paths, strict=True)):
            listen = None if on_round is None else _bound(on_round, job)
            try:
                outcomes[number] = run(
                    config, job, folder=path, workers=workers if inside else 1, on_round=listen
                )
            except Exception as error:  # a failed run must not take the others with it
                outcomes[number] = error
            _stop_if_full(outcomes[number])
    else:
        outcomes = _side_by_side(config, jobs, paths, workers, on_round)
    results, failures = [], {}
    for number, job in enumerate(jobs):
        outcome = outcomes[number]
        if isinstance(outcome, RunResult):
            results.append(outcome)
        else:
            fault = f"{type(outcome).__name__}: {outcome}"
            if not isinstance(outcome, NoisewiseError):  # in code of the user's, or a fault of ours
                _log.info("%s, seed %d failed", job.label, job.seed, exc_info=outcome)
                fault += " (`noisewise -v compare ...` shows where)"
            failures[f"{job.label}, seed {job.seed}"] = fault
    return Comparison(tuple(results), failures)


def _stop_if_full(outcome: RunResult | Exception) -> None:
    """End the comparison if a run found no room on the disk: the others would find none either."""
    full = disk_full(outcome) if isinstance(outcome, Exception) else None
    if full is not None:
        raise full


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
        try:
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
                    _stop_if_full(outcomes[futures[future]])
        except (KeyboardInterrupt, DiskFullError):
            end_workers(pool)
            raise
    return outcomes


def _drain(channel: Any) -> Iterator[tuple[int, RoundRecord]]:
    while True:
        try:
            yield channel.get_nowait()
        except Empty:
            return
