"""`TaskInfo`: what a result says about its task: name, metrics, their units and directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisewise.training.metrics import MetricInfo
from noisewise.training.tasks import CLASSIFICATION, Task

__all__ = ["MetricInfo", "TaskInfo", "read_task", "spread", "worst_tenth"]


@dataclass(frozen=True)
class TaskInfo:
    """The task of a run, as ``result.json`` has it.

    Attributes:
        name: of the task.
        metrics: the first is the main one.
    """

    name: str = CLASSIFICATION.name
    metrics: tuple[MetricInfo, ...] = tuple(metric.info for metric in CLASSIFICATION.metrics)

    @classmethod
    def of(cls, task: Task) -> TaskInfo:
        """What results store of a task."""
        return cls(task.name, tuple(metric.info for metric in task.metrics))

    @property
    def main(self) -> MetricInfo:
        """The metric that tables, sweeps and displays use."""
        return self.metrics[0]


def read_task(stored: Mapping[str, Any] | None) -> TaskInfo:
    """A stored task; older results have none and are classifications.

    Raises:
        TypeError, KeyError: it is not a stored task.
    """
    if stored is None:
        return TaskInfo()
    metrics = tuple(MetricInfo(**metric) for metric in stored["metrics"])
    if not metrics:
        raise KeyError("metrics")
    return TaskInfo(stored["name"], metrics)


def spread(scores: Mapping[str, float]) -> float:
    """Standard deviation of the clients' figures; NaN without any."""
    return float(np.std(list(scores.values()))) if scores else math.nan


def worst_tenth(metric: MetricInfo, scores: Mapping[str, float]) -> float:
    """Mean figure of the worst tenth of the clients (at least one); NaN without any."""
    worst = sorted(scores.values(), reverse=not metric.larger_is_better)
    return float(np.mean(worst[: math.ceil(len(worst) / 10)])) if worst else math.nan
