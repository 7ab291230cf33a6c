"""A single linear layer under cross-entropy: the closed form, without autograd.

Softmax regression is what populations, methods and learning rates are tried out with, and its steps
are so small that recording what each layer saw costs more than the arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from noisewise.training.engine.fast import FastGradients
from noisewise.training.engine.loss_gradients import is_cross_entropy
from noisewise.training.gradients import Loss, clip_factors

__all__ = ["LinearGradients", "is_linear"]


def is_linear(model: nn.Module, loss: Loss) -> bool:
    """Whether a model is one linear layer with bias on flattened records, under cross-entropy.

    All of it must be trainable, and nothing may watch or change its calls.
    """
    if type(model) is not nn.Sequential or not is_cross_entropy(loss):
        return False
    parts = list(model)
    layer = parts[-1] if parts else None
    flat = [part for part in parts[:-1] if type(part) is nn.Flatten]
    return (
        type(layer) is nn.Linear
        and len(parts) == 2
        and len(flat) == 1
        and (flat[0].start_dim, flat[0].end_dim) == (1, -1)
        and layer.bias is not None
        and all(parameter.requires_grad for parameter in model.parameters())
        and not any(_watched(module) for module in model.modules())
    )


def _watched(module: nn.Module) -> bool:
    """Whether hooks or parametrisations stand between the layer and its formula."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or hasattr(module, "parametrizations")


class LinearGradients(FastGradients):
    """Record j has the gradient g_j x_j^T and g_j, g_j = softmax(W x_j + a) - onehot(y_j).

    Its squared norm is ||g_j||^2 (||x_j||^2 + 1). Batches that are not plain (other shapes, targets
    that are no classes, numbers that are not finite) go the general way.
    """

    def _add(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        k, d = self.layout.shapes[0]
        x = inputs.flatten(1)
        plain = x.shape[1] == d and targets.dim() == 1 and not targets.is_floating_point()
        if not plain or x.dtype != theta.dtype or theta.device.type != "cpu":
            super()._add(theta, inputs, targets, clip_norm, total)
            return
        with torch.no_grad():
            outputs = torch.addmm(theta[k * d :], x, theta[: k * d].view(k, d).t())
            slopes = torch.softmax(outputs, 1)
            try:
                slopes.scatter_(1, targets[:, None], -1.0, reduce="add")
            except RuntimeError:  # a target that is no class
                super()._add(theta, inputs, targets, clip_norm, total)
                return
            g, wide = slopes.double(), x.double()
            norms = g.square().sum(1) * (wide.square().sum(1) + 1.0)
            if not math.isfinite(float(norms.sum())):
                super()._add(theta, inputs, targets, clip_norm, total)
                return
            g *= clip_factors(norms, clip_norm)[:, None]
            total[: k * d].view(k, d).addmm_(g.t(), wide)
            total[k * d :] += g.sum(0)
