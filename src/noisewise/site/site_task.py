"""The task of a site and the form of its records, as its own file declares them.

Types, shapes, classes and vocabulary come from the file, never from records. A target or an input
that does not fit removes its own record and no other one (docs/privacy.md, guarantee 16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noisewise.errors import InvalidValueError
from noisewise.schema import Count, Strict
from noisewise.training.inputs import Inputs, call_arguments, output_of
from noisewise.training.metrics import IGNORED
from noisewise.training.synthetic_records import RecordForm, TensorForm, synthetic_records
from noisewise.training.tasks import Task, check_outputs, make_task
from noisewise.training.torch_random import torch_seed

__all__ = [
    "InputPart",
    "RecordRules",
    "TaskPart",
    "check_site_outputs",
    "site_task",
    "whole_numbers",
]

_DTYPES = {"float32": torch.float32, "int64": torch.int64}


class TaskPart(Strict):
    """What the model is trained for (`noisewise.training.tasks`).

    ``target_shape`` is the shape of one record's target: empty for one class or one number.
    """

    name: str = "classification"
    target_shape: list[Count] = []  # noqa: RUF012


class InputPart(Strict):
    """One input array of a model that takes several by name.

    ``vocabulary`` is the number of ids: whole numbers are from 0 to ``vocabulary`` - 1.
    """

    shape: list[Count]
    dtype: Literal["float32", "int64"] = "float32"
    vocabulary: Count | None = None

    @property
    def form(self) -> TensorForm:
        """Shape, type and limit, for synthetic records."""
        return TensorForm(tuple(self.shape), _DTYPES[self.dtype], self.vocabulary)


def site_task(part: TaskPart, classes: int, loss: Any = None) -> Task:
    """The task of a site.

    Args:
        part: ``[task]`` of its file.
        classes: ``model.classes``: of a regression the number of outputs, which is no class.
        loss: the site's own loss; None takes the task's.

    Raises:
        InvalidValueError: the task is unknown, or the shape of its targets does not fit.
    """
    task = make_task(part.name, loss=loss)
    shape = part.target_shape
    if task.one_class and shape:
        raise InvalidValueError("task.target_shape", shape, f"must be empty for {task.name}")
    if task.targets in ("labels", "places") and not shape:
        raise InvalidValueError("task.target_shape", shape, f"must be given for {task.name}")
    outputs = None if task.targets in ("class", "places", "any") else task.outputs(shape)
    if outputs is not None and classes != outputs:
        allowed = f"must be {outputs}, the number of outputs for {task.name}"
        raise InvalidValueError("model.classes", classes, allowed)
    return replace(task, classes=classes) if outputs is None else task


@dataclass(frozen=True)
class RecordRules:
    """Which records can be trained on.

    Attributes:
        task: what targets are.
        target_shape: of one record.
        inputs: of each input array, by name; one without a name for a single array.
    """

    task: Task
    target_shape: tuple[int, ...] = ()
    inputs: tuple[TensorForm, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def form(self) -> RecordForm:
        """What synthetic records look like."""
        numbers = self.task.targets in ("numbers", "labels")
        dtype = torch.float32 if numbers else torch.int64
        limit = None if numbers else self.task.classes
        target = TensorForm(self.target_shape, dtype, limit)
        return RecordForm(self.inputs, target, self.names)

    def targets(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Targets [N, ...] in the task's type, and for each record whether its target is valid."""
        n, task = len(values), self.task
        flat = values.reshape(n, math.prod(values.shape[1:]))
        if task.targets in ("numbers", "labels"):
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = flat.astype(np.float32)
            valid = np.isfinite(numbers)
            if task.targets == "labels":
                valid &= (numbers == 0) | (numbers == 1)
            usable = np.logical_and.reduce(valid, axis=1)
            return np.where(usable[:, None], numbers, 0).reshape(values.shape), usable
        classes = np.inf if task.classes is None else task.classes
        with np.errstate(invalid="ignore"):
            valid = (flat >= 0) & (flat < classes)
            if flat.dtype.kind == "f":
                valid &= flat == np.floor(flat)
            counted = valid.copy()
            if task.targets == "places":
                valid |= flat == IGNORED
        usable = np.logical_and.reduce(valid, axis=1) & np.logical_or.reduce(counted, axis=1)
        whole = np.zeros(flat.shape, np.int64)
        whole[usable] = flat[usable].astype(np.int64)
        return whole.reshape(values.shape), usable


def whole_numbers(
    values: NDArray[Any], limit: int | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Inputs [N, ...] as int64, and for each record whether all are whole numbers in range."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    with np.errstate(invalid="ignore"):
        valid = (flat >= -(2**53)) & (flat <= 2**53)
        if flat.dtype.kind == "f":
            valid &= flat == np.floor(flat)
        if limit is not None:
            valid &= (flat >= 0) & (flat < limit)
    usable = np.logical_and.reduce(valid, axis=1)
    whole = np.zeros(flat.shape, np.int64)
    whole[usable] = flat[usable].astype(np.int64)
    return whole.reshape(values.shape), usable


def check_site_outputs(rules: RecordRules, model: nn.Module) -> None:
    """Check on synthetic records that a model's outputs have the shape of the task.

    Raises:
        InvalidValueError: the outputs have another shape.
    """
    tried: list[tuple[Tensor, Tensor]] = []

    def works(inputs: Inputs, targets: Tensor) -> None:
        positional, named = call_arguments(inputs)
        tried.append((output_of(model(*positional, **named)), targets))

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch_seed(0, torch.device("cpu")):
            synthetic_records(rules.form, 2, model, works, torch.device("cpu"))
    except InvalidValueError:
        raise
    except Exception:  # the engine reports a model that takes no synthetic record
        return
    finally:
        model.train(was_training)
    outputs, targets = tried[-1]
    check_outputs(rules.task, outputs, targets, "model.name")
