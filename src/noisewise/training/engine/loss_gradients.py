"""The gradient of each record's own loss at the model's outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from noisewise.training.gradients import Loss

__all__ = ["LossGradients", "is_cross_entropy", "loss_gradients"]

LossGradients = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...] without a graph, targets [b, ...]) -> gradients [b, ...] at the outputs."""


def loss_gradients(loss: Loss) -> LossGradients:
    """How to get row i = gradient of ``loss(outputs[i : i + 1], targets[i : i + 1])``.

    A loss is any callable and need not be a mean over the batch, so its gradient is taken record
    by record; outputs are small, and no layer is involved. Torch's cross-entropy of class scores
    is known, and has a closed form.
    """
    by_record = _by_record(loss)
    if not is_cross_entropy(loss):
        return by_record

    def gradients(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() != 2 or targets.dim() != 1 or outputs.device.type != "cpu":
            return by_record(outputs, targets)
        try:
            return torch.softmax(outputs, 1).scatter_(1, targets[:, None], -1.0, reduce="add")
        except RuntimeError:  # a target that is no class: torch's own rules about those hold
            return by_record(outputs, targets)

    return gradients


def _by_record(loss: Loss) -> LossGradients:
    """Of any loss: by `vmap`, or in a loop for losses that `vmap` cannot follow."""

    def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0))

    at_once: LossGradients = vmap(grad(loss_of_one), randomness="different")

    def gradients(outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return at_once(outputs, targets)
        except RuntimeError:
            leaf = outputs.detach().requires_grad_()
            with torch.enable_grad():
                pairs = zip(leaf, targets, strict=True)
                total = torch.stack([loss_of_one(output, y) for output, y in pairs]).sum()
            return torch.autograd.grad(total, leaf)[0]

    return gradients


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is torch's plain cross-entropy, as a function or as a module."""
    if loss is functional.cross_entropy:
        return True
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.reduction == "mean"
        and loss.label_smoothing == 0.0  # class weights cancel in the mean over one record
    )
