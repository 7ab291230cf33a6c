"""How good a global model is: accuracy on every client's held-out records, and the train loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.federation.clients import Client, to_tensors
from noisewise.training.gradients import Loss
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout

__all__ = ["Evaluation", "Evaluator", "Metric", "accuracy"]

Metric = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> one score for each record [b]; larger is better."""

_BATCH = 1024


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each record whose largest output is its class, else 0."""
    return (outputs.argmax(dim=1) == targets).double()


@dataclass(frozen=True)
class Evaluation:
    """Scores of one global model.

    Attributes:
        accuracy: [n] of each client's held-out records.
        train_loss: [n] mean loss of each client's training records.
    """

    accuracy: NDArray[np.float64]
    train_loss: NDArray[np.float64]


class Evaluator:
    """Scores of a global model on all clients' records: the simulator's eyes, not a server's."""

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        loss: Loss,
        metric: Metric = accuracy,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model, self._loss, self._metric, self._device = model, loss, metric, device
        self._layout = ParameterLayout.of(model)
        self._clients = tuple(clients)

    @torch.no_grad()
    def __call__(self, theta: Tensor) -> Evaluation:
        """Evaluate ``theta`` [p]."""
        parameters = self._layout.unflatten(theta)
        was_training = self._model.training
        self._model.eval()
        try:
            scores, losses = [], []
            for client in self._clients:
                scores.append(self._mean(parameters, to_tensors(client.data.test), self._score))
                losses.append(self._mean(parameters, to_tensors(client.data.train), self._losses))
        finally:
            self._model.train(was_training)
        return Evaluation(np.array(scores), np.array(losses))

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self._metric(outputs, targets).double().sum())

    def _losses(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self._loss(outputs, targets)) * len(targets)

    def _mean(
        self,
        parameters: dict[str, Tensor],
        data: TensorData,
        total: Callable[[Tensor, Tensor], float],
    ) -> float:
        """Mean over records of what ``total`` sums over a batch; NaN for no records."""
        if len(data) == 0:
            return float("nan")
        result = 0.0
        for start in range(0, len(data), _BATCH):
            inputs = data.inputs[start : start + _BATCH].to(self._device)
            targets = data.targets[start : start + _BATCH].to(self._device)
            result += total(functional_call(self._model, parameters, (inputs,)), targets)
        return result / len(data)
