"""Progress as a server may see it: the task's metrics on public records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from noisewise.data.custom import dataset_from_arrays
from noisewise.data.partition import ClientData
from noisewise.data.record_files import joined_inputs, read_arrays
from noisewise.errors import InvalidValueError
from noisewise.federation.clients import to_tensors
from noisewise.federation.evaluation import Evaluator
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.task_info import TaskInfo
from noisewise.flower.parameter_records import read_theta
from noisewise.training.inputs import call_arguments, output_of
from noisewise.training.parameters import ParameterLayout
from noisewise.training.tasks import CLASSIFICATION, Task, check_outputs, check_targets

__all__ = ["PUBLIC_RECORDS", "Evaluate", "public_evaluation", "with_public_scores"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
"""(round, parameters) -> metrics on public records, as Flower's ``evaluate_fn``."""

PUBLIC_RECORDS = "public records"
"""The name of a server's own evaluation in the record of a round."""

_FIELD = "public-records"
_PROBES = 8


def with_public_scores(
    record: RoundRecord, task: TaskInfo, scores: MetricRecord | None
) -> RoundRecord:
    """The record of a round with a server's own figures, as far as they are finite.

    Args:
        record: of the round.
        task: whose metrics are recorded; other figures are left out.
        scores: of an `Evaluate` function.
    """
    values: dict[str, Any] = {} if scores is None else dict(scores)
    figures = {
        metric.name: {PUBLIC_RECORDS: float(values[metric.name])}
        for metric in task.metrics
        if metric.name in values and math.isfinite(float(values[metric.name]))
    }
    return replace(record, accuracy=figures.pop("accuracy", None), metrics=figures or None)


def public_evaluation(
    model: nn.Module,
    records: Path | str | None,
    task: Task = CLASSIFICATION,
    *,
    images: bool = False,
) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """An ``evaluate_fn`` for `NoiseAware.start`; None without records.

    Args:
        model: its structure is used.
        records: a ``.npz`` or ``.safetensors`` file with ``inputs`` and ``targets``; several inputs
            by name are ``inputs.NAME``. They must be public: records of a site do not belong here.
        task: its metrics are computed.
        images: inputs of type uint8 are divided by 255; without it, whole numbers stay as they are.

    Raises:
        InvalidValueError: the file is missing or invalid, or model and records do not fit the task.

    Example:
        evaluate_fn = public_evaluation(model, "public.npz", make_task("regression"))
    """
    if not records:
        return None
    path = Path(records)
    if not path.is_file():
        raise InvalidValueError(_FIELD, str(path), "must be a file, or empty")
    arrays = read_arrays(path)
    targets = check_targets(task, arrays["targets"], f"{_FIELD}: targets")
    public = dataset_from_arrays(
        joined_inputs(arrays), targets, values=not task.one_class, images=images
    ).train
    sample = to_tensors(public.take(slice(0, _PROBES)))
    positional, named = call_arguments(sample.inputs)
    try:
        outputs = output_of(model(*positional, **named))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        allowed = f"must have inputs that the model takes ({type(error).__name__}: {reason})"
        raise InvalidValueError(_FIELD, str(path), allowed) from error
    check_outputs(task, outputs, sample.targets, f"{_FIELD}: model")
    evaluator = Evaluator(model, task.loss, task.metrics, loss_records=1)
    data = evaluator.prepare(ClientData(public, public))
    layout = ParameterLayout.of(model)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(evaluator(read_theta(arrays, layout), data).metrics))

    return evaluate
