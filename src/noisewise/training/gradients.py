"""`GradientEngine`, which computes sums of clipped per-record gradients for DP-SGD.

`FunctionalGradients` is the reference engine: `torch.func` on any model without BatchNorm. The
faster engines are in `noisewise.training.engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from noisewise.privacy.plan import LocalPlan
from noisewise.training.inputs import Inputs, call_arguments, map_inputs, output_of, select
from noisewise.training.parameters import ParameterLayout, check_model, state_to_write
from noisewise.training.transformers_masks import same_masks

__all__ = [
    "CLIP_MARGIN",
    "NORMALISE_GAMMA",
    "FunctionalGradients",
    "GradientEngine",
    "Loss",
    "NormaliseTo",
    "clip_bound",
    "clip_factors",
]

NORMALISE_GAMMA = 0.01
"""gamma of automatic clipping; public, the same for all records."""

CLIP_MARGIN = 2.0**-17
"""In a deployment, contributions are clipped at c (1 - 2^-17).

The rest of c covers the rounding of float64 norms and sums in any order: with u = 2^-53, the norm
of n values has a relative error of at most n u, and a sum of B contributions an error of at most
u B^2 / 2 times c. For n = 1e9 and two sums of B = 250,000 the total is below 2^-17 c.
"""

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 27
_BYTES_OF_A_VALUE = 16  # of a per-record gradient: float32 twice, and float64

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> scalar mean over the batch, like torch's losses."""


class GradientEngine(Protocol):
    """Computes sum over records of clip(gradient, c) at a parameter vector."""

    def clipped_sum(
        self, theta: Tensor, inputs: Inputs, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        """Sum of the clipped gradients of all records.

        Args:
            theta: [p] trainable parameters.
            inputs: [b, ...], one tensor or several; b may be 0.
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
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """Add `clipped_sum` to ``total`` [p] float64, without allocating a new vector."""
        ...


class NormaliseTo(float):
    """c of automatic clipping: every gradient g becomes c g / (||g|| + 0.01) (Bu et al. 2022).

    Engines pass the number on to `clip_factors`. A product with a number keeps the rule; code that
    makes a plain float of it clips to the same norm c.
    """

    def __mul__(self, other: float) -> NormaliseTo:
        return NormaliseTo(float(self) * other)

    __rmul__ = __mul__


def clip_bound(plan: LocalPlan) -> float | None:
    """C of a plan with its clipping rule, as engines take it."""
    if plan.clip_norm is not None and plan.clip_rule == "normalise":
        return NormaliseTo(plan.clip_norm)
    return plan.clip_norm


def clip_factors(squared_norms: Tensor, clip_norm: float | None) -> Tensor:
    """min(1, c / norm) for each record, and 0 for a norm that is NaN or infinite.

    For `NormaliseTo`: c / (norm + 0.01).

    Args:
        squared_norms: [b] float64, over *all* trainable parameters together (flat clipping).
        clip_norm: c; None for no clipping.

    Source: the paper's clip(v, c), text after eq. noisy_sg.
    """
    if isinstance(clip_norm, NormaliseTo):
        norms = squared_norms.sqrt().add_(NORMALISE_GAMMA)
        return norms.reciprocal_().mul_(float(clip_norm)).nan_to_num_(nan=0.0)
    limit = torch.inf if clip_norm is None else clip_norm
    # 1/inf is 0; NaN, and inf * 0 without a limit, become 0; 1/0 is inf, which becomes 1
    return squared_norms.rsqrt().mul_(limit).clamp_(max=1.0).nan_to_num_(nan=0.0)


class FunctionalGradients:
    """The reference engine: computes every per-record gradient with `torch.func`.

    Records are computed in chunks, so that their gradients take at most 128 MB. Norms and sums are
    computed in float64, so leaving out one record changes the sum by at most
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
        self._records_at_once = max(1, _CHUNK_BYTES // (_BYTES_OF_A_VALUE * self.layout.size))
        trainable = set(self.layout.names)
        frozen = {n: p.detach() for n, p in model.named_parameters() if n not in trainable}

        def state(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
            # Copies: otherwise a layer that writes to its buffers would let one record change the
            # gradient of another one, or the next client's results with the same model.
            return {**frozen, **state_to_write(model), **parameters}

        def loss_of_one(parameters: dict[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
            arguments = call_arguments(map_inputs(lambda part: part.unsqueeze(0), x))
            with same_masks():
                result = functional_call(model, state(parameters), *arguments)
            return loss(output_of(result), y.unsqueeze(0))

        def backward(parameters: dict[str, Tensor], x: Inputs, y: Tensor) -> None:
            values = {f"model.{name}": value for name, value in state(parameters).items()}
            with torch.enable_grad(), same_masks():
                functional_call(_Backward(model, loss), values, (x, y))

        self._backward = backward
        self._gradients: Callable[..., dict[str, Tensor]] = vmap(
            grad(loss_of_one),
            in_dims=(None, 0, 0),
            randomness="different",
            chunk_size=self._records_at_once,
        )

    def clipped_sum(
        self, theta: Tensor, inputs: Inputs, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        """See `GradientEngine`."""
        total = torch.zeros(self.layout.size, dtype=torch.float64, device=theta.device)
        if len(targets):
            self.add_rows(theta, inputs, targets, clip_norm, total, len(targets))
        return total

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """See `GradientEngine`."""
        total += self.clipped_sum(theta, inputs, targets, clip_norm)

    def batch_gradient(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
        """The gradient [p] of the mean loss of a batch, as SGD computes it."""
        gradients = self._by_backward(self.layout.unflatten(theta.detach()), inputs, targets)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _by_backward(
        self, parameters: dict[str, Tensor], inputs: Inputs, targets: Tensor
    ) -> list[Tensor]:
        """The gradient of each parameter; ``grad`` of the parameters is used."""
        leaves = [value.requires_grad_() for value in parameters.values()]
        self._backward(parameters, inputs, targets)
        return [torch.zeros_like(x) if x.grad is None else x.grad.to_dense() for x in leaves]

    def prepare(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> None:
        """Find out on public records whether `vmap` supports the model; see `RowEngine`."""
        self._by_name(self.layout.unflatten(theta), inputs, targets)
        self._prepared = True

    def passes(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        return list(self._by_name(self.layout.unflatten(theta), inputs, targets).values())

    def evidence(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        return self.passes(theta, inputs, targets)

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
        parameters, step = self.layout.unflatten(theta), self._records_at_once
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            by_name = self._by_name(parameters, select(inputs, part), targets[part])
            gradients = torch.cat(
                [by_name[name].reshape(len(targets[part]), -1) for name in self.layout.names], dim=1
            ).double()
            factors = clip_factors(gradients.square().sum(dim=1), clip_norm)
            factors[max(0, used - start) :] = 0.0
            if bool((factors == 0).any()):  # 0 * inf would be nan
                gradients = torch.where((factors > 0)[:, None], gradients, 0.0)
            total += factors @ gradients

    def _by_name(
        self, parameters: dict[str, Tensor], inputs: Inputs, targets: Tensor
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
        self, parameters: dict[str, Tensor], inputs: Inputs, targets: Tensor
    ) -> dict[str, Tensor]:
        """The same gradients by backpropagation, for operations that `vmap` does not support.

        Each record gets a copy of the parameters: ``Embedding(max_norm=...)`` writes to its own.
        """
        theta = torch.cat([value.detach().reshape(-1) for value in parameters.values()])
        rows = [
            self._by_backward(
                self.layout.unflatten(theta.clone()),
                map_inputs(partial(_only, row), inputs),
                targets[row : row + 1],
            )
            for row in range(len(targets))
        ]
        columns = zip(*rows, strict=True)
        return {n: torch.stack(column) for n, column in zip(parameters, columns, strict=True)}


def _only(row: int, part: Tensor) -> Tensor:
    return part[row].unsqueeze(0)


class _Backward(nn.Module):
    """Computes a loss and its gradients while `functional_call` has replaced the parameters.

    `torch.utils.checkpoint` runs parts of the model again in the backward pass.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, inputs: Inputs, targets: Tensor) -> None:
        """Add the gradients to ``grad`` of the parameters."""
        positional, named = call_arguments(inputs)
        loss = self._loss(output_of(self.model(*positional, **named)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
