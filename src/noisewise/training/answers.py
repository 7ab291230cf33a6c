"""How many records a model gets right, where each record decides about itself only."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.training.isolation import Isolation
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout
from noisewise.training.row_check import ROW_COUNTS, check_rows
from noisewise.training.synthetic import RecordForm, random_parameters, synthetic_records

__all__ = ["Answers"]


class Answers:
    """A model's class for each record, the same to the bit whatever the other records are.

    Args:
        model: is copied, in its mode for evaluation.
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

    def prepare(self, theta: Tensor, form: RecordForm) -> Isolation:
        """Choose the batch sizes for records of a form, without reading any."""
        thetas = [random_parameters(self.layout, theta, seed) for seed in (0, 1)]
        records = synthetic_records(
            form,
            max(ROW_COUNTS),
            self._model,
            lambda inputs, targets: self.passes(thetas[0], inputs[:4], targets[:4]),
            theta.device,
        )
        about = repr(("answers", form, self.layout, theta.dtype, theta.device))
        check = check_rows(self, thetas, records, max(ROW_COUNTS), about)
        return Isolation(check, (records[0][:1], records[1][:1]))

    def count_right(self, theta: Tensor, data: TensorData) -> int:
        """The number of records whose largest output is their class.

        Each record counts 0 or 1 by itself; one for which the model raises an exception counts 0.
        """
        right = 0

        def run(inputs: Tensor, targets: Tensor, used: int) -> None:
            nonlocal right
            [outputs] = self.passes(theta, inputs, targets)
            right += int((outputs.argmax(dim=1) == targets)[:used].sum())

        isolation = self.prepare(theta, RecordForm.of(data.inputs, data.targets))
        isolation.apply(data.inputs, data.targets, run)
        return right
