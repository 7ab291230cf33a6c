"""Tables of a comparison: one row for each method, as text, Markdown, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noisewise.federation.results import RunResult
from noisewise.report.cells import csv_text, markdown_table, printable_run
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
"""Of a real federation's epsilons: a server sees updates, not how they were made."""

HEADINGS = (
    "method",
    "accuracy ± standard error",
    "noise / oracle's",
    "signal / best",
    "largest epsilon",
    "told to the server",
)


@dataclass(frozen=True)
class MethodRow:
    """What a method reached over all its seeds.

    Attributes:
        method: label.
        seeds: number of runs.
        accuracy: mean over seeds of the mean held-out accuracy, in [0, 1].
        spread: standard deviation over seeds; NaN for one seed.
        noise_ratio: aggregated noise over the oracle's; NaN where undefined.
        largest_epsilon: spent by any client; inf without privacy.
        needs: what the server had to be told.
        diverged: how many runs diverged.
        no_updates: in how many runs no round changed the model.
        unfinished: how many runs have not ended; they count with the rounds that they have.
        seed_numbers: which seeds.
        scores: accuracy under each of them.
        signal_share: signal-to-noise ratio over the best attainable one; NaN where undefined.
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
        """Of the mean over seeds; NaN for one seed."""
        return self.spread / math.sqrt(self.seeds)

    def accuracy_words(self) -> str:
        """Mean and standard error in percent, and what there is to remark."""
        words = "none"
        if math.isfinite(self.accuracy):
            words = f"{100 * self.accuracy:.1f}"
            if math.isfinite(self.standard_error):
                words += f" ± {100 * self.standard_error:.1f}"
            words += " %"
        return words + (f" ({self.remarks()})" if self.remarks() else "")

    def remarks(self) -> str:
        """What a reader must know about the runs before believing the mean."""
        counts = {
            "diverged": self.diverged,
            "without any update": self.no_updates,
            "unfinished": self.unfinished,
        }
        return ", ".join(f"{n} of {self.seeds} {word}" for word, n in counts.items() if n)

    def cells(self) -> tuple[str, ...]:
        """The row as words, under `HEADINGS`."""
        noise = "no noise" if self.noise_ratio == 0 else f"{self.noise_ratio:.4g}"
        epsilon = "no limit" if math.isinf(self.largest_epsilon) else f"{self.largest_epsilon:.3g}"
        if math.isnan(self.largest_epsilon):
            epsilon = NOT_KNOWN
        told = ", ".join(self.needs) or "nothing"
        return (
            self.method,
            self.accuracy_words(),
            noise if math.isfinite(self.noise_ratio) else "not defined",
            f"{self.signal_share:.2f}" if math.isfinite(self.signal_share) else "",
            epsilon,
            told,
        )


def by_method(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The runs of each method, in the order of first appearance."""
    grouped: dict[str, list[RunResult]] = {}
    for result in results:
        grouped.setdefault(result.method, []).append(result)
    return grouped


def method_rows(results: Sequence[RunResult]) -> tuple[MethodRow, ...]:
    """One row for each method, in the order of first appearance."""
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
    """Aligned columns for a terminal or a log."""
    return aligned(HEADINGS, [row.cells() for row in rows])


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words in columns, under a rule."""
    table = [[printable(cell) for cell in line] for line in (headings, *rows)]
    return "\n".join(align_columns(table, rule=True))


def as_markdown(rows: Sequence[MethodRow]) -> str:
    """A Markdown table."""
    return markdown_table(HEADINGS, [row.cells() for row in rows])


def as_csv(rows: Sequence[MethodRow]) -> str:
    """The exact numbers, for a spreadsheet."""
    fields = tuple(MethodRow.__dataclass_fields__)
    values = [[getattr(row, name) for name in fields] for row in rows]
    cells = [[" ".join(map(str, v)) if isinstance(v, tuple) else v for v in row] for row in values]
    return csv_text([fields, *cells])
