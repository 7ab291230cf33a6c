"""`Evaluator`: accuracy of a global model on each client's held-out records, and its train loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.data.datasets import Examples
from noisewise.data.partition import ClientData
from noisewise.federation.clients import to_tensors
from noisewise.training.gradients import Loss
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout

__all__ = ["Evaluator", "Metric", "Scores", "accuracy"]

Metric = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> one score for each record [b]; larger is better."""

# Larger batches do not fit into the processor's caches: with 1,024 records, the paper's CNN takes
# twice as long.
_BATCH = 128


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each record whose largest output is its class, else 0."""
    return (outputs.argmax(dim=1) == targets).double()


@dataclass(frozen=True)
class Scores:
    """Scores of one global model at one client.

    Attributes:
        accuracy: mean metric of its held-out records; NaN if it has none.
        train_loss: mean loss of its training records, or of a fixed sample of them.
    """

    accuracy: float
    train_loss: float


class Evaluator:
    """Scores a global model on clients' records. Only a simulator can do that, not a server.

    Records are scaled once and kept. Images are kept in the channels-last layout, in which
    max-pooling on a CPU is ten times faster. A model whose own code needs the default layout
    (``x.view``) receives copies in that layout.

    Args:
        model: its structure and buffers are used.
        loss: mean loss of a batch.
        metric: score of each held-out record.
        loss_records: largest number of training records of a client that its train loss is
            computed from; they are spread evenly and the same in every round.
        device: of the tensors, as torch names it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metric: Metric,
        loss_records: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model, self._loss, self._metric, self._device = model, loss, metric, device
        self._loss_records = loss_records
        self._layout = ParameterLayout.of(model)
        self._default_layout = False

    def prepare(self, data: ClientData) -> tuple[TensorData, TensorData]:
        """A client's held-out records and its sample of training records, ready for calls."""
        train = data.train
        if len(train) > self._loss_records:
            train = train.take(np.linspace(0, len(train) - 1, self._loss_records).astype(np.int64))
        return self._tensors(data.test), self._tensors(train)

    def _tensors(self, examples: Examples) -> TensorData:
        data = to_tensors(examples, self._device)
        if data.inputs.dim() != 4:
            return data
        # Not .to(memory_format=...), which leaves images of one channel as they are.
        images = torch.empty_like(data.inputs, memory_format=torch.channels_last)
        return TensorData(images.copy_(data.inputs), data.targets)

    @torch.no_grad()
    def __call__(self, theta: Tensor, data: tuple[TensorData, TensorData]) -> Scores:
        """Evaluate ``theta`` [p] on a client's records, as `prepare` returned them."""
        parameters = self._layout.unflatten(theta)
        was_training = self._model.training
        self._model.eval()
        try:
            return Scores(
                self._mean(parameters, data[0], self._score),
                self._mean(parameters, data[1], self._losses),
            )
        finally:
            self._model.train(was_training)

    @torch.no_grad()
    def of_outputs(self, outputs: Tensor, data: tuple[TensorData, TensorData]) -> Scores:
        """Scores of a model from its outputs for both parts of ``data``, one after the other."""
        test, train = data
        accuracy = train_loss = float("nan")
        if len(test):
            accuracy = self._score(outputs[: len(test)], test.targets) / len(test)
        if len(train):
            train_loss = self._losses(outputs[len(test) :], train.targets) / len(train)
        return Scores(accuracy, train_loss)

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self._metric(outputs, targets).double().sum())

    def _losses(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self._loss(outputs, targets)) * len(targets)

    def _outputs(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if inputs.dim() == 4 and not self._default_layout:
            try:
                outputs: Tensor = functional_call(self._model, parameters, (inputs,))
            except RuntimeError:
                self._default_layout = True
            else:
                return outputs
        # Not .contiguous(), which leaves images of one channel as they are.
        inputs = inputs.clone(memory_format=torch.contiguous_format)
        return functional_call(self._model, parameters, (inputs,))  # type: ignore[no-any-return]

    def _mean(
        self,
        parameters: dict[str, Tensor],
        data: TensorData,
        total: Callable[[Tensor, Tensor], float],
    ) -> float:
        """Mean over records, where ``total`` returns the sum over a batch; NaN without records."""
        if len(data) == 0:
            return float("nan")
        result = 0.0
        for start in range(0, len(data), _BATCH):
            inputs = data.inputs[start : start + _BATCH]
            targets = data.targets[start : start + _BATCH]
            result += total(self._outputs(parameters, inputs), targets)
        return result / len(data)
