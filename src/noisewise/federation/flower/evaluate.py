"""Progress as a server may see it: accuracy on records that are public anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from torch import nn
from torch.nn.functional import cross_entropy

from noisewise.data.custom import dataset_from_arrays
from noisewise.data.files import read_arrays
from noisewise.data.partition import ClientData
from noisewise.errors import InvalidValueError
from noisewise.federation.evaluation import Evaluator, accuracy
from noisewise.federation.flower.records import read_theta
from noisewise.training.parameters import ParameterLayout

__all__ = ["public_evaluation"]


def public_evaluation(
    model: nn.Module, records: Path | str | None
) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """An ``evaluate_fn`` for `NoiseAware.start`, or None without records.

    Args:
        model: the structure.
        records: ``.npz`` or ``.safetensors`` with ``inputs`` and ``targets``. No site's records
            belong here.
    """
    if not records:
        return None
    path = Path(records)
    if not path.is_file():
        raise InvalidValueError("public-records", str(path), "must be a file, or empty")
    arrays = read_arrays(path)
    held = dataset_from_arrays(arrays["inputs"], arrays["targets"]).train
    evaluator = Evaluator(model, cross_entropy, accuracy, loss_records=1)
    data = evaluator.prepare(ClientData(held, held))
    layout = ParameterLayout.of(model)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": evaluator(read_theta(arrays, layout), data).accuracy})

    return evaluate
