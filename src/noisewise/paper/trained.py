"""Artefacts from training: tables and figures of finished runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noisewise.federation.results import RunResult
from noisewise.paper.artefact_runs import Column
from noisewise.paper.artefacts import Artefact, load_artefact
from noisewise.paper.grids import Cell, Grid
from noisewise.paper.outcome import Claim, Outcome
from noisewise.paper.paper_figures import Line, grid_figure, lines_figure, panels_figure
from noisewise.paper.published import published_learning_rates, published_table
from noisewise.report.figures import accuracy_chart

__all__ = [
    "Trained",
    "accuracy",
    "bars",
    "curves",
    "fairness",
    "falsified",
    "learning_rates",
    "notes_on_rates",
]

Score = Callable[[RunResult], float]
_TRUE_EPSILON = 0.95  # true epsilon of the client that reports others, in falsified-epsilon


@dataclass(frozen=True)
class Trained:
    """The finished runs of one column."""

    column: Column
    results: tuple[RunResult, ...]

    def runs(self, method: str) -> list[RunResult]:
        """Return the runs of a method."""
        return [result for result in self.results if result.method == method]


def _methods(trained: Sequence[Trained]) -> list[str]:
    return list(dict.fromkeys(r.method for t in trained for r in t.results))


def notes_on_rates(trained: Sequence[Trained]) -> tuple[str, ...]:
    """Return a note on the methods for which the paper prints no learning rate; else nothing."""
    rates: dict[str, list[str]] = {}
    for method, rate in (pair for t in trained for pair in t.column.unpublished.items()):
        texts = rates.setdefault(method, [])
        texts += [f"{rate:g}"] if f"{rate:g}" not in texts else []
    listed = ", ".join(f"{method} ({' or '.join(texts)})" for method, texts in rates.items())
    note = "The paper prints no learning rate for these methods, so they have the config's and get "
    return (f"{note}no verdict: {listed}.",) if listed else ()


def _cell(
    runs: Sequence[RunResult], score: Score, paper: tuple[float, float], judged: bool
) -> Cell:
    values = [score(run) for run in runs]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    diverged = sum(run.status == "diverged" for run in runs)
    note = f"{diverged} of {len(runs)} diverged" if diverged else ""
    return Cell(float(np.mean(values)), spread, len(values), *paper, note=note, judged=judged)


def _paper(artefact: Artefact, method: str, column: str, table: str | None) -> tuple[float, float]:
    """The published figure of a method and a column, with its deviation; NaN if there is none."""
    about = artefact.about
    if about.parts:
        part = next(part for part in about.parts if part.name == column)
        inner = load_artefact(part.artefact)
        return _paper(inner, method, part.column, inner.about.paper)
    if method == "FedAvg" and about.fedavg is not None:
        return about.fedavg, math.nan
    rows = published_table(table) if table else {}
    return rows.get(about.rows.get(method, method), {}).get(column, (math.nan, math.nan))


def _grid(
    artefact: Artefact,
    trained: Sequence[Trained],
    title: str,
    score: Score,
    table: str | None,
    name: str = "accuracy",
) -> Grid:
    rows = {
        method: {
            t.column.name: _cell(
                t.runs(method),
                score,
                _paper(artefact, method, t.column.name, table),
                method not in t.column.unpublished,
            )
            for t in trained
            if t.runs(method)
        }
        for method in _methods(trained)
    }
    columns = tuple(t.column.name for t in trained)
    return Grid(name, title, columns, rows, 2, artefact.about.tolerance, artefact.about.relative)


def _accuracy(run: RunResult) -> float:
    return 100 * run.accuracy


def _best(grid: Grid, published: bool) -> dict[str, str]:
    """The best private method of each column, by our figures or the published ones."""
    best = {}
    for column in grid.columns:
        scores = {
            row: (cells[column].paper if published else cells[column].ours)
            for row, cells in grid.rows.items()
            if column in cells and cells[column].judged and row not in ("FedAvg", "Oracle")
        }
        scores = {row: value for row, value in scores.items() if math.isfinite(value)}
        if len(scores) > 1:
            best[column] = max(scores, key=lambda row: scores[row])
    return best


def _winner_claim(grid: Grid) -> tuple[Claim, ...]:
    ours, paper = _best(grid, published=False), _best(grid, published=True)
    if not ours:
        return ()
    won = [column for column, row in ours.items() if row == "RobustHDP"]
    same = [column for column in ours if ours[column] == paper.get(column)]
    listed = ", ".join(f"{column}: {row}" for column, row in ours.items())
    measured = f"best of ours: {listed}"
    if paper:
        count = sum(row == "RobustHDP" for row in paper.values())
        measured += f"; the same method as in the paper in {len(same)} of {len(paper)}"
        measured += f"; in the paper Robust-HDP is best in {count} of {len(paper)} of these columns"
    return (
        Claim(
            "Robust-HDP is best in most columns",
            len(won) > len(ours) / 2 if any("RobustHDP" in row for row in grid.rows) else None,
            measured,
        ),
    )


def accuracy(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make a table of mean test accuracies."""
    grid = _grid(artefact, trained, artefact.about.title, _accuracy, artefact.about.paper)
    figure = grid_figure(grid, "mean test accuracy [%]")
    return Outcome((grid,), _winner_claim(grid), {"accuracy": figure})


def bars(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make the figure with four panels in the paper's main part."""
    grid = _grid(artefact, trained, "Mean test accuracy [%]", _accuracy, None)
    figure = panels_figure(grid, "mean test accuracy [%]")
    return Outcome((grid,), _winner_claim(grid), {"accuracy-bars": figure})


def curves(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make the figures of accuracy and train loss over rounds."""
    outcome = accuracy(artefact, trained)
    results = [result for t in trained for result in t.results]
    lines = {}
    for method in _methods(trained):
        runs = [r.rounds for r in results if r.method == method]
        shortest = min(len(rounds) for rounds in runs)
        losses = [[record.mean_train_loss for record in rounds[:shortest]] for rounds in runs]
        mean = np.mean(losses, axis=0)
        finite = np.isfinite(mean)
        if finite.any():
            lines[method] = Line((np.flatnonzero(finite) + 1).tolist(), mean[finite].tolist())
    figures = {
        "accuracy-over-rounds": accuracy_chart(results).figure,
        "loss-over-rounds": lines_figure(lines, "round", "train loss, mean over clients"),
    }
    excluded = {method for t in trained for method in t.column.unpublished}
    methods = [method for method in _methods(trained) if method not in excluded]
    reached = {method: _first_round_above(results, method, 0.7) for method in methods}
    listed = ", ".join(f"{m}: {r if r else 'never'}" for m, r in reached.items())
    robust, others = reached.get("RobustHDP"), [r for m, r in reached.items() if m != "RobustHDP"]
    fastest = robust is not None and all(r is None or robust <= r for r in others)
    conclusive = any(r is not None for r in reached.values()) and "RobustHDP" in reached
    claim = Claim(
        "Robust-HDP converges fastest",
        fastest if conclusive else None,
        f"rounds to 70 %: {listed}",
    )
    return Outcome(outcome.grids, (*outcome.claims, claim), figures)


def _first_round_above(results: Sequence[RunResult], method: str, level: float) -> int | None:
    """The first round in which the mean accuracy over seeds reaches a level; None if none does."""
    runs = [r.rounds for r in results if r.method == method]
    for number in range(min(len(rounds) for rounds in runs)):
        if np.mean([rounds[number].mean_accuracy for rounds in runs]) >= level:
            return number + 1
    return None


def falsified(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make the table of accuracy over the reported epsilon.

    Methods whose server does not receive epsilons have one run for all columns.
    """
    grid = _grid(artefact, trained, artefact.about.title, _accuracy, None)
    needs = {run.method: run.needs for t in trained for run in t.results}
    safe = [m for m in grid.rows if "epsilon" not in needs[m]]
    rows: dict[str, Mapping[str, Cell]] = {}
    for method, cells in grid.rows.items():
        only = next(iter(cells.values()))
        rows[method] = dict.fromkeys(grid.columns, only) if method in safe else cells
    whole = Grid(grid.name, grid.title, grid.columns, rows, 2)
    claims = []
    for method in ("WeiAvg", "PFA"):
        values = {float(c): cell.ours for c, cell in rows.get(method, {}).items()}
        truth, largest = values.get(_TRUE_EPSILON), max(values, default=0.0)
        if truth is not None and largest > _TRUE_EPSILON:
            claims.append(
                Claim(
                    f"{method} loses accuracy when the client exaggerates",
                    values[largest] < truth - 0.5,
                    f"{truth:.2f} % with the true epsilon, {values[largest]:.2f} % with the "
                    "largest reported one",
                )
            )
    if safe:
        text = f"{' and '.join(safe)} cannot be misled"
        claims.append(Claim(text, True, "their server receives no epsilons: one run for all"))
    lines = {}
    for method, cells in rows.items():
        points = sorted((float(c), cell.ours) for c, cell in cells.items())
        lines[method] = Line([x for x, _ in points], [y for _, y in points])
    label = f"reported epsilon (true: {_TRUE_EPSILON:g}; log scale)"
    figure = lines_figure(lines, label, "mean test accuracy [%]", log_x=True)
    return Outcome((whole,), tuple(claims), {"falsified-epsilon": figure})


def fairness(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make the tables of the clients' accuracy deviation and of the smallest client."""
    spread = _grid(
        artefact,
        trained,
        "Standard deviation of the clients' test accuracies [points]",
        lambda run: 100 * run.accuracy_spread,
        "cifar10_all_uniform_fairness",
        "deviation",
    )
    smallest = _grid(
        artefact,
        trained,
        "Test accuracy of the client with the smallest train set [%]",
        lambda run: 100 * run.smallest_client_accuracy,
        "cifar10_all_uniform_smallest_client",
        "smallest-client",
    )
    figures = {
        "fairness": grid_figure(spread, "deviation of clients' accuracies [points]"),
        "smallest-client": grid_figure(smallest, "accuracy of the smallest client [%]"),
    }
    return Outcome((spread, smallest), figures=figures)


def learning_rates(artefact: Artefact, trained: Sequence[Trained]) -> Outcome:
    """Make the table of the learning rates with the smallest final train loss.

    Rates at which a run diverged do not count.
    """
    dataset = artefact.about.learning_rates
    assert dataset is not None
    published = published_learning_rates(dataset)
    columns = tuple(dict.fromkeys(t.column.name for t in trained))
    losses: dict[str, dict[str, dict[str, float]]] = {}
    rows: dict[str, dict[str, Cell]] = {}
    for method in _methods(trained):
        rows[method], losses[method] = {}, {}
        for column in columns:
            by_rate = {
                t.column.rate: _final_loss(t.runs(method))
                for t in trained
                if t.column.name == column and t.column.rate is not None and t.runs(method)
            }
            losses[method][column] = {f"{rate:g}": loss for rate, loss in by_rate.items()}
            usable = {rate: loss for rate, loss in by_rate.items() if math.isfinite(loss)}
            if usable:
                paper = published.get(method, {}).get(column, math.nan)
                best = min(usable, key=lambda rate: usable[rate])
                rows[method][column] = Cell(best, runs=len(by_rate), paper=paper)
    title = f"Learning rates with the smallest train loss, {dataset}"
    grid = Grid("learning-rates", title, columns, rows, None, 0.001, relative=True)
    figure = grid_figure(grid, "learning rate (log scale)", log_y=True)
    return Outcome((grid,), figures={"learning-rates": figure}, data={"train_loss": losses})


def _final_loss(runs: Sequence[RunResult]) -> float:
    """The mean final train loss; NaN if a run diverged."""
    if any(run.status == "diverged" for run in runs):
        return math.nan
    return float(np.mean([run.train_loss for run in runs]))
