"""`reproduce`: compute an artefact of the paper, resume its runs and write its files."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import Comparison, OnRound
from noisewise.experiments.config import dump_config
from noisewise.paper import bound, exact, first_round, trained
from noisewise.paper.artefact_runs import (
    Column,
    Overrides,
    column_time,
    default_columns,
    is_finished,
    make_columns,
    read_finished,
    run_column,
    setting_name,
)
from noisewise.paper.artefacts import Artefact, load_artefact
from noisewise.paper.outcome import Outcome
from noisewise.paper.outcome_files import check_formats, write_outcome
from noisewise.paper.provenance import provenance
from noisewise.paper.trained import Trained
from noisewise.paper.training_time import TrainingTime
from noisewise.report.comparison_report import write_report
from noisewise.report.run_sets import RunSet

__all__ = ["Overrides", "Reproduction", "reproduce"]

_EXACT: Mapping[str, Callable[[Artefact, Sequence[str]], Outcome]] = {
    "noise_table": exact.noise_table_artefact,
    "noise_variance": exact.noise_variance,
    "z_against_q": exact.z_against_q,
    "h_against_n": exact.h_against_n,
    "model_sizes": exact.model_sizes,
    "convergence": bound.convergence,
}
_FIRST_ROUND: Mapping[str, Callable[[Artefact, Overrides, Path], Outcome]] = {
    "weights": first_round.weights,
    "eigenvalues": first_round.eigenvalues,
    "estimated_noise": first_round.estimated_noise,
    "submatrix_rows": first_round.submatrix_rows,
}
_TRAINED: Mapping[str, Callable[[Artefact, Sequence[Trained]], Outcome]] = {
    "accuracy": trained.accuracy,
    "bars": trained.bars,
    "curves": trained.curves,
    "falsified": trained.falsified,
    "fairness": trained.fairness,
    "learning_rates": trained.learning_rates,
}
STORE = Path("runs/paper/cells")  # finished runs of users are there, so the name stays
OnColumn = Callable[[Column], AbstractContextManager[OnRound | None]]


@dataclass(frozen=True)
class Reproduction:
    """A computed artefact.

    Attributes:
        artefact: its description.
        outcome: its tables, claims and figures.
        origin: commit, date, seeds, accountant, machine and times.
        files: the files that were written.
    """

    artefact: Artefact
    outcome: Outcome
    origin: Mapping[str, Any]
    files: tuple[Path, ...] = ()


def reproduce(
    name: str,
    overrides: Overrides | None = None,
    *,
    folder: Path | None = None,
    store: Path = STORE,
    collect: bool = False,
    formats: Sequence[str] = (),
    on_column: OnColumn | None = None,
    options: Sequence[str] = (),
) -> Reproduction:
    """Compute an artefact of the paper and write it.

    Args:
        name: the name of the artefact; see `artefact_names`.
        overrides: seeds, rounds, columns or methods other than the paper's.
        folder: where the artefact is written; None writes nothing. It is also written after each
            trained column, and at the end with a page of the runs. Nothing is written if no run
            succeeds.
        store: where runs and updates are kept. Finished ones are read instead of computed, also if
            another artefact computed them.
        collect: do not train; make the artefact from the finished runs.
        formats: what to write besides JSON, Markdown and SVG: ``csv``, ``tex``, ``png``, ``pdf``.
        on_column: returns a context for the runs of a column, which yields the function to call
            after every round.
        options: the options that the user typed, for the record; ``--collect`` is added.

    Returns:
        The artefact with its outcome, its origin and the names of its files.

    Raises:
        InvalidValueError: if an override is unknown or has no effect on the artefact.
        OSError: if the folder or the store is not writable; nothing is computed then.

    Example:
        >>> reproduce("model-sizes").outcome.grids[0].rows["CNN (MNIST, FMNIST)"]["parameters"].ours
        28938
    """
    artefact, overrides = load_artefact(name), overrides or Overrides()
    about = artefact.about
    start = time.monotonic()
    check_formats(formats)
    trains = about.kind in ("first round", "trained") and not collect
    for path in (folder, store if trains else None):
        if path is not None:
            _check_writable(path)

    def finish(outcome: Outcome, seeds: Sequence[int]) -> Reproduction:
        reason = _not_comparable(artefact, overrides)
        whole = replace(
            outcome,
            grids=tuple(replace(grid, comparable=not reason) for grid in outcome.grids),
            notes=tuple(dict.fromkeys((*outcome.notes, *about.notes))),
            not_comparable=reason,
        )
        origin = provenance() | {
            "seeds": list(seeds),
            "accountant": _accountant(artefact, overrides),
            "workers": overrides.workers,
            "wall_seconds": time.monotonic() - start,
            "options": [*options, *(["--collect"] if collect else [])],
        }
        if outcome.training_time is not None:
            unit = "first round(s)" if about.kind == "first round" else "run(s)"
            origin["compute"] = outcome.training_time.data() | {"of": unit}
        no_result = about.kind == "trained" and not seeds
        if folder is None or no_result:
            return Reproduction(artefact, whole, origin)
        files = write_outcome(folder, artefact, whole, origin, formats)
        return Reproduction(artefact, whole, origin, files)

    if collect and about.kind != "trained":
        allowed = f"has no effect on {name}, which needs no finished runs; leave it out"
        raise InvalidValueError("--collect", True, allowed)
    if about.kind == "elsewhere":
        _check_effect(artefact, overrides)
        return finish(Outcome(), ())
    if about.kind == "exact":
        _check_effect(artefact, overrides)
        return finish(_EXACT[about.make](artefact, _exact_columns(artefact, overrides)), ())
    if about.kind == "first round":
        _check_effect(artefact, overrides)
        seeds = artefact.config().compare.seeds if overrides.seeds is None else overrides.seeds
        outcome = _FIRST_ROUND[about.make](artefact, overrides, store)
        first = artefact.config(overrides.config_fields).seed
        return finish(outcome, range(first, first + (1 if about.make == "eigenvalues" else seeds)))
    return _train(artefact, overrides, store, collect, on_column, finish, folder)


def _check_writable(folder: Path) -> None:
    """Raise an error before anything is computed if files cannot be written to a folder.

    The folder need not exist.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def _train(
    artefact: Artefact,
    overrides: Overrides,
    store: Path,
    collect: bool,
    on_column: OnColumn | None,
    finish: Callable[[Outcome, Sequence[int]], Reproduction],
    folder: Path | None,
) -> Reproduction:
    """Train column by column; write the artefact after each column that was trained."""
    columns = make_columns(artefact, overrides)
    done: list[Trained] = []
    failures: dict[str, str] = {}
    total = TrainingTime()

    def result() -> Reproduction:
        seeds = sorted({r.seed for t in done for r in t.results})
        if not seeds:
            return finish(Outcome(failures=failures), ())
        outcome = _TRAINED[artefact.about.make](artefact, done)
        notes = (*outcome.notes, *trained.notes_on_rates(done))
        notes += _missing(columns, done) if collect else ()
        whole = replace(outcome, notes=notes, failures=failures, training_time=total)
        return finish(whole, seeds)

    for number, column in enumerate(columns, start=1):
        trains = not collect and not is_finished(column, store)
        if not column.jobs:
            comparison = Comparison((), {})
        elif collect:
            comparison = read_finished(column, store)
        else:
            with on_column(column) if on_column else nullcontext() as on_round:
                comparison = run_column(column, store, overrides.workers, on_round)
        failures |= {f"{_title(column)}, {k}": error for k, error in comparison.failures.items()}
        if comparison.results or not column.jobs:
            total += column_time(column, comparison.results, store)
            done.append(Trained(column, comparison.results))
        if trains and folder is not None and number < len(columns) and comparison.results:
            result()
            _remove_page(folder / "page")  # an earlier call wrote it, from other runs
    if not failures and not any(t.results for t in done):
        raise InvalidValueError("name", artefact.name, "has no finished runs to collect")
    last = result()
    if folder is None or not last.files:
        return last
    return replace(last, files=(*last.files, *_write_page(folder / "page", artefact, done)))


def _title(column: Column) -> str:
    """The name of a column, with its learning rate in a search for rates."""
    return column.name if column.rate is None else f"{column.name}, learning rate {column.rate:g}"


def _missing(columns: Sequence[Column], done: Sequence[Trained]) -> tuple[str, ...]:
    """A note on the runs that are not finished; nothing if all are."""
    finished = {id(t.column): {(r.method, r.seed) for r in t.results} for t in done}
    missing: list[str] = []
    count = total = 0
    for column in columns:
        collected = finished.get(id(column), set())
        seeds: dict[str, list[str]] = {}
        for job in column.jobs:
            if (job.label, job.seed) not in collected:
                seeds.setdefault(job.label, []).append(str(job.seed))
        total, count = total + len(column.jobs), count + len(collected)
        if seeds:
            each = ", ".join(f"{m} (seed {', '.join(s)})" for m, s in seeds.items())
            missing.append(f"{_title(column)}: {each if collected else 'all'}")
    if not missing:
        return ()
    return (f"{count} of {total} runs are finished. Missing: {'; '.join(missing)}.",)


_PAGE_FILES = ("report.html", "report.md", "summary.json", "table.csv", "sweep.csv")
_FIGURE_KINDS = (".pdf", ".png", ".svg")


def _remove_page(folder: Path, keep: Sequence[Path] = ()) -> None:
    """Remove the files that an earlier call wrote to a page's folder, except ``keep``."""
    figures = [p for p in (folder / "figures").glob("*") if p.suffix in _FIGURE_KINDS]
    for path in (*(folder / name for name in _PAGE_FILES), *figures):
        if path not in keep:
            path.unlink(missing_ok=True)


def _write_page(folder: Path, artefact: Artefact, done: Sequence[Trained]) -> tuple[Path, ...]:
    """Write an HTML page of the runs behind an artefact, with one run set for each column.

    Files of an earlier call with other columns are removed.
    """
    sets = [
        RunSet(
            trained.results,
            name=trained.column.name,
            config=dump_config(trained.column.config),
            settings={"column": trained.column.name},
        )
        for trained in done
        if trained.results
    ]
    written = write_report(sets, folder, title=artefact.about.title, draw_parts=False)
    _remove_page(folder, keep=written)
    return written


def _exact_columns(artefact: Artefact, overrides: Overrides) -> tuple[str, ...]:
    allowed_columns = default_columns(artefact)
    for name in overrides.columns or ():
        if name not in allowed_columns:
            allowed = (
                f"must be one of {', '.join(allowed_columns)}"
                if allowed_columns
                else "has no effect here"
            )
            raise InvalidValueError("--dists", name, allowed)
    return overrides.columns or allowed_columns


def _check_effect(artefact: Artefact, overrides: Overrides) -> None:
    """Reject options that have no effect on an artefact, rather than ignore them."""
    options: dict[str, object] = {"--methods": overrides.methods}
    reason = "which shows all methods"
    if artefact.about.kind in ("exact", "elsewhere"):
        options |= {"--seeds": overrides.seeds, "--rounds": overrides.rounds}
        options |= {"--set": dict(overrides.settings) or None}
        reason = "which is computed from closed forms"
    if artefact.about.kind == "elsewhere":
        options |= {"--dists": overrides.columns}
        reason = "which is not computed by this command"
    for option, value in options.items():
        if value is not None:
            allowed = f"has no effect on {artefact.name}, {reason}; leave it out"
            raise InvalidValueError(option, value, allowed)


def _accountant(artefact: Artefact, overrides: Overrides) -> str:
    if artefact.experiment is not None:
        return artefact.config(overrides.config_fields).training.accountant
    return str(overrides.config_fields.get("training.accountant", "moments"))


# Fields that do not change results; device and physical batch change only the rounding of sums.
_HARMLESS = (
    "seed",
    "data.folder",
    "track",
    "training.device",
    "training.evaluate_every",
    "training.executor",
    "training.physical_batch",
    "training.ray_address",
)


def _is_harmless(key: str) -> bool:
    return key in _HARMLESS or key.startswith("track.")


def _not_comparable(artefact: Artefact, overrides: Overrides) -> str:
    """Why our figures cannot be compared with the paper's; empty if they can."""
    fields = overrides.config_fields
    changes = {key: value for key, value in fields.items() if not _is_harmless(key)}
    if artefact.about.kind not in ("trained", "first round") or not changes:
        return ""
    ours = make_columns(artefact, Overrides(columns=overrides.columns, settings=changes))
    paper = make_columns(artefact, Overrides(columns=overrides.columns))
    if all(setting_name(a) == setting_name(b) for a, b in zip(ours, paper, strict=True)):
        return ""
    listed = ", ".join(f"{key} = {value}" for key, value in changes.items())
    return f"{listed} is not the paper's setting"
