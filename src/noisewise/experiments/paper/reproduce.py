"""`reproduce`: from the name of an artefact to its outcome, resumably, with files."""

from __future__ import annotations

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
    """An artefact, its outcome and where the outcome comes from."""

    artefact: Artefact
    outcome: Outcome
    origin: Mapping[str, Any]


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
        folder: where the artefact is written (again after each column); None writes nothing.
        store: where runs and updates are kept. Finished ones are not computed again, by whichever
            artefact they were needed first.
        collect: train nothing; make the artefact of the runs that are finished.
        on_column: a context for the time of a column's runs; what it gives hears of every round.
        options: what the caller typed, for the record.
    """
    artefact, wishes = load_artefact(name), wishes or Wishes()
    about = artefact.about
    begun = time.monotonic()

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
            "options": list(options),
        }
        if outcome.effort is not None:
            what = "first round(s)" if about.kind == "first round" else "run(s)"
            origin["compute"] = outcome.effort.data() | {"of": what}
        if folder is not None:
            write_outcome(folder, artefact, whole, origin)
        return Reproduction(artefact, whole, origin)

    if about.kind == "elsewhere":
        return finish(Outcome(), ())
    if collect and about.kind != "trained":
        allowed = f"plays no part in {name}, which needs no finished runs; leave it out"
        raise InvalidValueError("--collect", True, allowed)
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


def _train(
    artefact: Artefact,
    wishes: Wishes,
    store: Path,
    collect: bool,
    on_column: OnColumn | None,
    finish: Callable[[Outcome, Sequence[int]], Reproduction],
    folder: Path | None,
) -> Reproduction:
    """Column by column; what is there so far is written after each."""
    columns = make_columns(artefact, wishes)
    done: list[Trained] = []
    failures: dict[str, str] = {}
    effort = Effort()
    last = None
    for column in columns:
        if not column.jobs:
            comparison = Comparison((), {})
        elif collect:
            comparison = read_finished(column, store)
        else:
            with on_column(column) if on_column else nullcontext() as listen:
                comparison = run_column(column, store, wishes.workers, listen)
        failures |= {f"{column.name}, {job}": fault for job, fault in comparison.failures.items()}
        if comparison.results or not column.jobs:
            effort += column_effort(column, comparison.results, store)
            done.append(Trained(column, comparison.results))
        if done and any(t.results for t in done):
            outcome = _TRAINED[artefact.about.make](artefact, done)
            notes = (*outcome.notes, *trained.notes_on_rates(done))
            seeds = sorted({r.seed for t in done for r in t.results})
            last = finish(replace(outcome, notes=notes, failures=failures, effort=effort), seeds)
            if folder is not None:
                _write_page(folder / "page", artefact, done)
    if last is None:
        if failures:
            return finish(Outcome(failures=failures), ())
        raise InvalidValueError("name", artefact.name, "has no finished runs to collect yet")
    return last if last.outcome.failures == failures else finish(
        replace(last.outcome, failures=failures), last.origin["seeds"]
    )  # fmt: skip


def _write_page(folder: Path, artefact: Artefact, done: Sequence[Trained]) -> None:
    """The runs behind an artefact as one HTML page, one set a column."""
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
    write_report(sets, folder, title=artefact.about.title, draw_parts=False)


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
    if artefact.about.kind == "exact":
        given |= {"--seeds": wishes.seeds, "--rounds": wishes.rounds}
        given |= {"--set": wishes.settings or None}
        reason = "which is computed from closed forms"
    for option, value in given.items():
        if value is not None:
            raise InvalidValueError(option, value, f"plays no part in {artefact.name}, {reason}")


def _accountant(artefact: Artefact, wishes: Wishes) -> str:
    if artefact.experiment is not None:
        return artefact.config(wishes.changes).training.accountant
    return str(wishes.changes.get("training.accountant", "moments"))


_HARMLESS = ("seed", "training.executor", "training.ray_address", "training.evaluate_every")


def _not_comparable(artefact: Artefact, wishes: Wishes) -> str:
    """Why the paper's figures cannot be compared with these, if they cannot."""
    changes = {key: value for key, value in wishes.changes.items() if key not in _HARMLESS}
    if artefact.about.kind not in ("trained", "first round") or not changes:
        return ""
    ours = make_columns(artefact, Wishes(columns=wishes.columns, settings=changes))
    theirs = make_columns(artefact, Wishes(columns=wishes.columns))
    if all(cell_name(a) == cell_name(b) for a, b in zip(ours, theirs, strict=True)):
        return ""
    said = ", ".join(f"{key} = {value}" for key, value in changes.items())
    return f"{said} is not the paper's setting"
