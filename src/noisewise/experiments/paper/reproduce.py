"""`reproduce`: from the name of an artefact to its outcome, resumably, with files."""

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
from noisewise.experiments.comparison import Comparison, OnProgress
from noisewise.experiments.config import dump_config
from noisewise.experiments.paper import bound, exact, first_round, trained
from noisewise.experiments.paper.cells import (
    Column,
    Wishes,
    cell_name,
    column_effort,
    default_columns,
    is_finished,
    make_columns,
    read_finished,
    run_column,
)
from noisewise.experiments.paper.effort import Effort
from noisewise.experiments.paper.outcome import Outcome
from noisewise.experiments.paper.provenance import provenance
from noisewise.experiments.paper.registry import Artefact, load_artefact
from noisewise.experiments.paper.trained import Trained
from noisewise.experiments.paper.writing import write_outcome
from noisewise.report.comparison import write_report
from noisewise.report.sources import RunSet

__all__ = ["Reproduction", "Wishes", "reproduce"]

_EXACT: Mapping[str, Callable[[Artefact, Sequence[str]], Outcome]] = {
    "noise_table": exact.noise_table_artefact,
    "noise_variance": exact.noise_variance,
    "z_against_q": exact.z_against_q,
    "h_against_n": exact.h_against_n,
    "model_sizes": exact.model_sizes,
    "convergence": bound.convergence,
}
_FIRST_ROUND: Mapping[str, Callable[[Artefact, Wishes, Path], Outcome]] = {
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
OnColumn = Callable[[Column], AbstractContextManager[OnProgress | None]]


@dataclass(frozen=True)
class Reproduction:
    """An artefact, its outcome, where the outcome comes from and the files that hold it."""

    artefact: Artefact
    outcome: Outcome
    origin: Mapping[str, Any]
    files: tuple[Path, ...] = ()


def reproduce(
    name: str,
    wishes: Wishes | None = None,
    *,
    folder: Path | None = None,
    store: Path = Path("runs/paper/cells"),
    collect: bool = False,
    on_column: OnColumn | None = None,
    options: Sequence[str] = (),
) -> Reproduction:
    """Compute an artefact of the paper and write it.

    Args:
        name: see `artefact_names`.
        wishes: other seeds, rounds, columns, methods than the paper's.
        folder: where the artefact is written, also after each column that was trained, and at the
            end with a page of the runs; None writes nothing. Nor is anything written if no run
            ended well.
        store: where runs and updates are kept. Finished ones are not computed again, by whichever
            artefact they were needed first.
        collect: train nothing; make the artefact of the runs that are finished.
        on_column: a context for the time of a column's runs; what it gives hears of every round.
        options: what the caller typed, for the record; ``--collect`` is added.

    Raises:
        InvalidValueError: if a wish is unknown or plays no part in the artefact.
        OSError: if nothing can be written to the folder or the store; nothing was computed then.
    """
    artefact, wishes = load_artefact(name), wishes or Wishes()
    about = artefact.about
    begun = time.monotonic()
    trains = about.kind in ("first round", "trained") and not collect
    for place in (folder, store if trains else None):
        if place is not None:
            _check_writable(place)

    def finish(outcome: Outcome, seeds: Sequence[int]) -> Reproduction:
        fault = _not_comparable(artefact, wishes)
        whole = replace(
            outcome,
            grids=tuple(replace(grid, comparable=not fault) for grid in outcome.grids),
            notes=tuple(dict.fromkeys((*outcome.notes, *about.notes))),
            not_comparable=fault,
        )
        origin = provenance() | {
            "seeds": list(seeds),
            "accountant": _accountant(artefact, wishes),
            "workers": wishes.workers,
            "wall_seconds": time.monotonic() - begun,
            "options": [*options, *(["--collect"] if collect else [])],
        }
        if outcome.effort is not None:
            what = "first round(s)" if about.kind == "first round" else "run(s)"
            origin["compute"] = outcome.effort.data() | {"of": what}
        nothing = about.kind == "trained" and not seeds
        if folder is None or nothing:
            return Reproduction(artefact, whole, origin)
        return Reproduction(artefact, whole, origin, write_outcome(folder, artefact, whole, origin))

    if collect and about.kind != "trained":
        allowed = f"plays no part in {name}, which needs no finished runs; leave it out"
        raise InvalidValueError("--collect", True, allowed)
    if about.kind == "elsewhere":
        _refuse(artefact, wishes)
        return finish(Outcome(), ())
    if about.kind == "exact":
        _refuse(artefact, wishes)
        return finish(_EXACT[about.make](artefact, _exact_columns(artefact, wishes)), ())
    if about.kind == "first round":
        _refuse(artefact, wishes)
        seeds = artefact.config().compare.seeds if wishes.seeds is None else wishes.seeds
        outcome = _FIRST_ROUND[about.make](artefact, wishes, store)
        start = artefact.config(wishes.changes).seed
        return finish(outcome, range(start, start + (1 if about.make == "eigenvalues" else seeds)))
    return _train(artefact, wishes, store, collect, on_column, finish, folder)


def _check_writable(folder: Path) -> None:
    """Fail now, and not after hours, if files cannot be written to a folder that may not exist."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def _train(
    artefact: Artefact,
    wishes: Wishes,
    store: Path,
    collect: bool,
    on_column: OnColumn | None,
    finish: Callable[[Outcome, Sequence[int]], Reproduction],
    folder: Path | None,
) -> Reproduction:
    """Column by column; what is there so far is written after each that was trained."""
    columns = make_columns(artefact, wishes)
    done: list[Trained] = []
    failures: dict[str, str] = {}
    effort = Effort()

    def result() -> Reproduction:
        seeds = sorted({r.seed for t in done for r in t.results})
        if not seeds:
            return finish(Outcome(failures=failures), ())
        outcome = _TRAINED[artefact.about.make](artefact, done)
        notes = (*outcome.notes, *trained.notes_on_rates(done))
        notes += _missing(columns, done) if collect else ()
        return finish(replace(outcome, notes=notes, failures=failures, effort=effort), seeds)

    for number, column in enumerate(columns, start=1):
        news = not collect and not is_finished(column, store)
        if not column.jobs:
            comparison = Comparison((), {})
        elif collect:
            comparison = read_finished(column, store)
        else:
            with on_column(column) if on_column else nullcontext() as listen:
                comparison = run_column(column, store, wishes.workers, listen)
        failures |= {f"{_title(column)}, {k}": fault for k, fault in comparison.failures.items()}
        if comparison.results or not column.jobs:
            effort += column_effort(column, comparison.results, store)
            done.append(Trained(column, comparison.results))
        if news and folder is not None and number < len(columns) and comparison.results:
            result()
            _remove_page(folder / "page")  # of an earlier call, with other runs
    if not failures and not any(t.results for t in done):
        raise InvalidValueError("name", artefact.name, "has no finished runs to collect yet")
    last = result()
    if folder is None or not last.files:
        return last
    return replace(last, files=(*last.files, *_write_page(folder / "page", artefact, done)))


def _title(column: Column) -> str:
    """What tells a column from the others of its artefact."""
    return column.name if column.rate is None else f"{column.name}, learning rate {column.rate:g}"


def _missing(columns: Sequence[Column], done: Sequence[Trained]) -> tuple[str, ...]:
    """Which of the wanted runs are not among those that were collected, if any is missing."""
    found = {id(t.column): {(r.method, r.seed) for r in t.results} for t in done}
    absent: list[str] = []
    count = total = 0
    for column in columns:
        have = found.get(id(column), set())
        seeds: dict[str, list[str]] = {}
        for job in column.jobs:
            if (job.label, job.seed) not in have:
                seeds.setdefault(job.label, []).append(str(job.seed))
        total, count = total + len(column.jobs), count + len(have)
        if seeds:
            each = ", ".join(f"{m} (seed {', '.join(s)})" for m, s in seeds.items())
            absent.append(f"{_title(column)}: {each if have else 'all'}")
    if not absent:
        return ()
    return (f"{count} of {total} runs are finished. Missing: {'; '.join(absent)}.",)


_PAGE_FILES = ("report.html", "report.md", "summary.json", "table.csv", "sweep.csv")
_FIGURE_KINDS = (".pdf", ".png", ".svg")


def _remove_page(folder: Path, but: Sequence[Path] = ()) -> None:
    """Remove what a call wrote to a page's folder, except some files."""
    figures = [p for p in (folder / "figures").glob("*") if p.suffix in _FIGURE_KINDS]
    for path in (*(folder / name for name in _PAGE_FILES), *figures):
        if path not in but:
            path.unlink(missing_ok=True)


def _write_page(folder: Path, artefact: Artefact, done: Sequence[Trained]) -> tuple[Path, ...]:
    """The runs behind an artefact as one HTML page, one set a column.

    Files of an earlier call that had other columns do not stay beside it.
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
    _remove_page(folder, but=written)
    return written


def _exact_columns(artefact: Artefact, wishes: Wishes) -> tuple[str, ...]:
    known = default_columns(artefact)
    for name in wishes.columns or ():
        if name not in known:
            allowed = f"must be one of {', '.join(known)}" if known else "plays no part here"
            raise InvalidValueError("--dists", name, allowed)
    return wishes.columns or known


def _refuse(artefact: Artefact, wishes: Wishes) -> None:
    """Options that play no part in an artefact are an error, lest they seem to."""
    given: dict[str, object] = {"--methods": wishes.methods}
    reason = "which shows all methods"
    if artefact.about.kind in ("exact", "elsewhere"):
        given |= {"--seeds": wishes.seeds, "--rounds": wishes.rounds}
        given |= {"--set": dict(wishes.settings) or None}
        reason = "which is computed from closed forms"
    if artefact.about.kind == "elsewhere":
        given |= {"--dists": wishes.columns}
        reason = "which is not computed by this command"
    for option, value in given.items():
        if value is not None:
            raise InvalidValueError(option, value, f"plays no part in {artefact.name}, {reason}")


def _accountant(artefact: Artefact, wishes: Wishes) -> str:
    if artefact.experiment is not None:
        return artefact.config(wishes.changes).training.accountant
    return str(wishes.changes.get("training.accountant", "moments"))


# What decides no result, or (device, physical batch) only the rounding of sums.
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


def _not_comparable(artefact: Artefact, wishes: Wishes) -> str:
    """Why the paper's figures cannot be compared with these, if they cannot."""
    changes = {key: value for key, value in wishes.changes.items() if not _is_harmless(key)}
    if artefact.about.kind not in ("trained", "first round") or not changes:
        return ""
    ours = make_columns(artefact, Wishes(columns=wishes.columns, settings=changes))
    theirs = make_columns(artefact, Wishes(columns=wishes.columns))
    if all(cell_name(a) == cell_name(b) for a, b in zip(ours, theirs, strict=True)):
        return ""
    said = ", ".join(f"{key} = {value}" for key, value in changes.items())
    return f"{said} is not the paper's setting"
