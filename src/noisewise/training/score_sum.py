"""The sum of records' scores under a model; each record changes it by at most 1."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.training.batch_size_check import BATCH_SIZES, check_batch_sizes
from noisewise.training.bounded_scores import RecordScore
from noisewise.training.inputs import Inputs, call_arguments, output_of
from noisewise.training.isolated_batches import IsolatedBatches
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout, state_to_write
from noisewise.training.synthetic_records import (
    RecordForm,
    first_records,
    random_parameters,
    synthetic_records,
)

__all__ = ["Answers"]


class Answers:
    """A model's outputs; those of a record do not depend on the other records.

    Args:
        model: a copy in evaluation mode is used.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout = ParameterLayout.of(model)
        self._model = copy.deepcopy(model).eval()

    def passes(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowRunner`."""
        with torch.no_grad():
            arguments = call_arguments(inputs)
            # Copies: otherwise what the model writes would let one record change another's outputs.
            state = state_to_write(self._model) | self.layout.unflatten(theta.clone())
            return [output_of(functional_call(self._model, state, *arguments))]

    def evidence(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowRunner`."""
        return self.passes(theta, inputs, targets)

    def prepare(self, theta: Tensor, form: RecordForm) -> IsolatedBatches:
        """Choose the batch sizes for records of a form, without reading any record."""
        thetas = [random_parameters(self.layout, theta, seed) for seed in (0, 1)]
        records = synthetic_records(
            form,
            max(BATCH_SIZES),
            self._model,
            lambda *records: self.passes(thetas[0], *first_records(records, 4)),
            theta.device,
        )
        about = repr(("answers", form, self.layout, theta.dtype, theta.device))
        check = check_batch_sizes(self, thetas, records, max(BATCH_SIZES), about)
        return IsolatedBatches(check, first_records(records, 1))

    def score_sum(self, theta: Tensor, data: TensorData, score: RecordScore) -> int:
        """The sum of the records' scores, in units of 1 / `SCORE_UNITS`.

        A record for which the model raises an exception scores 0.

        Args:
            theta: [p] parameters.
            data: the records.
            score: of each record, from `bounded_score`.
        """
        total = 0

        def run(inputs: Inputs, targets: Tensor, used: int) -> None:
            nonlocal total
            [outputs] = self.passes(theta, inputs, targets)
            total += int(score(outputs, targets)[:used].sum())

        isolation = self.prepare(theta, RecordForm.of(data.inputs, data.targets))
        isolation.apply(data.inputs, data.targets, run)
        return total
