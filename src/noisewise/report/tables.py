"""Tables of a comparison: one row for each method, as text, Markdown and CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noisewise.federation.results import RunResult
from noisewise.federation.task_info import MetricInfo, TaskInfo
from noisewise.report.cell_text import csv_text, markdown_table, printable_run
from noisewise.report.disclosures import DISCLOSURES
from noisewise.text import align_columns, printable

__all__ = [
    "NOT_KNOWN",
    "MethodRow",
    "aligned",
    "as_csv",
    "as_markdown",
    "as_run_csv",
    "as_text",
    "by_method",
    "headings",
    "mean_weights",
    "method_rows",
]

ACCURACY = TaskInfo().main
NOT_KNOWN = "not known to the server"
"""Epsilon in the report of a real federation: the server cannot see how an update was made."""


def headings(rows: Sequence[MethodRow]) -> tuple[str, ...]:
    """Return the names of the columns of `MethodRow.cells`."""
    names = {row.metric.name for row in rows}
    others = rows[0].others if rows else ()
    return (
        "method",
        f"{names.pop() if len(names) == 1 else 'score'} ± standard error",
        *(metric.name for metric, _ in others),
        "noise / oracle's",
        "signal / best",
        "largest epsilon",
        "disclosed to the server",
    )


@dataclass(frozen=True)
class MethodRow:
    """The results of a method over all its seeds.

    Attributes:
        method: label of the method.
        seeds: number of runs.
        score: mean over seeds of the main metric on held-out records.
        spread: standard deviation over seeds; NaN for one seed.
        noise_ratio: noise in the combined update divided by the oracle's; NaN if undefined.
        largest_epsilon: largest epsilon that any client spent; infinite without privacy.
        needs: what clients disclose to the server.
        diverged: number of runs that diverged.
        no_updates: number of runs in which no round changed the model.
        unfinished: number of runs that have not ended; they count with the rounds that they have.
        seed_numbers: the seeds.
        scores: main metric for each seed.
        signal_share: signal-to-noise ratio divided by the best possible one; NaN if undefined.
        metric: the main metric: name, unit and direction.
        others: the task's other metrics, each with its mean over seeds.
    """

    method: str
    seeds: int
    score: float
    spread: float
    noise_ratio: float
    largest_epsilon: float
    needs: tuple[str, ...]
    diverged: int
    unfinished: int = 0
    seed_numbers: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    signal_share: float = math.nan
    no_updates: int = 0
    metric: MetricInfo = ACCURACY
    others: tuple[tuple[MetricInfo, float], ...] = ()

    @property
    def accuracy(self) -> float:
        """The score if the main metric is the accuracy, else NaN."""
        return self.score if self.metric.is_accuracy else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over seeds; NaN for one seed."""
        return self.spread / math.sqrt(self.seeds)

    def score_text(self) -> str:
        """Return mean and standard error with the metric's unit, and remarks about the runs."""
        text, metric = "not measured", self.metric
        if math.isfinite(self.score):
            text = metric.number(self.score)
            if math.isfinite(self.standard_error):
                text += f" ± {metric.number(self.standard_error)}"
            text = f"{text} {metric.unit}".rstrip()
        return text + (f" ({self.remarks()})" if self.remarks() else "")

    def remarks(self) -> str:
        """Return how many runs diverged, had no updates or are unfinished; empty if none."""
        counts = {
            "diverged": self.diverged,
            "without any update": self.no_updates,
            "unfinished": self.unfinished,
        }
        return ", ".join(f"{n} of {self.seeds} {remark}" for remark, n in counts.items() if n)

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, for the columns of `headings`."""
        noise = "no noise" if self.noise_ratio == 0 else f"{self.noise_ratio:.4g}"
        epsilon = "no limit" if math.isinf(self.largest_epsilon) else f"{self.largest_epsilon:.3g}"
        if math.isnan(self.largest_epsilon):
            epsilon = NOT_KNOWN
        disclosed = ", ".join(self.needs) or "nothing"
        return (
            self.method,
            self.score_text(),
            *(m.text(v) if math.isfinite(v) else "not measured" for m, v in self.others),
            noise if math.isfinite(self.noise_ratio) else "not defined",
            f"{self.signal_share:.2f}" if math.isfinite(self.signal_share) else "",
            epsilon,
            disclosed,
        )


def by_method(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return the runs of each method, in the order of first appearance."""
    grouped: dict[str, list[RunResult]] = {}
    for result in results:
        grouped.setdefault(result.method, []).append(result)
    return grouped


def mean_weights(run: RunResult) -> dict[str, float]:
    """Return each client's weight in percent, mean over rounds (0 if it did not take part)."""
    return {
        client: 100 * float(np.mean([r.weights.get(client, 0.0) for r in run.rounds]))
        for client in run.clients
    }


def method_rows(results: Sequence[RunResult]) -> tuple[MethodRow, ...]:
    """Return one row for each method, in the order of first appearance.

    Args:
        results: runs of one or more methods and seeds.
    """
    rows = []
    for method, runs in by_method([printable_run(result) for result in results]).items():
        scores, task = np.array([run.score for run in runs]), runs[0].task
        ratios = [run.noise_ratio for run in runs if math.isfinite(run.noise_ratio)]
        shares = [run.signal_share for run in runs if math.isfinite(run.signal_share)]
        rows.append(
            MethodRow(
                method=method,
                seeds=len(runs),
                score=float(np.mean(scores)),
                spread=float(np.std(scores, ddof=1)) if len(runs) > 1 else math.nan,
                noise_ratio=float(np.mean(ratios)) if ratios else math.nan,
                largest_epsilon=max(run.largest_epsilon for run in runs),
                needs=runs[0].needs,
                diverged=sum(run.status == "diverged" for run in runs),
                unfinished=sum(run.status == "unfinished" for run in runs),
                no_updates=sum(run.status == "no_updates" for run in runs),
                seed_numbers=tuple(run.seed for run in runs),
                scores=tuple(float(score) for score in scores),
                signal_share=float(np.mean(shares)) if shares else math.nan,
                metric=task.main,
                others=tuple(
                    (metric, float(np.mean([run.figure(metric.name) for run in runs])))
                    for metric in task.metrics[1:]
                ),
            )
        )
    return tuple(rows)


def as_text(rows: Sequence[MethodRow]) -> str:
    """Return the rows as aligned columns, for a terminal or a log."""
    return aligned(headings(rows), [row.cells() for row in rows])


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in aligned columns, with a line of dashes below the headings."""
    table = [[printable(cell) for cell in line] for line in (headings, *rows)]
    return "\n".join(align_columns(table, rule=True))


def as_markdown(rows: Sequence[MethodRow]) -> str:
    """Return the rows as a Markdown table."""
    return markdown_table(headings(rows), [row.cells() for row in rows])


def as_csv(rows: Sequence[MethodRow]) -> str:
    """Return the exact numbers as CSV: a row for each method, one value in each cell."""
    kept = (
        "noise_ratio",
        "signal_share",
        "largest_epsilon",
        "diverged",
        "no_updates",
        "unfinished",
    )
    others = rows[0].others if rows else ()
    names = ("method", "seeds", _main_column(rows), "standard_error")
    other_names = (metric.name for metric, _ in others)
    needs = (f"needs_{need}" for need in DISCLOSURES)
    lines: list[list[object]] = [[*names, *other_names, *kept, *needs]]
    for row in rows:
        figures = (row.method, row.seeds, row.score, row.standard_error)
        more = (*(value for _, value in row.others), *(getattr(row, name) for name in kept))
        lines.append([*figures, *more, *(need in row.needs for need in DISCLOSURES)])
    return csv_text(lines)


def as_run_csv(results: Sequence[RunResult]) -> str:
    """Return the exact numbers of each run as CSV: a row for each method and seed."""
    kept = ("noise_ratio", "signal_share", "largest_epsilon", "status")
    rows = method_rows(results)
    others = [metric.name for metric, _ in rows[0].others] if rows else []
    lines: list[list[object]] = [["method", "seed", _main_column(rows), *others, *kept]]
    for run in map(printable_run, results):
        figures = (run.method, run.seed, run.score, *map(run.figure, others))
        lines.append([*figures, *(getattr(run, name) for name in kept)])
    return csv_text(lines)


def _main_column(rows: Sequence[MethodRow]) -> str:
    return headings(rows)[1].removesuffix(" ± standard error")
