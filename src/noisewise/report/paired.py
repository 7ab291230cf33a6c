"""Groups of methods, and differences of two methods over the seeds that both were run with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noisewise.federation.results import RunResult
from noisewise.federation.task_info import MetricInfo
from noisewise.report.tables import by_method

__all__ = [
    "GROUPS",
    "Difference",
    "best_method",
    "best_methods",
    "method_groups",
    "paired_difference",
]

NOTHING, DISCLOSED, REFERENCE = "nothing", "disclosed", "reference"
GROUPS = {
    NOTHING: "Methods that need no disclosures",
    DISCLOSED: "Methods that need disclosures",
    REFERENCE: "References, not for real use",
}
"""Headings of the groups of methods, in their order."""
_EQUAL = 1e-12
"""Relative difference of two means that is only rounding."""
CLEAR = 2.0
"""A difference of more than this number of standard errors is conclusive."""


@dataclass(frozen=True)
class Difference:
    """One method's main metric minus another's, seed by seed.

    Attributes:
        seeds: the seeds that both were run with.
        values: the differences in the metric's unit, in the order of ``seeds``.
        metric: that is compared.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    metric: MetricInfo

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN without a common seed."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def error(self) -> float:
        """Paired standard error of the mean; NaN for fewer than two seeds."""
        n = len(self.values)
        return float(np.std(self.values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan

    @property
    def conclusive(self) -> bool:
        """Whether the mean is more than two paired standard errors away from 0."""
        return math.isfinite(self.error) and abs(self.mean) > CLEAR * self.error

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "points" if self.metric.unit == "%" else self.metric.unit

    def number(self, value: float, sign: str = "+") -> str:
        """A difference as text, without the unit; never a negative zero."""
        text = f"{value:{sign}.1f}" if self.metric.unit == "%" else f"{value:{sign}.3g}"
        return text.replace("-", "+" if sign else "") if float(text) == 0 else text

    def text(self) -> str:
        """Mean and standard error with the unit."""
        error = f" ± {self.number(self.error, '')}" if math.isfinite(self.error) else ""
        return f"{self.number(self.mean)}{error} {self.unit}".rstrip()


def method_groups(results: Sequence[RunResult]) -> dict[str, list[str]]:
    """Return the methods of each group of `GROUPS`, without empty groups."""
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for method, runs in by_method(results).items():
        group = REFERENCE if runs[0].is_reference else DISCLOSED if runs[0].needs else NOTHING
        groups[group].append(method)
    return {name: methods for name, methods in groups.items() if methods}


def mean_score(runs: Sequence[RunResult]) -> float:
    """Mean over seeds of the main metric; NaN if a run has none."""
    return float(np.mean([run.score for run in runs]))


def best_methods(results: Sequence[RunResult], group: str | None = None) -> tuple[str, ...]:
    """Return the methods with the best mean score: several if their means are equal.

    Args:
        results: runs of one or more methods.
        group: name of a group; by default the first group of `GROUPS` that has a measured method.

    Returns:
        The methods in the order of their first run; empty if no method of the group was measured.
    """
    grouped = by_method(results)
    for name, methods in method_groups(results).items():
        scores = {m: mean_score(grouped[m]) for m in methods}
        scores = {m: score for m, score in scores.items() if math.isfinite(score)}
        if scores and group in (None, name):
            best = min(scores, key=lambda m: grouped[m][0].metric.rank(scores[m]))
            top = scores[best]
            return tuple(m for m, s in scores.items() if math.isclose(s, top, rel_tol=_EQUAL))
    return ()


def best_method(results: Sequence[RunResult], group: str | None = None) -> str | None:
    """Return the first of `best_methods`; None if no method was measured."""
    return next(iter(best_methods(results, group)), None)


def paired_difference(results: Sequence[RunResult], method: str, other: str) -> Difference:
    """Return the score of ``method`` minus that of ``other``, for each seed that both have.

    Args:
        results: runs of one or more methods and seeds.
        method: label of the first method.
        other: label of the second method.
    """
    grouped = by_method(results)
    ours, theirs = ({run.seed: run for run in grouped[name]} for name in (method, other))
    metric = grouped[method][0].metric
    pairs = {
        seed: metric.scale * (run.score - theirs[seed].score)
        for seed, run in ours.items()
        if seed in theirs and math.isfinite(run.score) and math.isfinite(theirs[seed].score)
    }
    seeds = tuple(sorted(pairs))
    return Difference(seeds, tuple(pairs[seed] for seed in seeds), metric)
