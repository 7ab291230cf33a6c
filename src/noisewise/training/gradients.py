"""`GradientEngine`, which computes sums of clipped per-record gradients for DP-SGD.

`FunctionalGradients` is the reference engine: `torch.func` on any model without BatchNorm. The
faster engines are in `noisewise.training.engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["FunctionalGradients", "GradientEngine", "Loss", "clip_factors"]

_log = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> scalar mean over the batch, like torch's losses."""


class GradientEngine(Protocol):
    """Computes sum over records of clip(gradient, c) at a parameter vector."""

    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        """Sum of the clipped gradients of all records.

        Args:
            theta: [p] trainable parameters.
            inputs: [b, ...], b may be 0.
            targets: [b, ...].
            clip_norm: c; None adds the gradients without clipping.

        Returns:
            [p] float64. A record whose gradient is NaN or infinite contributes 0.
        """
        total = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        self.add_clipped_sum(theta, inputs, targets, clip_norm, total)
        return total

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """Add `clipped_sum` to ``total`` [p] float64, without allocating a new vector."""
        ...


def clip_factors(squared_norms: Tensor, clip_norm: float | None) -> Tensor:
    """min(1, c / norm) for each record, and 0 for a norm that is NaN or infinite.

    Args:
        squared_norms: [b] float64, over *all* trainable parameters together (flat clipping).
        clip_norm: c; None for no clipping.

    Source: the paper's clip(v, c), text after eq. noisy_sg.
    """
    limit = torch.inf if clip_norm is None else clip_norm
    # 1/inf is 0; NaN, and inf * 0 without a limit, become 0; 1/0 is inf, which becomes 1
    return squared_norms.rsqrt().mul_(limit).clamp_(max=1.0).nan_to_num_(nan=0.0)


class FunctionalGradients:
    """The reference engine: computes every per-record gradient with `torch.func`.

    Norms and sums are computed in float64, so leaving out one record changes the sum by at most
    c (1 + 1e-6), whatever the other records are.

    Args:
        model: gives structure, buffers and mode; its trainable parameters are not read.
        loss: of a batch; applied to each record separately.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
        InvalidValueError: the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        check_model(model)
        self.layout = ParameterLayout.of(model)
        self._prepared = False
        trainable = set(self.layout.names)
        frozen = {n: p.detach() for n, p in model.named_parameters() if n not in trainable}
        buffers = dict(model.named_buffers())

        def loss_of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            # Copies: otherwise a layer that writes to its buffers would let one record change the
            # gradient of another one, or the next client's results with the same model.
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            outputs = functional_call(model, {**parameters, **frozen, **copies}, (x.unsqueeze(0),))
            return loss(outputs, y.unsqueeze(0))

        self._gradient_of_one = grad(loss_of_one)
        self._gradients: Callable[..., dict[str, Tensor]] = vmap(
            self._gradient_of_one, in_dims=(None, 0, 0), randomness="different"
        )

    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        """See `GradientEngine`."""
        total = torch.zeros(self.layout.size, dtype=torch.float64, device=theta.device)
        if len(inputs):
            self.add_rows(theta, inputs, targets, clip_norm, total, len(inputs))
        return total

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """See `GradientEngine`."""
        total += self.clipped_sum(theta, inputs, targets, clip_norm)

    def prepare(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Find out on public records whether `vmap` supports the model; see `RowEngine`."""
        self._by_name(self.layout.unflatten(theta), inputs, targets)
        self._prepared = True

    def passes(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        return list(self._by_name(self.layout.unflatten(theta), inputs, targets).values())

    def evidence(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        return self.passes(theta, inputs, targets)

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
        by_name = self._by_name(self.layout.unflatten(theta), inputs, targets)
        gradients = torch.cat(
            [by_name[name].reshape(len(inputs), -1) for name in self.layout.names], dim=1
        ).double()
        factors = clip_factors(gradients.square().sum(dim=1), clip_norm)
        factors[used:] = 0.0
        if bool((factors == 0).any()):  # 0 * inf would be nan
            gradients = torch.where((factors > 0)[:, None], gradients, 0.0)
        total += factors @ gradients

    def _by_name(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        """Gradients [b, ...] of each parameter; one record at a time if `vmap` fails."""
        try:
            return self._gradients(parameters, inputs, targets)
        except RuntimeError as error:
            if self._prepared:
                raise
            gradients = self._one_by_one(parameters, inputs, targets)
            _log.info("vmap fails, so each record is computed separately: %s", error)
            self._gradients = self._one_by_one
            return gradients

    def _one_by_one(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        """The same gradients without `vmap`, for operations that it does not support."""
        gradients = [
            self._gradient_of_one(parameters, x, y) for x, y in zip(inputs, targets, strict=True)
        ]
        return {name: torch.stack([one[name] for one in gradients]) for name in parameters}
