"""Tables of a comparison: one row for each method, as text, Markdown and CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noisewise.federation.results import RunResult
from noisewise.report.cell_text import csv_text, markdown_table, printable_run
from noisewise.text import align_columns, printable

__all__ = [
    "NOT_KNOWN",
    "MethodRow",
    "aligned",
    "as_csv",
    "as_markdown",
    "as_text",
    "by_method",
    "method_rows",
]

NOT_KNOWN = "not known to the server"
"""Epsilon in the report of a real federation: the server cannot see how an update was made."""

HEADINGS = (
    "method",
    "accuracy ± standard error",
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
        accuracy: mean over seeds of the mean held-out accuracy, in [0, 1].
        spread: standard deviation over seeds; NaN for one seed.
        noise_ratio: noise in the combined update divided by the oracle's; NaN if undefined.
        largest_epsilon: largest epsilon that any client spent; infinite without privacy.
        needs: what clients disclose to the server.
        diverged: number of runs that diverged.
        no_updates: number of runs in which no round changed the model.
        unfinished: number of runs that have not ended; they count with the rounds that they have.
        seed_numbers: the seeds.
        scores: accuracy for each seed.
        signal_share: signal-to-noise ratio divided by the best possible one; NaN if undefined.
    """

    method: str
    seeds: int
    accuracy: float
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

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over seeds; NaN for one seed."""
        return self.spread / math.sqrt(self.seeds)

    def accuracy_text(self) -> str:
        """Return mean and standard error in percent, with remarks about the runs."""
        text = "not measured"
        if math.isfinite(self.accuracy):
            text = f"{100 * self.accuracy:.1f}"
            if math.isfinite(self.standard_error):
                text += f" ± {100 * self.standard_error:.1f}"
            text += " %"
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
        """Return the row as text, for the columns `HEADINGS`."""
        noise = "no noise" if self.noise_ratio == 0 else f"{self.noise_ratio:.4g}"
        epsilon = "no limit" if math.isinf(self.largest_epsilon) else f"{self.largest_epsilon:.3g}"
        if math.isnan(self.largest_epsilon):
            epsilon = NOT_KNOWN
        disclosed = ", ".join(self.needs) or "nothing"
        return (
            self.method,
            self.accuracy_text(),
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


def method_rows(results: Sequence[RunResult]) -> tuple[MethodRow, ...]:
    """Return one row for each method, in the order of first appearance.

    Args:
        results: runs of one or more methods and seeds.
    """
    rows = []
    for method, runs in by_method([printable_run(result) for result in results]).items():
        scores = np.array([run.accuracy for run in runs])
        ratios = [run.noise_ratio for run in runs if math.isfinite(run.noise_ratio)]
        shares = [run.signal_share for run in runs if math.isfinite(run.signal_share)]
        rows.append(
            MethodRow(
                method=method,
                seeds=len(runs),
                accuracy=float(np.mean(scores)),
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
            )
        )
    return tuple(rows)


def as_text(rows: Sequence[MethodRow]) -> str:
    """Return the rows as aligned columns, for a terminal or a log."""
    return aligned(HEADINGS, [row.cells() for row in rows])


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in aligned columns, with a line of dashes below the headings."""
    table = [[printable(cell) for cell in line] for line in (headings, *rows)]
    return "\n".join(align_columns(table, rule=True))


def as_markdown(rows: Sequence[MethodRow]) -> str:
    """Return the rows as a Markdown table."""
    return markdown_table(HEADINGS, [row.cells() for row in rows])


def as_csv(rows: Sequence[MethodRow]) -> str:
    """Return the exact numbers as CSV."""
    fields = tuple(MethodRow.__dataclass_fields__)
    values = [[getattr(row, name) for name in fields] for row in rows]
    cells = [[" ".join(map(str, v)) if isinstance(v, tuple) else v for v in row] for row in values]
    return csv_text([fields, *cells])
