"""Rounds as flat rows and as pandas frames."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from noisewise.errors import MissingExtraError

if TYPE_CHECKING:
    from noisewise.federation.results import RunResult
    from noisewise.federation.round_record import RoundRecord

__all__ = ["ROUND_METRICS", "data_frame", "round_metrics", "round_rows"]

ROUND_METRICS = (
    "accuracy", "accuracy_spread", "accuracy_worst_client", "train_loss", "noise_ratio",
    "aggregate_noise", "largest_epsilon", "largest_weight",
)  # fmt: skip
"""The names of the metrics of a round."""


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """The metrics of a round (`ROUND_METRICS` and the task's) that are finite numbers, by name."""
    spent = [value for value in record.epsilon_spent.values() if value is not None]
    accuracy = [] if record.accuracy is None else list(record.accuracy.values())
    values = (
        record.mean_accuracy,
        float(np.std(accuracy)) if accuracy else math.nan,
        min(accuracy, default=math.nan),
        record.mean_train_loss,
        record.noise_ratio,
        math.nan if record.aggregate_noise is None else record.aggregate_noise,
        max(spent, default=math.nan),
        max(record.weights.values(), default=math.nan),
    )
    named = dict(zip(ROUND_METRICS, values, strict=True))
    named |= {name: record.figure(name) for name in record.metrics or {}}
    return {name: float(value) for name, value in named.items() if math.isfinite(value)}


def round_rows(run: RunResult) -> list[dict[str, Any]]:
    """One flat row for each round: method, seed, round and metrics; NaN for a missing metric.

    Figures of the accuracy are left out for tasks without it.
    """
    rows = []
    others = [metric.name for metric in run.task.metrics if not metric.is_accuracy]
    has_accuracy = len(others) < len(run.task.metrics)
    general = [name for name in ROUND_METRICS if has_accuracy or not name.startswith("accuracy")]
    for record in run.rounds:
        metrics = round_metrics(record)
        rows.append(
            {
                "method": run.method,
                "seed": run.seed,
                "round": record.round,
                "updates_used": len(record.used),
                "updates_dropped": len(record.dropped),
                **{name: metrics.get(name, math.nan) for name in (*general, *others)},
            }
        )
    return rows


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Flat rows as a pandas DataFrame; needs the extra ``frame``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        message = "to_frame needs pandas: pip install 'noisewise[frame]'"
        raise MissingExtraError(message) from None
    return pandas.DataFrame(list(rows))
