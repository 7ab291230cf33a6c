"""`LinearGradients`: the closed form for one linear layer with cross-entropy, without autograd.

Softmax regression is used to compare populations, methods and learning rates. Its steps are so
small that recording the layers' inputs would cost more than the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from noisewise.training.engine.fast_gradients import FastGradients
from noisewise.training.engine.loss_gradients import is_cross_entropy
from noisewise.training.engine.padded_linear import padded_linear
from noisewise.training.gradients import Loss, clip_factors
from noisewise.training.inputs import Inputs

__all__ = ["LinearGradients", "SingleLayer", "fast_engine", "is_linear", "single_layer"]


def fast_engine(model: nn.Module, loss: Loss, *, padded: bool = False) -> FastGradients:
    """`LinearGradients` if the model is one linear layer under cross-entropy, else the rules."""
    kind = LinearGradients if is_linear(model, loss) else FastGradients
    return kind(model, loss, padded=padded)


def is_linear(model: nn.Module, loss: Loss) -> bool:
    """Whether a model is one linear layer with bias on flattened records, with cross-entropy."""
    single = single_layer(model) if is_cross_entropy(loss) else None
    return single is not None and single.flattens and single.constant is None


@dataclass(frozen=True)
class SingleLayer:
    """The only layer of a model.

    Attributes:
        layer: linear.
        flattens: whether records are flattened before it.
        constant: the number that is appended to each record in place of a bias, as
            `noisewise.training.models.head` does; None for a layer with bias.
    """

    layer: nn.Linear
    flattens: bool
    constant: float | None


def single_layer(model: nn.Module) -> SingleLayer | None:
    """The only layer of a model: linear, with bias or an appended constant; else None.

    All parameters must be trainable, and there must be no hooks or parametrisations.
    """
    parts = list(model) if type(model) is nn.Sequential else [model]
    if not parts or type(parts[-1]) is not nn.Linear:
        return None
    layer, before = parts[-1], parts[:-1]
    flattens, constant = bool(before) and _flattens(before[0]), None
    before = before[1:] if flattens else before
    if before and type(before[0]) is nn.ConstantPad1d and before[0].padding == (0, 1):
        constant, before = float(before[0].value), before[1:]
    if before or (layer.bias is None) == (constant is None):
        return None
    is_trainable = all(parameter.requires_grad for parameter in model.parameters())
    is_modified = any(_is_modified(module) for module in model.modules())
    return SingleLayer(layer, flattens, constant) if is_trainable and not is_modified else None


def _flattens(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _is_modified(module: nn.Module) -> bool:
    """Whether hooks or parametrisations can change the layer's output or gradients."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or hasattr(module, "parametrizations")


class LinearGradients(FastGradients):
    """Clipped sums of one linear layer in closed form.

    Record j has the gradient g_j x_j^T and g_j with g_j = softmax(W x_j + a) - onehot(y_j). Its
    squared norm is ||g_j||^2 (||x_j||^2 + 1). `FastGradients` computes batches of another shape or
    type, and batches with a target that is no class unless `prepare` was called.
    """

    _prepared = False

    def prepare(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> None:
        """See `RowEngine`."""
        self._prepared = True
        if not self._is_plain(inputs, theta, targets):
            super().prepare(theta, inputs, targets)

    def passes(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        if not self._is_plain(inputs, theta, targets):
            return super().passes(theta, inputs, targets)
        with torch.no_grad():
            return [self._slopes(theta, inputs.flatten(1), targets)]

    def evidence(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        if not self._is_plain(inputs, theta, targets):
            return super().evidence(theta, inputs, targets)
        [slopes] = self.passes(theta, inputs, targets)
        return [slopes, _squared_norms(slopes.double(), inputs.flatten(1).double())]

    def add_rows(
        self,
        theta: Tensor,
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """See `RowEngine`."""
        if not self._is_plain(inputs, theta, targets):
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

    def _is_plain(self, inputs: Inputs, theta: Tensor, targets: Tensor) -> TypeGuard[Tensor]:
        """Whether the closed form covers the batch; depends on shapes and types alone."""
        return (
            isinstance(inputs, Tensor)
            and inputs[0].numel() == self.layout.shapes[0][1]
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
