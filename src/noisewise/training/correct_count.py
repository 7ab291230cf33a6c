"""The number of records that a model classifies correctly; each record changes it by at most 1."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.training.batch_size_check import BATCH_SIZES, check_batch_sizes
from noisewise.training.isolated_batches import IsolatedBatches
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout
from noisewise.training.synthetic_records import RecordForm, random_parameters, synthetic_records

__all__ = ["Answers"]


class Answers:
    """A model's predicted classes; a record's prediction does not depend on the other records.

    Args:
        model: a copy in evaluation mode is used.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout = ParameterLayout.of(model)
        self._model = copy.deepcopy(model).eval()

    def passes(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowRunner`."""
        with torch.no_grad():
            return [functional_call(self._model, self.layout.unflatten(theta), (inputs,))]

    def evidence(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowRunner`."""
        return self.passes(theta, inputs, targets)

    def prepare(self, theta: Tensor, form: RecordForm) -> IsolatedBatches:
        """Choose the batch sizes for records of a form, without reading any record."""
        thetas = [random_parameters(self.layout, theta, seed) for seed in (0, 1)]
        records = synthetic_records(
            form,
            max(BATCH_SIZES),
            self._model,
            lambda inputs, targets: self.passes(thetas[0], inputs[:4], targets[:4]),
            theta.device,
        )
        about = repr(("answers", form, self.layout, theta.dtype, theta.device))
        check = check_batch_sizes(self, thetas, records, max(BATCH_SIZES), about)
        return IsolatedBatches(check, (records[0][:1], records[1][:1]))

    def count_right(self, theta: Tensor, data: TensorData) -> int:
        """The number of records whose largest output is their class.

        A record for which the model raises an exception counts as wrong.

        Args:
            theta: [p] parameters.
            data: the records.
        """
        right = 0

        def run(inputs: Tensor, targets: Tensor, used: int) -> None:
            nonlocal right
            [outputs] = self.passes(theta, inputs, targets)
            right += int((outputs.argmax(dim=1) == targets)[:used].sum())

        isolation = self.prepare(theta, RecordForm.of(data.inputs, data.targets))
        isolation.apply(data.inputs, data.targets, run)
        return right
