"""`compare`: several methods and seeds, prepared once, trained side by side, resumable."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ConfigSource, ExperimentConfig, MethodConfig, dump_config
from noisewise.experiments.config_task import config_task
from noisewise.experiments.output_folders import check_comparison_folder, write_config
from noisewise.experiments.prepare import SeedSetup, prepare, prepare_seed
from noisewise.experiments.runner import Failure, Job, train_jobs
from noisewise.experiments.sweep import SweepPoint, planned_runs, sweep_points, sweep_runs
from noisewise.federation.notebook_view import notebook_html
from noisewise.federation.planned_runs import write_planned_runs
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.round_table import data_frame, round_rows
from noisewise.privacy.plan import LocalPlan
from noisewise.privacy.spending import spending_curve
from noisewise.report.chart import method_styles
from noisewise.report.comparison_report import write_comparison, write_report
from noisewise.report.run_plots import plot_runs
from noisewise.report.run_sets import RunSet, name_sets, read_round_times, settings_text
from noisewise.report.tables import by_method, headings, method_rows
from noisewise.storage import to_json, write_atomic
from noisewise.text import short_repr
from noisewise.training.metrics import MetricInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Comparison", "OnRound", "Progress", "cache_spending", "compare", "run_jobs"]

OnRound = Callable[[str, int, RoundRecord], None]
"""Receives method, seed and record of each round of a comparison."""


class Progress(Protocol):
    """Follows comparisons while they run, as the bars of the command line do."""

    def start(self, title: str, runs: int, rounds: int, metric: MetricInfo | None = None) -> None:
        """Start a comparison with this number of runs and rounds; only sweeps have a title.

        ``metric`` is the main metric of its task.
        """
        ...

    def planned(self, done: int, total: int) -> None:
        """Report how many plans of the first seed are made."""
        ...

    def on_round(self, method: str, seed: int, record: RoundRecord) -> None:
        """Report that a round has ended."""
        ...


@dataclass(frozen=True, repr=False)
class Comparison:
    """The runs of several methods and seeds.

    Attributes:
        results: of the runs that ended, seed by seed.
        failures: what went wrong, by method and seed, for the runs that raised an error.
        config: of the runs; None if they have several.
        folder: where the runs are; None if they were kept in memory.
        settings: the swept fields and their values, if this is a part of a sweep.
        parts: of a sweep: one comparison for each combination of the swept fields.

    Example:
        Of two methods with three seeds each:

            comparison = nw.compare("configs/demo.toml", ["NoiseWise", "DPFedAvg"], seeds=3)
            comparison.to_rows()[0]["accuracy"], comparison.failures
            comparison.write_report("runs/mine")
    """

    results: tuple[RunResult, ...]
    failures: Mapping[str, str]
    config: ExperimentConfig | None = None
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Comparison, ...] = ()

    def to_rows(self, by: Literal["run", "round"] = "run") -> list[dict[str, Any]]:
        """The results as a list of flat rows.

        Args:
            by: "run" for one row with the final metrics of each run, "round" for one row for each
                round of each run. NaN stands for a metric that a run or round does not have.

        Returns:
            Rows with the swept fields, if any, ``method``, ``seed`` and metrics. Accuracies are
            means over the clients.
        """
        if by not in ("run", "round"):
            raise InvalidValueError("by", by, 'must be "run" or "round"')
        if self.parts:
            return [{**part.settings, **row} for part in self.parts for row in part.to_rows(by)]
        if by == "run":
            return [_run_row(run) for run in self.results]
        return [row for run in self.results for row in round_rows(run)]

    def to_frame(self, by: Literal["run", "round"] = "run") -> Any:
        """`to_rows` as a pandas DataFrame; needs the extra ``frame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_rows(by))

    def __repr__(self) -> str:
        """One line: methods, number of runs and failures."""
        methods = list(dict.fromkeys(run.method for run in self.results))
        return short_repr(
            self, runs=len(self.results), failures=len(self.failures), parts=len(self.parts),
            methods=methods,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """A table of the methods and the curves of their main metric, for notebooks."""
        if self.parts:
            rows = [
                [settings_text(part.settings), *row.cells()]
                for part in self.parts
                for row in method_rows(part.results)
            ]
            every = [row for part in self.parts for row in method_rows(part.results)]
            return notebook_html(["settings", *headings(every)], rows, {}, "")
        ranked = method_rows(self.results)
        styles = method_styles(list(by_method(self.results)))
        return notebook_html(
            headings(ranked),
            [row.cells() for row in ranked],
            {method: _mean_curve(runs) for method, runs in by_method(self.results).items()},
            self.results[0].metric.label if self.results else "",
            {method: style.colour for method, style in styles.items()},
        )

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the main metric over the rounds, a line for each method, as in the report.

        Args:
            axes: of matplotlib; by default those of a new figure.

        Raises:
            InvalidValueError: no run was evaluated, or this is a sweep: plot each of its ``parts``.
        """
        if self.parts:
            raise InvalidValueError("parts", len(self.parts), "must be 0: plot one of `parts`")
        return plot_runs(self.results, axes)

    def write_report(self, folder: Path | str | None = None) -> tuple[Path, ...]:
        """Write the page, tables (Markdown, CSV, JSON) and figures (PNG, SVG, PDF).

        For a sweep, the page is one over all of its parts, with ``sweep.csv`` and ``sweep.json``.

        Args:
            folder: where to; by default the folder of the runs.

        Returns:
            The files; ``report.html`` is the first.

        Raises:
            InvalidValueError: there is no folder, or no run has a result.
        """
        target = self.folder if folder is None else Path(folder)
        if target is None:
            raise InvalidValueError("folder", None, "must be given, since runs are in memory only")
        if not self.parts:
            config = None if self.config is None else dump_config(self.config)
            return write_comparison(self.results, target, config)
        files = write_report(self.run_sets, target, draw_parts=False)
        content = [
            {
                "settings": dict(runs.settings),
                "folder": runs.folder,
                "rows": [asdict(row) for row in method_rows(runs.results)],
            }
            for runs in self.run_sets
        ]
        data = target / "sweep.json"
        write_atomic(data, (to_json({"points": content}, indent=1) + "\n").encode())
        return (*files, data)

    @property
    def run_sets(self) -> tuple[RunSet, ...]:
        """The parts of a sweep that have results, named by their settings, for reports."""
        return name_sets(
            [
                RunSet(
                    part.results,
                    name=settings_text(part.settings) if part.folder is None else part.folder.name,
                    config="" if part.config is None else dump_config(part.config),
                    settings=part.settings,
                    folder="" if part.folder is None else part.folder.name,
                    times=read_round_times(_run_folders(part.folder), part.results),
                )
                for part in self.parts
                if part.results
            ]
        )


def _run_folders(folder: Path | None) -> list[Path]:
    return [] if folder is None else sorted((folder / "runs").glob("*"))


_RUN_COLUMNS = (
    "method", "seed", "status", "rounds_changed", "accuracy", "accuracy_spread",
    "worst_tenth_accuracy", "smallest_client_accuracy", "train_loss", "noise_ratio", "signal_share",
    "largest_epsilon",
)  # fmt: skip


def _run_row(run: RunResult) -> dict[str, Any]:
    """A flat row of a run: its figures, and every metric of its task by name."""
    row = {name: getattr(run, name) for name in _RUN_COLUMNS}
    return {**row, **run.metrics}


def _mean_curve(runs: Sequence[RunResult]) -> list[tuple[int, float]]:
    """The mean of the main metric over the seeds of a method, in each round."""
    scores: dict[int, list[float]] = {}
    for run in runs:
        for record in run.rounds:
            figure = run.metric.scale * record.figure(run.metric.name)
            scores.setdefault(record.round, []).append(figure)
    return [(number, sum(values) / len(values)) for number, values in sorted(scores.items())]


def compare(
    config: ConfigSource,
    methods: Sequence[str | MethodConfig] | None = None,
    seeds: int | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    folder: Path | str | None = None,
    workers: int = 1,
    on_round: OnRound | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Train with several methods and seeds.

    Methods under one seed share the split of the records, the initial model and the sampling. An
    invalid field is reported before anything is trained.

    Args:
        config: a config, its content as a mapping, or the path of a TOML file.
        methods: names or `MethodConfig`s; by default those of the config's ``compare`` table, or
            all.
        seeds: runs of each method, from the config's ``seed`` on; by default the config's.
        set: config fields to replace, such as ``{"training.rounds": 5}``.
        sweep: config fields with several values, such as ``{"training.clip_norm": [0.5, 1.0]}``.
            There is one comparison for each combination; see `Comparison.parts`.
        folder: for the config and, below ``runs``, a folder for each run. An interrupted comparison
            is resumed, finished runs are read. The comparisons of a sweep have a folder each, with
            a report. None keeps everything in memory.
        workers: processes. They train several runs at a time, or the clients of one run if the
            config names an executor of several processes.
        on_round: called with method, seed and record of each round.
        progress: follows the comparison, as the bars of the command line do.

    Returns:
        The results. A run that fails does not affect the others; see `Comparison.failures`.

    Raises:
        InvalidValueError: an invalid field, or a folder that holds other runs.
        DiskFullError: the disk is full; all runs stop.

    Example:
        >>> content = {
        ...     "data": {"name": "digits", "clients": 2},
        ...     "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
        ...     "model": {"name": "softmax"},
        ...     "training": {"rounds": 1, "learning_rate": 0.5, "clip_norm": 1.0},
        ... }
        >>> comparison = compare(content, ["DPFedAvg", "WeiAvg"], seeds=1)
        >>> [(result.method, result.status) for result in comparison.results]
        [('DPFedAvg', 'finished'), ('WeiAvg', 'finished')]
    """
    positive_int("workers", workers)
    target = None if folder is None else Path(folder)
    points = sweep_points(config, sweep or {}, methods, seeds, set)
    paths = [target / p.folder_name if target and sweep else target for p in points]
    if sweep:
        _check_points(points, paths)
        if target is not None:
            write_planned_runs(target, sweep_runs(points, target))
    parts = []
    for number, (point, path) in enumerate(zip(points, paths, strict=True), start=1):
        title = f"{number} of {len(points)}: {point.label}" if sweep else ""
        part = run_jobs(
            point.config, point.jobs, path, settings=point.settings, workers=workers,
            on_round=on_round, progress=progress, title=title, strict=True,
        )  # fmt: skip
        if sweep and path is not None and part.results:
            part.write_report()
        parts.append(part)
    if not sweep:
        return parts[0]
    failures = {
        f"{name} ({point.label})": reason
        for point, part in zip(points, parts, strict=True)
        for name, reason in part.failures.items()
    }
    results = tuple(result for part in parts for result in part.results)
    return Comparison(results, failures, folder=target, parts=tuple(parts))


def _check_points(points: Sequence[SweepPoint], paths: Sequence[Path | None]) -> None:
    """Check the folders, records and models of a sweep before anything is trained."""
    for point, path in zip(points, paths, strict=True):
        if path is not None:
            check_comparison_folder(point.config, path, [job.folder_in(path) for job in point.jobs])
    setup: SeedSetup | None = None
    for point in points:
        try:
            setup = prepare_seed(point.config, point.jobs[0].seed, setup)
        except InvalidValueError as error:
            allowed = f"{error.allowed} (in the combination {point.label})"
            raise InvalidValueError(error.field, error.value, allowed) from error


def run_jobs(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    folder: Path | None,
    *,
    settings: Mapping[str, Any] | None = None,
    workers: int = 1,
    on_round: OnRound | None = None,
    progress: Progress | None = None,
    title: str = "",
    strict: bool = False,
) -> Comparison:
    """Run the jobs of a comparison, each in its own folder below ``folder``.

    Args:
        config: of all runs.
        jobs: seed by seed.
        folder: see `compare`.
        settings: the swept fields and their values.
        workers: see `compare`.
        on_round: see `compare`.
        progress: see `compare`.
        title: of the comparison among those of a sweep.
        strict: raise an error in the preparation of the first seed's runs before anything is
            trained, instead of listing it among the failures.
    """
    if folder is not None:
        check_comparison_folder(config, folder, [job.folder_in(folder) for job in jobs])
    if progress is not None:
        progress.start(title, len(jobs), config.training.rounds, config_task(config).main.info)
    n_first = sum(job.seed == jobs[0].seed for job in jobs)
    prepared = _prepare_each(config, jobs, n_first, folder, progress)
    if strict:
        prepared = _check_first(prepared, n_first)
    if folder is not None:
        # First of all the folder `runs`: it shows that a comparison has written config.toml.
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        write_config(config, folder)
        write_planned_runs(folder, planned_runs(config, jobs, folder, folder))

    def tell(job: Job, record: RoundRecord) -> None:
        for listener in (on_round, None if progress is None else progress.on_round):
            if listener is not None:
                listener(job.label, job.seed, record)

    outcomes = train_jobs(config, jobs, prepared, folder, workers, tell)
    pairs = list(zip(jobs, outcomes, strict=True))
    results = tuple(outcome for _, outcome in pairs if isinstance(outcome, RunResult))
    failures = {job.name: failure.reason for job, failure in pairs if isinstance(failure, Failure)}
    return Comparison(results, failures, config, folder, settings or {})


def _prepare_each(
    config: ExperimentConfig,
    jobs: Sequence[Job],
    n_first: int,
    folder: Path | None,
    progress: Progress | None,
) -> Iterator[Prepared | Exception]:
    """Prepare one job after the other, each when it is asked for; errors are values.

    Jobs under one seed share their records, and only one seed's records are held.
    """
    setup: SeedSetup | None = None
    for number, job in enumerate(jobs):
        try:
            setup = prepare_seed(config, job.seed, setup)
            prepared = prepare(config, job.method, job.seed, setup=setup)
            finished = folder is not None and (job.folder_in(folder) / "result.json").exists()
            n_plans = len(prepared.plans)
            for done, plan in enumerate(prepared.plans, start=1):
                if not finished:
                    cache_spending([plan])
                if progress is not None and number < n_first:
                    progress.planned(number * n_plans + done, n_first * n_plans)
        except Exception as error:
            yield error
        else:
            yield prepared


def _check_first(
    prepared: Iterator[Prepared | Exception], n_first: int
) -> Iterator[Prepared | Exception]:
    """Prepare the first runs now and raise the first error; returns all runs."""
    first: deque[Prepared] = deque()
    for ready in itertools.islice(prepared, n_first):
        if isinstance(ready, Exception):
            raise ready
        first.append(ready)
    # Popped one by one, so that no records are held after the seed's last run.
    return itertools.chain((first.popleft() for _ in range(len(first))), prepared)


def cache_spending(plans: Iterable[LocalPlan]) -> None:
    """Compute what each plan spends over its rounds, for threads and processes that start later."""
    for plan in plans:
        if plan.is_private:
            spending_curve(plan)
