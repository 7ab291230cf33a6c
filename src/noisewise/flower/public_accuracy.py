"""Progress as a server may see it: accuracy on public records."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from torch import nn
from torch.nn.functional import cross_entropy

from noisewise.data.custom import dataset_from_arrays
from noisewise.data.partition import ClientData
from noisewise.data.record_files import read_arrays
from noisewise.errors import InvalidValueError
from noisewise.federation.evaluation import Evaluator, accuracy
from noisewise.flower.arrays import read_theta
from noisewise.training.parameters import ParameterLayout

__all__ = ["PUBLIC_RECORDS", "Evaluate", "public_accuracy", "public_evaluation"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
"""(round, parameters) -> metrics on public records, as Flower's ``evaluate_fn``."""

PUBLIC_RECORDS = "public records"
"""The name of a server's own evaluation in the record of a round."""


def public_accuracy(metrics: MetricRecord | None) -> dict[str, float] | None:
    """The accuracy for the record of a round; None if it is missing or not finite.

    Args:
        metrics: of an `Evaluate` function.
    """
    value: Any = None if metrics is None else metrics.get("accuracy")
    if value is None or not math.isfinite(float(value)):
        return None
    return {PUBLIC_RECORDS: float(value)}


def public_evaluation(
    model: nn.Module, records: Path | str | None
) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """An ``evaluate_fn`` for `NoiseAware.start`; None without records.

    Args:
        model: its structure is used.
        records: a ``.npz`` or ``.safetensors`` file with ``inputs`` and ``targets``. They must be
            public: records of a site do not belong here.

    Raises:
        InvalidValueError: the file is missing or invalid.
    """
    if not records:
        return None
    path = Path(records)
    if not path.is_file():
        raise InvalidValueError("public-records", str(path), "must be a file, or empty")
    arrays = read_arrays(path)
    public = dataset_from_arrays(arrays["inputs"], arrays["targets"]).train
    evaluator = Evaluator(model, cross_entropy, accuracy, loss_records=1)
    data = evaluator.prepare(ClientData(public, public))
    layout = ParameterLayout.of(model)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": evaluator(read_theta(arrays, layout), data).accuracy})

    return evaluate
