"""Read studies/results/utility.jsonl: accuracies by seed, means, and rows of Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from utility import RATES, RESULTS, rates_of, result_file

Seeds = Mapping[int, dict[str, Any]]


@lru_cache(maxsize=1)
def all_cells() -> Mapping[tuple[str, str, str, str], Seeds]:
    """Results by (part, population, method, rate), then by seed."""
    cells: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = {}
    for result in result_file(RESULTS).read():
        key = result["part"], result["population"], result["method"], result["rate"]
        cells.setdefault(key, {})[result["seed"]] = result
    return cells


def accuracies(part: str, population: str, method: str, rate: str = "auto") -> dict[int, float]:
    """The accuracy in percent by seed."""
    cell = all_cells().get((part, population, method, rate), {})
    return {seed: 100 * result["accuracy"] for seed, result in sorted(cell.items())}


def text(values: Sequence[float]) -> str:
    """Mean and standard error over seeds; empty without values."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{np.mean(values):.1f} ± {standard_error(values):.1f}"


def cell(part: str, population: str, method: str, rate: str = "auto") -> str:
    """One cell of a table."""
    return text(list(accuracies(part, population, method, rate).values()))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def best_of_grid(part: str, dist: str, method: str = "NoiseWise") -> tuple[str, dict[int, float]]:
    """The rate of the grid with the highest mean accuracy, and its accuracies by seed.

    The seeds are those with all `RATES`; smaller rates are compared where they have these seeds.
    """
    tried = {f"{rate:g}": accuracies(part, dist, method, f"{rate:g}") for rate in rates_of(part)}
    seeds = sorted(set.intersection(*(set(tried[f"{rate:g}"]) for rate in RATES)))
    tried = {rate: values for rate, values in tried.items() if set(seeds) <= set(values)}
    if not seeds:
        return "", {}
    known = {rate: {seed: values[seed] for seed in seeds} for rate, values in tried.items()}
    best = max(known, key=lambda rate: float(np.mean(list(known[rate].values()))))
    return best, known[best]


def at_the_edge(part: str, dist: str, method: str = "NoiseWise") -> str:
    """The best rate if it is the smallest or the largest that was tried; otherwise empty."""
    best, values = best_of_grid(part, dist, method)
    tried = [
        rate for rate in rates_of(part)
        if set(values) <= set(accuracies(part, dist, method, f"{rate:g}"))
    ]  # fmt: skip
    return best if best and float(best) in (tried[0], tried[-1]) else ""


def default_differences(part: str, population: str) -> list[float]:
    """Accuracy of the automatic rate minus that of the best rate of the grid, in points by seed."""
    _, best = best_of_grid(part, population)
    auto = accuracies(part, population, "NoiseWise")
    return [auto[seed] - best[seed] for seed in sorted(set(best) & set(auto))]


def difference(values: Sequence[float]) -> str:
    """Mean of paired differences, with its standard error if there are several seeds."""
    if not values:
        return ""
    shown = f"{np.mean(values):+.2f}"
    if len(values) == 1:
        return shown
    return f"{shown} ± {standard_error(values):.2f}"


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def leads(part: str, population: str, method: str) -> list[float]:
    """Accuracy of a method minus that of NoiseWise, in points by seed."""
    ours, theirs = accuracies(part, population, "NoiseWise"), accuracies(part, population, method)
    return [theirs[seed] - ours[seed] for seed in sorted(set(ours) & set(theirs))]
