"""The rules of normalisations: of groups, instances, layers and by the root mean square."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.layer_interface import (
    LayerOptions,
    LayerRule,
    NotCoveredError,
    Run,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.pieces import Piece

__all__ = ["GroupNormRule", "InstanceNormRule", "LayerNormRule", "RmsNormRule"]


class _Norm(LayerRule):
    """A normalisation of each single record, followed by a scale and a shift."""

    _fewest_dimensions: int  # of the input, with the records first

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values.get("weight"), values.get("bias")
        self._kind = type(module).__name__

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _over_positions(self, values: Tensor) -> Tensor:
        """Sum over the positions that share a scale and a shift: [b, channels, ...] -> [b, n]."""
        return values.flatten(2).sum(2) if values.dim() > 2 else values

    def run(self, x: Tensor) -> Run:
        """See `LayerRule`."""
        if x.dim() < self._fewest_dimensions:
            raise NotCoveredError(f"{self._kind} receives an input without a batch dimension")
        out = self._normalised(x, tensor_of(self._weight), tensor_of(self._bias))
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        yield from row_gradients(self._bias, lambda: self._over_positions(g))
        yield from row_gradients(
            self._weight, lambda: self._over_positions(g * self._normalised(kept, None, None))
        )


class GroupNormRule(_Norm):
    """GroupNorm: normalises groups of channels."""

    _fewest_dimensions = 2

    def __init__(self, module: nn.GroupNorm, values: Values, options: LayerOptions) -> None:
        super().__init__(module, values, options)
        self._groups, self._eps = module.num_groups, module.eps

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(x, self._groups, weight, bias, self._eps)


class InstanceNormRule(_Norm):
    """InstanceNorm: normalises each channel."""

    _fewest_dimensions = 3

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None:
        super().__init__(module, values, options)
        self._eps = float(module.eps)  # type: ignore[arg-type]

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """See `LayerRule`."""
        return not module.track_running_stats

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.instance_norm(x, weight=weight, bias=bias, eps=self._eps)


class _LastAxesNorm(_Norm):
    anywhere = True

    def __init__(
        self, module: nn.LayerNorm | nn.RMSNorm, values: Values, options: LayerOptions
    ) -> None:
        super().__init__(module, values, options)
        self._shape, self._eps = list(module.normalized_shape), module.eps
        self._fewest_dimensions = len(self._shape) + 1

    def _over_positions(self, values: Tensor) -> Tensor:
        size = values.shape[-len(self._shape) :].numel()
        return values.reshape(len(values), -1, size).sum(1)


class LayerNormRule(_LastAxesNorm):
    """LayerNorm: normalises the last axes."""

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, self._shape, weight, bias, self._eps or 0.0)


class RmsNormRule(_LastAxesNorm):
    """RMSNorm: divides the last axes by their root mean square."""

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.rms_norm(x, self._shape, weight, self._eps)
