"""The runs of an artefact: one setting for each column; artefacts share runs, runs resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from noisewise.aggregation.methods import make_method
from noisewise.checks import no_repeats
from noisewise.data.populations import DISTRIBUTIONS
from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import Comparison, OnRound, run_jobs
from noisewise.experiments.config import (
    CompareConfig,
    ExperimentConfig,
    MethodConfig,
    TaskConfig,
    TrackConfig,
)
from noisewise.experiments.runner import Job, find_methods
from noisewise.federation.results import RunResult, load_result
from noisewise.paper.artefacts import Artefact, load_artefact
from noisewise.paper.published import learning_rate_grid, published_learning_rates
from noisewise.paper.training_time import TrainingTime, read_run_time, recorded
from noisewise.storage import to_json

__all__ = [
    "Column",
    "Overrides",
    "column_time",
    "default_columns",
    "is_finished",
    "make_columns",
    "read_finished",
    "run_column",
    "setting_name",
]


_RATE = "training.learning_rate"


@dataclass(frozen=True)
class Overrides:
    """What the caller sets instead of the artefact's TOML; None or empty keeps the TOML's value.

    Attributes:
        seeds: number of runs of each method.
        rounds: number of rounds E; the budgets are planned for it as well.
        columns: names of the columns (of distributions, for most artefacts).
        methods: names of the methods.
        workers: number of processes.
        settings: other config fields, by dotted name.

    Raises:
        InvalidValueError: if a column or a method is listed twice.
    """

    seeds: int | None = None
    rounds: int | None = None
    columns: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    workers: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject repeated names: a run that counts twice would falsify means and deviations."""
        no_repeats("--dists", self.columns or ())
        no_repeats("--methods", self.methods or ())

    @property
    def config_fields(self) -> dict[str, Any]:
        """The config fields to replace, by dotted name."""
        rounds = {} if self.rounds is None else {"training.rounds": self.rounds}
        return {**self.settings, **rounds}


@dataclass(frozen=True)
class Column:
    """A column of an artefact: one setting with its runs.

    Attributes:
        name: the name of the column.
        config: the config of its runs.
        jobs: method and seed of each run.
        rate: in a search for learning rates, the rate of this column; else None.
        rate_source: which of the paper's learning rates the jobs have, such as ``mnist Dist6``;
            empty if they have none of them.
        shared: the sweep's first column, with those of ``jobs`` whose methods do not receive the
            swept field. Their runs are stored with the first column, whichever column needs them.
    """

    name: str
    config: ExperimentConfig
    jobs: tuple[Job, ...]
    rate: float | None = None
    rate_source: str = ""
    shared: Column | None = None

    @property
    def by_setting(self) -> tuple[Column, ...]:
        """The column, split by the setting under which its runs are stored."""
        if self.shared is None:
            return (self,)
        unshared = tuple(job for job in self.jobs if job not in self.shared.jobs)
        return (
            (replace(self, jobs=unshared, shared=None), self.shared) if unshared else (self.shared,)
        )

    @property
    def unpublished(self) -> dict[str, float]:
        """The learning rate of each method for which the paper prints none.

        Empty if the column does not use the paper's learning rates.
        """
        jobs = [job for job in self.jobs if self.rate_source and job.method.learning_rate is None]
        return {job.label: self.rate_of(job) for job in jobs}

    def rate_of(self, job: Job) -> float:
        """The learning rate of a run.

        Raises:
            InvalidValueError: it is "auto", which the paper does not have.
        """
        rate = job.method.learning_rate or self.config.training.learning_rate
        if isinstance(rate, str):
            raise InvalidValueError("training.learning_rate", rate, "must be a number > 0 here")
        return rate


def make_columns(artefact: Artefact, overrides: Overrides) -> tuple[Column, ...]:
    """Return the selected columns of an artefact, with their jobs.

    Raises:
        InvalidValueError: if a column or method is unknown, or if a setting replaces the field that
            differs between the columns.
    """
    if artefact.about.parts:
        selected = _selected({p.name: p for p in artefact.about.parts}, overrides.columns)
        inner = replace(overrides, columns=None, workers=1)
        return tuple(
            _renamed(_column(load_artefact(part.artefact), part.column, inner), name)
            for name, part in selected.items()
        )
    assert artefact.about.sweep is not None
    names = _selected(_values(artefact), overrides.columns or tuple(artefact.about.sweep.columns))
    if artefact.about.make == "learning_rates":
        assert artefact.about.learning_rates is not None
        grid = learning_rate_grid(artefact.about.learning_rates)
        return tuple(_column(artefact, name, overrides, rate) for name in names for rate in grid)
    return tuple(_column(artefact, name, overrides) for name in names)


def _values(artefact: Artefact) -> dict[str, Any]:
    """The allowed values of the swept field, by column name.

    Where the field takes distributions, all distributions are allowed.
    """
    assert artefact.about.sweep is not None
    values = artefact.about.sweep.columns
    if artefact.about.sweep.field == "population.epsilon" and "Dist1" not in values:
        named = all(isinstance(value, str) for value in values.values())
        return values | {d: d for d in DISTRIBUTIONS if d not in values} if named else values
    return values


def _selected(columns: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(columns)
    for name in names:
        if name not in columns:
            raise InvalidValueError("--dists", name, f"must be one of {', '.join(columns)}")
    return {name: columns[name] for name in names}


def default_columns(artefact: Artefact) -> tuple[str, ...]:
    """Return the names of the columns that the paper shows."""
    if artefact.about.parts:
        return tuple(part.name for part in artefact.about.parts)
    return tuple(artefact.about.sweep.columns) if artefact.about.sweep else ()


def _renamed(column: Column, name: str) -> Column:
    return replace(column, name=name)


def _column(
    artefact: Artefact, name: str, overrides: Overrides, rate: float | None = None
) -> Column:
    sweep = artefact.about.sweep
    assert sweep is not None
    _check_not_swept(artefact, sweep.field, overrides, rate)
    config = _config(artefact, name, overrides, rate)
    methods = find_methods(config, overrides.methods)
    no_repeats("compare.methods", [method.label for method in methods])
    for method in methods:
        if method.learning_rate is not None:
            allowed = f"comes from {artefact.name}; {_RATE} sets one for all methods"
            raise InvalidValueError("compare.methods.learning_rate", method.learning_rate, allowed)
    first = next(iter(sweep.columns))
    stored = [(method, name if _matters(sweep.disclosure, method) else first) for method in methods]
    if name != (overrides.columns or (first,))[0]:  # only the first selected column shows the rest
        stored = [(method, name) for method in methods if _matters(sweep.disclosure, method)]
    seeds = config.compare.seeds if overrides.seeds is None else overrides.seeds
    published = rate is None and _RATE not in overrides.config_fields
    placed = [
        (Job(_method(artefact, column, method, published), config.seed + number), column)
        for number in range(seeds)
        for method, column in stored
    ]

    def make(column: str, jobs: tuple[Job, ...], shared: Column | None = None) -> Column:
        source = _rate_source(artefact, column) if published else ""
        config = _config(artefact, column, overrides, rate)
        return Column(column, config, jobs, rate, source, shared)

    elsewhere = tuple(job for job, column in placed if column != name)
    shared = make(first, elsewhere) if elsewhere else None
    return make(name, tuple(job for job, _ in placed), shared)


def _config(
    artefact: Artefact, name: str, overrides: Overrides, rate: float | None
) -> ExperimentConfig:
    """The config of a column; with ``rate`` as its learning rate, in a search."""
    assert artefact.about.sweep is not None
    changes = {artefact.about.sweep.field: _values(artefact)[name]} | overrides.config_fields
    return artefact.config(changes if rate is None else changes | {_RATE: rate})


def _check_not_swept(
    artefact: Artefact, field: str, overrides: Overrides, rate: float | None
) -> None:
    """Reject a setting of the field that differs between the columns.

    All columns would be the same run under different names.
    """
    swept = {field: "use --dists to choose columns"}
    if rate is not None:
        swept[_RATE] = "leave it out"
    for key, value in overrides.config_fields.items():
        for name, advice in swept.items():
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                allowed = f"cannot be set, because {artefact.name} sweeps {name}; {advice}"
                raise InvalidValueError("--set", f"{key}={value}", allowed)


def _matters(disclosure: str | None, method: MethodConfig) -> bool:
    """Whether the method's server receives the swept field."""
    needs = make_method(method.name, method.options).aggregator.needs
    return disclosure is None or disclosure in {need.value for need in needs}


def _rate_source(artefact: Artefact, column: str) -> str:
    dataset, key = artefact.about.learning_rates, artefact.about.learning_rate_columns.get(column)
    return f"{dataset} {key or column}" if dataset else ""


def _method(artefact: Artefact, column: str, method: MethodConfig, published: bool) -> MethodConfig:
    """The method with the paper's learning rate for the column, if the paper prints one.

    ``published`` is False in a search for learning rates and if the caller sets one for all.
    """
    dataset = artefact.about.learning_rates
    if not published or dataset is None:
        return method
    rates = published_learning_rates(dataset).get(method.name, {})
    key = artefact.about.learning_rate_columns.get(column, column)
    return method.model_copy(update={"learning_rate": rates.get(key)})


# Fields (table, key) that older versions did not have: at their default they do not change a name.
_ADDED_LATER: dict[tuple[str, str], Any] = {
    ("", "columns"): None, ("", "features"): None, ("", "task"): TaskConfig().model_dump(),
    ("data", "min_records"): None, ("data", "target"): None, ("data", "classes"): None,
    ("data", "text_length"): None, ("data", "images"): None, ("data", "dtype"): None,
    ("data", "length"): None, ("data", "person"): None, ("data", "records_per_person"): None,
    ("population", "order"): None, ("population", "unit"): "record",
    ("population", "max_records"): None, ("training", "clip"): "norm",
    ("training", "evaluate_clients"): 1.0, ("training", "schedule"): None,
    ("training", "local_optimiser"): None, ("training", "server_optimiser"): None,
    ("training", "stop_when"): None,
}  # fmt: skip
_EARLIER_DEFAULTS = {
    "loss": "torch.nn.functional:cross_entropy",
    "metric": "noisewise.federation.evaluation:accuracy",
}


def setting_name(column: Column) -> str:
    """Return the folder name of a column's setting; artefacts with the same setting share it.

    Methods and seeds are not part of the name: every run has its own folder below it. Executors,
    the folder of the dataset and the tracking do not change results, so they are not part of it.
    """
    config = column.config
    plain = config.model_dump(mode="json", exclude={"compare", "method", "seed"})
    for key in ("executor", "ray_address"):
        plain["training"].pop(key)
    for (table, key), default in _ADDED_LATER.items():
        fields = plain[table] if table else plain
        if fields[key] == default:
            fields.pop(key)
    for key, default in _EARLIER_DEFAULTS.items():
        if plain["training"][key] is None:
            plain["training"][key] = default
    plain["data"]["folder"] = None
    plain["track"] = TrackConfig().model_dump(mode="json")
    digest = hashlib.sha256(to_json([plain, column.rate_source]).encode()).hexdigest()[:10]
    epsilon = config.population.epsilon
    words = [config.data.name, str(config.data.clients), config.model.name]
    words.append(epsilon if isinstance(epsilon, str) else "epsilons")
    return "-".join([*words, f"{config.training.rounds}rounds", digest])


def run_column(
    column: Column, store: Path, workers: int, on_round: OnRound | None = None
) -> Comparison:
    """Train the runs of a column that are not finished; read the finished ones from the store."""
    done: list[Comparison] = []
    for part in column.by_setting:
        plain = part.config.model_copy(update={"compare": CompareConfig()})
        folder = store / setting_name(part)
        with recorded([_run_folder(part, job, store) for job in part.jobs]):
            done.append(run_jobs(plain, part.jobs, folder, workers=workers, on_round=on_round))
    results = {(r.method, r.seed): r for comparison in done for r in comparison.results}
    keys = [(job.label, job.seed) for job in column.jobs]  # the order of the table's rows
    failures = {job: error for comparison in done for job, error in comparison.failures.items()}
    return Comparison(tuple(results[key] for key in keys if key in results), failures)


def _run_folder(column: Column, job: Job, store: Path) -> Path:
    part = next(part for part in column.by_setting if job in part.jobs)
    return job.folder_in(store / setting_name(part))


def is_finished(column: Column, store: Path) -> bool:
    """Return whether the store has all runs of a column, so that none needs training."""
    folders = [_run_folder(column, job, store) for job in column.jobs]
    return all((folder / "result.json").exists() for folder in folders)


def column_time(column: Column, results: Sequence[RunResult], store: Path) -> TrainingTime:
    """Return the training time of the given runs of a column, summed over all sessions."""
    used = {(result.method, result.seed) for result in results}
    jobs = [job for job in column.jobs if (job.label, job.seed) in used]
    return sum((read_run_time(_run_folder(column, job, store)) for job in jobs), TrainingTime())


def read_finished(column: Column, store: Path) -> Comparison:
    """Read the finished runs of a column from the store, without training.

    A run that cannot be read is listed in the failures; the other runs are still returned.
    """
    results: list[RunResult] = []
    failures: dict[str, str] = {}
    for job in column.jobs:
        folder = _run_folder(column, job, store)
        if not (folder / "result.json").exists():
            continue
        try:
            result = load_result(folder)
            if result.settings["learning_rate"] == column.rate_of(job):
                results.append(result)
        except (InvalidValueError, KeyError, TypeError) as error:
            failures[f"{job.label}, seed {job.seed}"] = f"{type(error).__name__}: {error}"
    return Comparison(tuple(results), failures)
