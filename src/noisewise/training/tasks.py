"""`Task`: what targets look like, which loss is trained, which metrics are shown.

| task | targets of a record | outputs of a record |
|---|---|---|
| classification | one class, int64 | a logit for each class [classes] |
| binary | 0 or 1, int64 | one logit [] or [1] |
| multilabel | 0 or 1 for each label, float32 [labels] | a logit for each label [labels] |
| regression | numbers of any shape, float32 | as many numbers |
| segmentation | a class for each pixel, int64 [height, width] | logits [classes, height, width] |
| language_model | a token for each position, int64 [length] | logits [length, classes] |
| own | anything | anything that the own loss and metrics take |

In segmentation and language models, the target -100 is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from noisewise.checks import known_name, positive_int
from noisewise.errors import InvalidValueError
from noisewise.plugins import load_object
from noisewise.text import short_repr
from noisewise.training.gradients import Loss
from noisewise.training.metrics import IGNORED, Metric, metrics_of_task, own_metric

__all__ = [
    "CLASSIFICATION",
    "TASKS",
    "Task",
    "check_loss",
    "check_outputs",
    "check_targets",
    "make_task",
    "task_name",
]

OWN = "own"
Targets = Literal["class", "yes_no", "labels", "numbers", "places", "any"]


@dataclass(frozen=True, repr=False)
class Task:
    """What a model is trained for.

    Attributes:
        name: of the task.
        loss: mean over a batch of each record's own loss; training applies it to single records.
        metrics: figures on held-out records; the first is the main one.
        targets: what the target of a record is, see the table of this module.
        classes: number of classes, labels or tokens; None if the task has none.
        class_axis: axis of a model's outputs that has the classes: 1, or -1 for the last one.

    Example:
        >>> make_task("regression", metrics=["mae", "r2"]).main.name
        'mae'
    """

    name: str
    loss: Loss
    metrics: tuple[Metric, ...]
    targets: Targets = "any"
    classes: int | None = None
    class_axis: int = 1

    def __repr__(self) -> str:
        """Its name, metrics and number of classes."""
        metrics = [metric.name for metric in self.metrics]
        return short_repr(self, name=self.name, metrics=metrics, classes=self.classes)

    def __post_init__(self) -> None:
        names = [metric.name for metric in self.metrics]
        if not names or len(set(names)) != len(names):
            raise InvalidValueError("task.metrics", names, "must be one or more different metrics")

    @property
    def main(self) -> Metric:
        """The metric that tables, sweeps and displays use."""
        return self.metrics[0]

    @property
    def one_class(self) -> bool:
        """Whether each record has one class, so that records can be split by it."""
        return self.targets in ("class", "yes_no")

    def outputs(self, target_shape: Sequence[int]) -> int:
        """The number of outputs that a model needs for targets of this shape.

        Raises:
            InvalidValueError: the number of classes is needed and not declared.
        """
        if self.targets == "yes_no":
            return 1
        if self.targets in ("numbers", "labels"):
            return math.prod(target_shape)
        if self.classes is None:
            raise InvalidValueError(
                "task.classes", None, f"must be given for {self.name}: it is not inferred"
            )
        return self.classes


def _binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    logits = outputs.reshape(targets.shape)
    return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.reshape(targets.shape), targets.to(outputs.dtype))


def _places_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over records of the mean cross-entropy of counted positions; 0 without any."""
    losses = functional.cross_entropy(outputs, targets, reduction="none", ignore_index=IGNORED)
    counted = (targets != IGNORED).flatten(1).sum(1)
    return (losses.flatten(1).sum(1) / counted.clamp(min=1)).mean()


def _token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return _places_loss(outputs.transpose(1, -1), targets)


def _built_in(name: str, loss: Loss, targets: Targets, defaults: int = 1, axis: int = 1) -> Task:
    metrics = tuple(metrics_of_task(name).values())[:defaults]
    return Task(name, loss, metrics, targets, 2 if targets == "yes_no" else None, axis)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            _built_in("classification", functional.cross_entropy, "class"),
            _built_in("binary", _binary_loss, "yes_no"),
            _built_in("multilabel", functional.binary_cross_entropy_with_logits, "labels", 2),
            _built_in("regression", _squared_error, "numbers", 2),
            _built_in("segmentation", _places_loss, "places", 2),
            _built_in("language_model", _token_loss, "places", 2, axis=-1),
        )
    }
)
"""The built-in tasks by name, each with its default metrics."""

CLASSIFICATION = TASKS["classification"]


def task_name(name: str) -> str:
    """The name of a built-in task, also if it is written with a hyphen.

    Example:
        >>> task_name("language-model")
        'language_model'
    """
    normalised = name.replace("-", "_")
    return normalised if normalised in TASKS else name


def make_task(
    name: str = "classification",
    *,
    metrics: Sequence[str | Metric] | None = None,
    classes: int | None = None,
    loss: Loss | None = None,
    unit: str = "",
) -> Task:
    """A task by name.

    Args:
        name: one of `TASKS`; ``"own"`` with ``loss`` and ``metrics``; or a `Task` of your own as
            ``"package.module:name"``.
        metrics: names of the task's metrics, `Metric`s, or own ones as ``"package.module:name"``;
            the first is the main one. None takes the task's default.
        classes: number of classes, labels or tokens.
        loss: replaces the task's loss.
        unit: of the numbers that a regression predicts, for tables and figures.

    Raises:
        InvalidValueError: names the unknown task or metric, or the loss that cannot be used.

    Example:
        >>> [metric.label for metric in make_task("regression", unit="km").metrics]
        ['mae [km]', 'rmse [km]']
    """
    if isinstance(metrics, str):
        raise InvalidValueError("task.metrics", metrics, f'must be a list: ["{metrics}"]')
    task = _find_task(task_name(name), loss, metrics)
    if loss is not None:
        task = replace(task, loss=check_loss(loss))
    if metrics is not None:
        task = replace(task, metrics=tuple(_find_metric(task, each) for each in metrics))
    if unit:
        task = replace(task, metrics=tuple(_with_unit(task, each, unit) for each in task.metrics))
    if classes is not None:
        positive_int("task.classes", classes)
        if task.targets == "numbers" or (task.targets == "yes_no" and classes != 2):
            allowed = f"must be left out: {task.name} has a fixed number of outputs"
            raise InvalidValueError("task.classes", classes, allowed)
        task = replace(task, classes=classes)
    return task


def _find_task(name: str, loss: Loss | None, metrics: Sequence[str | Metric] | None) -> Task:
    if name in TASKS:
        return TASKS[name]
    if name == OWN:
        if loss is None or not metrics:
            allowed = "needs training.loss and task.metrics of your own"
            raise InvalidValueError("task.name", name, allowed)
        return Task(OWN, loss, tuple(_find_metric(None, each) for each in metrics))
    if ":" not in name:
        known = known_name("task.name", name, [*TASKS, OWN], ', or "module:task"')
        return _find_task(known, loss, metrics)
    task = load_object(name, "task.name")
    if not isinstance(task, Task):
        kind = type(task).__name__
        raise InvalidValueError("task.name", name, f"must name a noisewise Task, not {kind}")
    return task


def _find_metric(task: Task | None, metric: str | Metric) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if ":" in metric:
        return own_metric(load_object(metric, "task.metrics"), metric, "task.metrics")
    metrics = metrics_of_task(task.name) if task is not None and task.name in TASKS else {}
    if metric not in metrics:
        names = ", ".join(metrics) or "none by name"
        allowed = f'must be among {names}, or "package.module:name"'
        raise InvalidValueError("task.metrics", metric, allowed)
    return metrics[metric]


def _with_unit(task: Task, metric: Metric, unit: str) -> Metric:
    if task.targets != "numbers":
        allowed = "is only for regression, whose mae and rmse have the unit of the targets"
        raise InvalidValueError("task.unit", unit, allowed)
    return replace(metric, unit=unit) if metric.name in ("mae", "rmse") else metric


def check_loss(loss: Loss, field: str = "training.loss") -> Loss:
    """Refuse a loss whose class weights would have no effect.

    Torch divides a weighted mean by the weights of the batch. Per-record gradients come from
    batches of one record, in which the weight cancels.

    Raises:
        InvalidValueError: the loss is a weighted mean.
    """
    part: object = loss
    weighted = isinstance(part, (nn.CrossEntropyLoss, nn.NLLLoss)) and part.weight is not None
    if weighted and getattr(part, "reduction", "") == "mean":
        allowed = (
            "weights cancel in the mean over one record, so they would be ignored; use a function "
            'such as (weight[targets] * cross_entropy(outputs, targets, reduction="none")).mean()'
        )
        raise InvalidValueError(field, f"{type(loss).__name__}(weight=...)", allowed)
    return loss


def check_targets(task: Task, targets: NDArray[Any], field: str = "targets") -> NDArray[Any]:
    """The targets in the type of the task.

    Args:
        task: with its number of classes, if that is known.
        targets: [N, ...].
        field: where they come from, for the error.

    Returns:
        int64 for classes, float32 for numbers and labels.

    Raises:
        InvalidValueError: the type, the number of axes or a value does not fit the task.
    """
    kind, dims = targets.dtype.kind, targets.ndim - 1
    form = f"{targets.dtype}{list(targets.shape)}"
    if kind not in "biuf":
        raise InvalidValueError(field, form, "must be numbers")
    if task.targets == "any":
        return targets.astype(np.float32 if kind == "f" else np.int64, copy=False)
    if task.one_class and (dims != 0 or kind == "f"):
        allowed = (
            f"must be one whole number for each record for {task.name}; for numbers to predict "
            'use task.name = "regression"'
        )
        raise InvalidValueError(field, form, allowed)
    if task.targets == "labels" and dims != 1:
        allowed = "must have the shape [records, labels] with 0 or 1 for each label"
        raise InvalidValueError(field, form, allowed)
    if task.targets == "places" and (dims < 1 or kind == "f"):
        allowed = f"must be whole numbers, one for each position in a record, for {task.name}"
        raise InvalidValueError(field, form, allowed)
    if targets.size:
        _check_values(task, targets, field)
    dtype = np.float32 if task.targets in ("labels", "numbers") else np.int64
    return targets.astype(dtype, copy=False)


def _check_values(task: Task, targets: NDArray[Any], field: str) -> None:
    if targets.dtype.kind == "f":
        _refuse(~np.isfinite(targets), targets, field, "must be a finite number")
    if task.targets == "labels":
        bad = (targets != 0) & (targets != 1)
        _refuse(bad, targets, field, "must be 0 or 1 for each label")
    elif task.targets != "numbers":
        classes = np.inf if task.classes is None else task.classes
        bad = (targets < 0) | (targets >= classes)
        allowed = f"must be in 0..{task.classes - 1}" if task.classes else "must be at least 0"
        if task.targets == "places":
            bad &= targets != IGNORED
            allowed += f", or {IGNORED} for a position that is ignored"
            empty = (targets == IGNORED).reshape(len(targets), -1).all(axis=1)
            if empty.any():
                where = f"{field}, record {int(np.argmax(empty))}"
                allowed = "must have at least one position that counts; remove the record"
                raise InvalidValueError(where, f"all {IGNORED}", allowed)
        else:
            allowed += "; declare task.classes, or correct the targets"
        _refuse(bad, targets, field, allowed)


def _refuse(bad: NDArray[np.bool_], targets: NDArray[Any], field: str, allowed: str) -> None:
    if bad.any():
        index = np.unravel_index(int(np.argmax(bad)), bad.shape)
        raise InvalidValueError(f"{field}, record {int(index[0])}", targets[index].item(), allowed)


def check_outputs(task: Task, outputs: object, targets: Tensor, field: str = "model") -> Tensor:
    """The outputs of a model for a batch, if their shape is that of the task.

    Raises:
        InvalidValueError: they are no tensor, or have another shape than the task needs.
    """
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise InvalidValueError(field, f"returns {kind}", "must return one tensor of outputs")
    shape, n = tuple(outputs.shape), len(targets)
    if task.targets == "any":
        return outputs
    advice = ""
    if task.targets == "class":
        fits = outputs.dim() == 2 and shape[0] == n and shape[1] > 1
        fits = fits and task.classes in (None, shape[1])
        expected = f"({n}, {task.classes or 'classes'})"
        if outputs.numel() == n:
            advice = '; a model with one logit needs task.name = "binary"'
    elif task.targets == "yes_no":
        fits, expected = shape in ((n,), (n, 1)), f"({n}, 1)"
        if shape == (n, 2):
            advice = '; a model with two logits needs task.name = "classification"'
    elif task.targets in ("labels", "numbers"):
        wide = [size for size in shape[1:] if size > 1]
        fits = shape[:1] == (n,) and wide == [size for size in targets.shape[1:] if size > 1]
        fits = fits and (task.targets == "numbers" or shape == tuple(targets.shape))
        expected = str(tuple(targets.shape))
    else:
        positions = tuple(targets.shape[1:])
        last = task.class_axis == -1
        classes: Any = task.classes or "classes"
        wanted_shape = (n, *positions, classes) if last else (n, classes, *positions)
        got = (*shape[:-1], classes) if last else (*shape[:1], classes, *shape[2:])
        fits = len(shape) == len(wanted_shape) and got == wanted_shape
        fits = fits and task.classes in (None, shape[task.class_axis])
        expected = str(wanted_shape)
    if not fits:
        raise InvalidValueError(
            field, f"outputs of shape {shape}", f"must be {expected} for {task.name}{advice}"
        )
    return outputs
