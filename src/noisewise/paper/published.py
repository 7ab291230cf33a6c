"""The published figures: `tables.json`, transcribed from the source of the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from noisewise.errors import InvalidValueError

__all__ = ["learning_rate_grid", "published_learning_rates", "published_table"]

Figures = Mapping[str, Mapping[str, tuple[float, float]]]


@cache
def _tables() -> dict[str, Any]:
    text = files("noisewise.paper").joinpath("tables.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def published_table(name: str) -> Figures:
    """Return (figure, deviation) by row and column; the deviation is NaN if none is printed.

    Raises:
        InvalidValueError: if there is no such table.

    Example:
        >>> published_table("mnist_accuracy")["RobustHDP"]["Dist6"]
        (84.6, nan)
    """
    tables = _tables()["accuracy_and_noise"]
    if name not in tables:
        raise InvalidValueError("paper", name, f"must be one of {', '.join(tables)}")
    return {
        row: {
            column: (float(value[0]), float(value[1]))
            if isinstance(value, list)
            else (float(value), math.nan)
            for column, value in cells.items()
        }
        for row, cells in tables[name].items()
        if row != "what"
    }


def published_learning_rates(dataset: str) -> Mapping[str, Mapping[str, float]]:
    """Return the paper's learning rates by method and distribution.

    Args:
        dataset: ``mnist``, ``fmnist``, ``cifar10`` or ``cifar100``.
    """
    rates: Mapping[str, Mapping[str, float]] = _tables()["learning_rates"][dataset]
    return rates


def learning_rate_grid(dataset: str) -> tuple[float, ...]:
    """Return the learning rates that the paper says it searched."""
    return tuple(_tables()["learning_rate_grids"][dataset])
