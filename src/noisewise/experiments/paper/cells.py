"""From an artefact to runs: one cell for each column, shared between artefacts and resumable."""

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
from noisewise.experiments.comparison import Comparison, OnProgress, compare, wanted_methods
from noisewise.experiments.config import (
    CompareConfig,
    ExperimentConfig,
    MethodConfig,
    TrackConfig,
)
from noisewise.experiments.paper.effort import Effort, read_run_effort, recorded
from noisewise.experiments.paper.published import learning_rate_grid, published_learning_rates
from noisewise.experiments.paper.registry import Artefact, load_artefact
from noisewise.experiments.runner import Job
from noisewise.federation.results import RunResult, load_result, to_json

__all__ = [
    "Column",
    "Wishes",
    "cell_name",
    "column_effort",
    "default_columns",
    "is_finished",
    "make_columns",
    "read_finished",
    "run_column",
]


_RATE = "training.learning_rate"


@dataclass(frozen=True)
class Wishes:
    """What the caller wants otherwise than the artefact's TOML says; None and empty: as it says.

    Attributes:
        seeds: runs of each method.
        rounds: E, also for the budgets.
        columns: names of columns (distributions, for most artefacts).
        methods: names.
        workers: processes.
        settings: further config fields, dotted.

    Raises:
        InvalidValueError: if a column or a method stands there twice.
    """

    seeds: int | None = None
    rounds: int | None = None
    columns: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    workers: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what was given; a run that is counted twice makes means and spreads wrong."""
        no_repeats("--dists", self.columns or ())
        no_repeats("--methods", self.methods or ())

    @property
    def changes(self) -> dict[str, Any]:
        """Config fields to replace."""
        rounds = {} if self.rounds is None else {"training.rounds": self.rounds}
        return {**self.settings, **rounds}


@dataclass(frozen=True)
class Column:
    """One setting with the runs that it needs.

    Attributes:
        name: of the column.
        config: of all its runs.
        jobs: method and seed of each.
        rate: the learning rate that the column stands for, in a search.
        rates: which of the paper's learning rates the jobs have, such as ``mnist Dist6``.
        untold: the sweep's first column, with those of ``jobs`` whose methods are not told the
            swept field; their runs lie in its cell, whichever column needs them.
    """

    name: str
    config: ExperimentConfig
    jobs: tuple[Job, ...]
    rate: float | None = None
    rates: str = ""
    untold: Column | None = None

    @property
    def cells(self) -> tuple[Column, ...]:
        """The column, in a part for each cell that its runs lie in."""
        if self.untold is None:
            return (self,)
        own = tuple(job for job in self.jobs if job not in self.untold.jobs)
        return (replace(self, jobs=own, untold=None), self.untold) if own else (self.untold,)

    @property
    def unpublished(self) -> dict[str, float]:
        """Methods for which the paper prints no learning rate, with the one that they get.

        Empty where the paper's rates are not asked for.
        """
        given = [job for job in self.jobs if self.rates and job.method.learning_rate is None]
        return {job.label: self.config.training.learning_rate for job in given}


def make_columns(artefact: Artefact, wishes: Wishes) -> tuple[Column, ...]:
    """The columns of an artefact that the caller wants, with their jobs."""
    if artefact.about.parts:
        wanted = _chosen({p.name: p for p in artefact.about.parts}, wishes.columns)
        inner = Wishes(wishes.seeds, wishes.rounds, None, wishes.methods, 1, wishes.settings)
        return tuple(
            _renamed(_column(load_artefact(part.artefact), part.column, inner), name)
            for name, part in wanted.items()
        )
    assert artefact.about.sweep is not None
    names = _chosen(_values(artefact), wishes.columns or tuple(artefact.about.sweep.columns))
    if artefact.about.make == "learning_rates":
        assert artefact.about.learning_rates is not None
        grid = learning_rate_grid(artefact.about.learning_rates)
        return tuple(_column(artefact, name, wishes, rate) for name in names for rate in grid)
    return tuple(_column(artefact, name, wishes) for name in names)


def _values(artefact: Artefact) -> dict[str, Any]:
    """What may stand in the swept field, by name; any distribution where one does."""
    assert artefact.about.sweep is not None
    values = artefact.about.sweep.columns
    if artefact.about.sweep.field == "population.epsilon" and "Dist1" not in values:
        named = all(isinstance(value, str) for value in values.values())
        return values | {d: d for d in DISTRIBUTIONS if d not in values} if named else values
    return values


def _chosen(known: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    if wanted is None:
        return dict(known)
    for name in wanted:
        if name not in known:
            raise InvalidValueError("--dists", name, f"must be one of {', '.join(known)}")
    return {name: known[name] for name in wanted}


def default_columns(artefact: Artefact) -> tuple[str, ...]:
    """The columns that the paper shows."""
    if artefact.about.parts:
        return tuple(part.name for part in artefact.about.parts)
    return tuple(artefact.about.sweep.columns) if artefact.about.sweep else ()


def _renamed(column: Column, name: str) -> Column:
    return replace(column, name=name)


def _column(artefact: Artefact, name: str, wishes: Wishes, rate: float | None = None) -> Column:
    sweep = artefact.about.sweep
    assert sweep is not None
    _not_swept(artefact, sweep.field, wishes, rate)
    config = _config(artefact, name, wishes, rate)
    methods = wanted_methods(config, wishes.methods)
    no_repeats("compare.methods", [Job(method, 0).label for method in methods])
    for method in methods:
        if method.learning_rate is not None:
            allowed = f"comes from {artefact.name}; {_RATE} sets one for all methods"
            raise InvalidValueError("compare.methods.learning_rate", method.learning_rate, allowed)
    first = next(iter(sweep.columns))
    homes = [(method, name if _matters(sweep.told, method) else first) for method in methods]
    if name != (wishes.columns or (first,))[0]:  # the others' runs are in the first wanted column
        homes = [(method, name) for method in methods if _matters(sweep.told, method)]
    seeds = config.compare.seeds if wishes.seeds is None else wishes.seeds
    published = rate is None and _RATE not in wishes.changes
    placed = [
        (Job(_method(artefact, home, method, published), config.seed + number), home)
        for number in range(seeds)
        for method, home in homes
    ]

    def made(column: str, some: tuple[Job, ...], untold: Column | None = None) -> Column:
        paper = _rates(artefact, column) if published else ""
        return Column(column, _config(artefact, column, wishes, rate), some, rate, paper, untold)

    away = tuple(job for job, home in placed if home != name)
    return made(name, tuple(job for job, _ in placed), made(first, away) if away else None)


def _config(artefact: Artefact, name: str, wishes: Wishes, rate: float | None) -> ExperimentConfig:
    """The config of a column, or of a rate in it."""
    assert artefact.about.sweep is not None
    changes = {artefact.about.sweep.field: _values(artefact)[name]} | wishes.changes
    return artefact.config(changes if rate is None else changes | {_RATE: rate})


def _not_swept(artefact: Artefact, field: str, wishes: Wishes, rate: float | None) -> None:
    """Refuse a setting of what the columns stand for: all would be alike under other names."""
    taken = {field: "the columns stand for; choose among them by --dists"}
    if rate is not None:
        taken[_RATE] = "this search tries one after the other; leave it out"
    for key, value in wishes.changes.items():
        for name, reason in taken.items():
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                allowed = f"is what {reason} ({artefact.name} sweeps {name})"
                raise InvalidValueError("--set", f"{key}={value}", allowed)


def _matters(told: str | None, method: MethodConfig) -> bool:
    needs = make_method(method.name, method.options).aggregator.needs
    return told is None or told in {need.value for need in needs}


def _rates(artefact: Artefact, column: str) -> str:
    dataset, key = artefact.about.learning_rates, artefact.about.learning_rate_columns.get(column)
    return f"{dataset} {key or column}" if dataset else ""


def _method(artefact: Artefact, column: str, method: MethodConfig, published: bool) -> MethodConfig:
    """A method with the paper's learning rate for the column, where it prints one.

    Not so in a search for rates, and not if the caller sets one for all methods.
    """
    dataset = artefact.about.learning_rates
    if not published or dataset is None:
        return method
    rates = published_learning_rates(dataset).get(method.name, {})
    key = artefact.about.learning_rate_columns.get(column, column)
    return method.model_copy(update={"learning_rate": rates.get(key)})


def cell_name(column: Column) -> str:
    """A folder for a setting, the same for every artefact that has it.

    Methods, seeds and executors do not count: runs have folders of their own below it, and results
    do not depend on who computes them. Nor does it matter where the records lie, and who listens.
    """
    config = column.config
    plain = config.model_dump(mode="json", exclude={"compare", "method", "seed"})
    for key in ("executor", "ray_address"):
        plain["training"].pop(key)
    plain["data"]["folder"] = None
    plain["track"] = TrackConfig().model_dump(mode="json")
    digest = hashlib.sha256(to_json([plain, column.rates]).encode()).hexdigest()[:10]
    epsilon = config.population.epsilon
    words = [config.data.name, str(config.data.clients), config.model.name]
    words.append(epsilon if isinstance(epsilon, str) else "epsilons")
    return "-".join([*words, f"{config.training.rounds}rounds", digest])


def run_column(
    column: Column, store: Path, workers: int, on_round: OnProgress | None = None
) -> Comparison:
    """Run what is not finished yet of a column; finished runs are read back."""
    done: list[Comparison] = []
    for cell in column.cells:
        plain = cell.config.model_copy(update={"compare": CompareConfig()})
        folder = store / cell_name(cell)
        with recorded([_run_folder(cell, job, store) for job in cell.jobs]):
            done.append(compare(plain, cell.jobs, folder, workers=workers, on_round=on_round))
    results = {(r.method, r.seed): r for comparison in done for r in comparison.results}
    keys = [(job.label, job.seed) for job in column.jobs]  # their order is that of the rows
    failures = {job: fault for comparison in done for job, fault in comparison.failures.items()}
    return Comparison(tuple(results[key] for key in keys if key in results), failures)


def _run_folder(column: Column, job: Job, store: Path) -> Path:
    cell = next(cell for cell in column.cells if job in cell.jobs)
    return store / cell_name(cell) / "runs" / job.folder_name


def is_finished(column: Column, store: Path) -> bool:
    """Whether all runs of a column are there, so that none would be trained."""
    folders = [_run_folder(column, job, store) for job in column.jobs]
    return all((folder / "result.json").exists() for folder in folders)


def column_effort(column: Column, results: Sequence[RunResult], store: Path) -> Effort:
    """What the training of some of a column's runs took, whoever trained them and when."""
    used = {(result.method, result.seed) for result in results}
    jobs = [job for job in column.jobs if (job.label, job.seed) in used]
    return sum((read_run_effort(_run_folder(column, job, store)) for job in jobs), Effort())


def read_finished(column: Column, store: Path) -> Comparison:
    """The runs of a column that are finished already; nothing is computed.

    A run that cannot be read is among the failures and does not touch the others.
    """
    found: list[RunResult] = []
    failures: dict[str, str] = {}
    for job in column.jobs:
        folder = _run_folder(column, job, store)
        if not (folder / "result.json").exists():
            continue
        try:
            result = load_result(folder)
            rate = job.method.learning_rate or column.config.training.learning_rate
            if result.settings["learning_rate"] == rate:
                found.append(result)
        except (InvalidValueError, KeyError, TypeError) as error:
            failures[f"{job.label}, seed {job.seed}"] = f"{type(error).__name__}: {error}"
    return Comparison(tuple(found), failures)
