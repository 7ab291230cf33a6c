"""Scores of single records between 0 and 1, as whole numbers, for the noised score of a site.

One record changes the sum of scores by at most 1. Scores are counted in units of 2^-20, so that a
sum is exact and does not depend on the order of the records.

| task | score of a record |
|---|---|
| classification, binary | 1 if the answer is right, else 0 |
| multilabel | share of labels that are right |
| segmentation, language_model | share of the scored positions that are right |
| regression | 1 - min(absolute error, bound) / bound, the mean over outputs |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from noisewise.errors import InvalidValueError
from noisewise.training.metrics import IGNORED
from noisewise.training.tasks import TASKS, Task

__all__ = ["SCORE_UNITS", "RecordScore", "bounded_score"]

SCORE_UNITS = 2**20
"""The score 1 in the units of a `RecordScore`."""

RecordScore = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> int64 [b] from 0 to `SCORE_UNITS`."""


def bounded_score(task: Task, bound: float | None = None, field: str = "metrics") -> RecordScore:
    """The score of a record for a task.

    Args:
        task: a built-in one, also with an own loss.
        bound: of a regression, the absolute error that scores 0; larger errors score 0 as well.
        field: where the bound comes from, for the error.

    Raises:
        InvalidValueError: the task has no bounded score, or the bound is missing or not used.

    Example:
        >>> score = bounded_score(TASKS["regression"], bound=2.0)
        >>> (score(torch.tensor([1.0, 9.0]), torch.tensor([0.5, 0.5])) / SCORE_UNITS).tolist()
        [0.75, 0.0]
    """
    if task.name not in TASKS:
        allowed = f"must be left out: only {', '.join(TASKS)} have a score with a bound"
        raise InvalidValueError(field, f"task {task.name}", allowed)
    name = f"{field}.score_bound"
    if task.targets != "numbers":
        if bound is not None:
            allowed = f"must be left out: a score of {task.name} is between 0 and 1"
            raise InvalidValueError(name, bound, allowed)
        if task.targets in ("yes_no", "labels"):
            return _right_labels
        return partial(_right_classes, axis=task.class_axis)
    if bound is None:
        allowed = (
            "must be given for regression: the absolute error at which a record's score reaches 0, "
            "chosen without looking at the records"
        )
        raise InvalidValueError(name, bound, allowed)
    return partial(_small_error, bound=bound)


def _right_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of logits whose sign is that of the target, of each record."""
    right = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
    return _share(right, torch.ones_like(right))


def _right_classes(outputs: Tensor, targets: Tensor, axis: int) -> Tensor:
    """The share of targets that are the largest output along an axis, of each record."""
    used = targets != IGNORED
    return _share((outputs.argmax(dim=axis) == targets) & used, used)


def _share(right: Tensor, used: Tensor) -> Tensor:
    rows, counted = right.reshape(len(right), -1), used.reshape(len(used), -1)
    return rows.sum(1) * SCORE_UNITS // counted.sum(1).clamp(min=1)


def _small_error(outputs: Tensor, targets: Tensor, bound: float) -> Tensor:
    """1 - min(absolute error, bound) / bound, the mean over outputs; an error of NaN scores 0."""
    errors = (outputs.double().reshape(targets.shape) - targets.double()).abs()
    shares = 1 - errors.nan_to_num(nan=bound, posinf=bound).clamp(max=bound) / bound
    units = (shares * SCORE_UNITS).long().reshape(len(targets), -1)
    return units.sum(1) // max(units.shape[1], 1)
