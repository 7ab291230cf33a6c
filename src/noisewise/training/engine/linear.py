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
from noisewise.training.engine.padding import padded_linear
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

    Its squared norm is ||g_j||^2 (||x_j||^2 + 1). Batches of another shape or type go the general
    way, and so does a batch with a target that is no class, unless `prepare` was called.
    """

    _prepared = False

    def prepare(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """See `RowEngine`."""
        self._prepared = True
        if not self._is_plain(theta, inputs, targets):
            super().prepare(theta, inputs, targets)

    def passes(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        if not self._is_plain(theta, inputs, targets):
            return super().passes(theta, inputs, targets)
        with torch.no_grad():
            return [self._slopes(theta, inputs.flatten(1), targets)]

    def evidence(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        if not self._is_plain(theta, inputs, targets):
            return super().evidence(theta, inputs, targets)
        [slopes] = self.passes(theta, inputs, targets)
        return [slopes, _squared_norms(slopes.double(), inputs.flatten(1).double())]

    def add_rows(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """See `RowEngine`."""
        if not self._is_plain(theta, inputs, targets):
            super().add_rows(theta, inputs, targets, clip_norm, total, used)
            return
        k, d = self.layout.shapes[0]
        x = inputs.flatten(1)
        with torch.no_grad():
            try:
                slopes = self._slopes(theta, x, targets)
            except RuntimeError:  # a target that is no class
                if self._prepared:
                    raise
                super().add_rows(theta, inputs, targets, clip_norm, total, used)
                return
            slopes[used:] = 0.0
            g, wide = slopes.double(), x.double()
            norms = _squared_norms(g, wide)
            if not math.isfinite(float(norms.sum())):
                bad = ~torch.isfinite(norms)
                g[bad], wide[bad], norms[bad] = 0.0, 0.0, 0.0
            g *= clip_factors(norms, clip_norm)[:, None]
            total[: k * d].view(k, d).addmm_(g.t(), wide)
            total[k * d :] += g.sum(0)

    def _is_plain(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """By shapes and types alone."""
        return (
            inputs[0].numel() == self.layout.shapes[0][1]
            and targets.dim() == 1
            and not targets.is_floating_point()
            and inputs.dtype == theta.dtype
            and theta.device.type == "cpu"
        )

    def _slopes(self, theta: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        """The gradients [b, k] at the outputs."""
        k, d = self.layout.shapes[0]
        weight, bias = theta[: k * d].view(k, d), theta[k * d :]
        if self._options.padded:
            outputs = padded_linear(x, weight, bias)
        else:
            outputs = torch.addmm(bias, x, weight.t())
        return torch.softmax(outputs, 1).scatter_(1, targets[:, None], -1.0, reduce="add")


def _squared_norms(g: Tensor, wide: Tensor) -> Tensor:
    return g.square().sum(1) * (wide.square().sum(1) + 1.0)
