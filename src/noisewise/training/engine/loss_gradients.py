"""The gradient of each record's own loss at the model's outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from noisewise.training.gradients import Loss

__all__ = ["LossGradients", "is_cross_entropy"]

_Method = Callable[[Tensor, Tensor], Tensor]


class LossGradients:
    """Row i is the gradient of ``loss(outputs[i : i + 1], targets[i : i + 1])`` at ``outputs[i]``.

    A loss is any callable and need not be a mean over the batch, so its gradient is computed for
    each record. There are up to three methods: the closed form of torch's cross-entropy, `vmap`,
    and a loop for losses that `vmap` does not support. A call uses the first method that works,
    unless `fix` has chosen one.
    """

    def __init__(self, loss: Loss) -> None:
        self._methods = [*([_closed_form] if is_cross_entropy(loss) else []), *_by_record(loss)]
        self._fixed: _Method | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(outputs [b, ...] without a graph, targets [b, ...]) -> gradients [b, ...]."""
        if self._fixed is not None:
            return self._fixed(outputs, targets)
        return self._first(outputs, targets)[1]

    def fix(self, outputs: Tensor, targets: Tensor) -> None:
        """Choose the method that works for these records; later records cannot change it."""
        self._fixed = self._first(outputs, targets)[0]

    def _first(self, outputs: Tensor, targets: Tensor) -> tuple[_Method, Tensor]:
        *earlier, last = self._methods
        for method in earlier:
            try:
                return method, method(outputs, targets)
            except RuntimeError:  # shapes or targets that this method does not support
                continue
        return last, last(outputs, targets)


def _closed_form(outputs: Tensor, targets: Tensor) -> Tensor:
    """softmax(outputs) - onehot(targets), for class scores on the CPU."""
    if outputs.dim() != 2 or targets.dim() != 1 or outputs.device.type != "cpu":
        raise RuntimeError("the closed form needs outputs [b, classes] and targets [b] on the CPU")
    return torch.softmax(outputs, 1).scatter_(1, targets[:, None], -1.0, reduce="add")


def _by_record(loss: Loss) -> list[_Method]:
    """Methods for any loss: `vmap`, and a loop."""

    def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0))

    def one_by_one(outputs: Tensor, targets: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            pairs = zip(leaf, targets, strict=True)
            total = torch.stack([loss_of_one(output, y) for output, y in pairs]).sum()
        return torch.autograd.grad(total, leaf)[0]

    return [vmap(grad(loss_of_one), randomness="different"), one_by_one]


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is torch's plain cross-entropy, as a function or as a module.

    With class weights, or if a class is ignored, the mean over one record can be 0 / 0.
    """
    if loss is functional.cross_entropy:
        return True
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.reduction == "mean"
        and loss.label_smoothing == 0.0
        and loss.weight is None
        and loss.ignore_index < 0
    )
