"""The layers that the fast engine knows: how each runs, and its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.convolution import weight_gradients
from noisewise.training.engine.patches import Geometry, Taps
from noisewise.training.engine.pieces import Affine, Lookups, Outer, Piece, Rows

__all__ = ["Layer", "NotCoveredError", "Value", "layer_for"]


class NotCoveredError(Exception):
    """The fast engine has no exact rule for this model; says why."""


@dataclass(frozen=True)
class Value:
    """A layer's parameter as the engine's copy of the model uses it.

    Attributes:
        tensor: its value; asks for gradients if it is trainable, so that the graph starts there.
        index: its number among the trainable parameters; None if it is frozen.
    """

    tensor: Tensor
    index: int | None


Values = Mapping[str, Value]
Gradients = Iterator[Piece]


class Layer(Protocol):
    """One layer of the private copy."""

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the rule keeps of the input, and the output; the records come first in both."""
        ...

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        """Per-sample gradients of its parameters for the gradient ``g`` at the output."""
        ...


def _tensor(value: Value | None) -> Tensor | None:
    return None if value is None else value.tensor


def _bias(value: Value | None, sums: Callable[[], Tensor]) -> Gradients:
    """The gradients of a bias, which are sums [b, n] of the output's."""
    if value is not None and value.index is not None:
        yield Rows(value.index, sums())


def _batched(x: Tensor, dimensions: int, kind: str) -> None:
    if x.dim() != dimensions:
        raise NotCoveredError(f"{kind} gets an input of {x.dim()} dimensions, not {dimensions}")


class _Linear:
    def __init__(self, module: nn.Linear, values: Values, channels_last: bool) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, functional.linear(x, self._weight.tensor, _tensor(self._bias))

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        weight, bias = self._weight.index, None if self._bias is None else self._bias.index
        if g.dim() == 2 and weight is not None:
            yield Affine(weight, bias, kept, g)
            return
        g = g.reshape(len(g), 1, -1, g.shape[-1])
        if weight is not None:
            yield Outer(weight, kept.reshape(len(g), 1, -1, kept.shape[-1]), g)
        yield from _bias(self._bias, lambda: g.sum(dim=(1, 2)))


class _Convolution:
    """Conv1d (as an image of height 1) and Conv2d."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d, values: Values, channels_last: bool) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._kind = type(module).__name__
        self._line = isinstance(module, nn.Conv1d)
        self._channels_last = channels_last and not self._line
        self._groups, self._mode = module.groups, module.padding_mode
        self._stride, self._dilation = self._pair(module.stride), self._pair(module.dilation)
        self._kernel = self._pair(module.kernel_size)
        left, right, *rest = module._reversed_padding_repeated_twice
        top, bottom = rest or (0, 0)
        # Zeros of equal width on both sides are left to the convolution; all else comes before it.
        native = self._mode == "zeros" and left == right and top == bottom
        self._pad = [] if native else [left, right, *rest]
        self._padding = (top, left) if native else (0, 0)
        self._geometries: dict[torch.Size, tuple[Geometry, Taps]] = {}

    def _pair(self, values: tuple[int, ...]) -> tuple[int, int]:
        return (1, values[0]) if self._line else (values[0], values[1])

    def _geometry(self, image: Tensor) -> tuple[Geometry, Taps]:
        """Geometry with the live taps of the kernel only, and which they are."""
        size = image.shape[2:]
        if size not in self._geometries:
            self._geometries[size] = Geometry(
                (size[0], size[1]), self._kernel, self._stride, self._dilation, self._padding,
                self._groups,
            ).cropped()  # fmt: skip
        return self._geometries[size]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _batched(x, 3 if self._line else 4, self._kind)
        if self._pad:
            mode = "constant" if self._mode == "zeros" else self._mode
            x = functional.pad(x, self._pad, mode=mode)
        weight = self._weight.tensor
        if self._line:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        if self._channels_last:
            x = x.to(memory_format=torch.channels_last)
        geometry, taps = self._geometry(x)
        if geometry.kernel != self._kernel:
            weight = weight[:, :, taps[0], taps[1]]
        out = functional.conv2d(
            x, weight, _tensor(self._bias), geometry.stride, geometry.padding, geometry.dilation,
            geometry.groups,
        )  # fmt: skip
        return x, out.squeeze(2) if self._line else out

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        g = g.unsqueeze(2) if self._line else g
        if self._weight.index is not None:
            geometry, taps = self._geometry(kept)
            index, weight = self._weight.index, self._weight.tensor
            shape = torch.Size([*weight.shape[:2], *self._kernel])
            yield weight_gradients(index, shape, kept, g, geometry, taps)
        yield from _bias(self._bias, lambda: g.sum(dim=(2, 3)))


class _ChannelNorm:
    """GroupNorm and InstanceNorm: gradients of the scale and shift of each channel."""

    def __init__(self, module: nn.Module, values: Values, channels_last: bool) -> None:
        self._weight, self._bias = values.get("weight"), values.get("bias")
        self._eps = float(module.eps)  # type: ignore[arg-type]
        self._groups = module.num_groups if isinstance(module, nn.GroupNorm) else None
        self._kind = type(module).__name__

    def _normal(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self._groups is not None:
            return functional.group_norm(x, self._groups, weight, bias, self._eps)
        return functional.instance_norm(x, weight=weight, bias=bias, eps=self._eps)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._groups is None and x.dim() < 3:
            raise NotCoveredError(f"{self._kind} gets an input without a batch dimension")
        return x, self._normal(x, _tensor(self._weight), _tensor(self._bias))

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        def over_positions(values: Tensor) -> Tensor:
            return values.flatten(2).sum(2) if values.dim() > 2 else values

        yield from _bias(self._bias, lambda: over_positions(g))
        yield from _bias(self._weight, lambda: over_positions(g * self._normal(kept, None, None)))


class _LayerNorm:
    def __init__(self, module: nn.LayerNorm, values: Values, channels_last: bool) -> None:
        self._weight, self._bias = values.get("weight"), values.get("bias")
        self._shape, self._eps = list(module.normalized_shape), module.eps

    def _normal(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, self._shape, weight, bias, self._eps)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() <= len(self._shape):
            raise NotCoveredError("LayerNorm gets an input without a batch dimension")
        return x, self._normal(x, _tensor(self._weight), _tensor(self._bias))

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        def over_positions(values: Tensor) -> Tensor:
            inner = len(self._shape)
            return values.reshape(len(values), -1, values.shape[-inner:].numel()).sum(1)

        yield from _bias(self._bias, lambda: over_positions(g))
        yield from _bias(self._weight, lambda: over_positions(g * self._normal(kept, None, None)))


class _Embedding:
    def __init__(self, module: nn.Embedding, values: Values, channels_last: bool) -> None:
        self._weight, self._padding = values["weight"], module.padding_idx

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, functional.embedding(x, self._weight.tensor, self._padding)

    def pieces(self, kept: Tensor, g: Tensor) -> Gradients:
        assert self._weight.index is not None
        tokens, g = kept.flatten(1) if kept.dim() > 1 else kept[:, None], g
        g = g.reshape(*tokens.shape, g.shape[-1])
        if self._padding is not None:
            g = g.masked_fill((tokens == self._padding)[..., None], 0.0)
        yield Lookups(self._weight.index, tokens, g, len(self._weight.tensor))


def _plain_embedding(module: nn.Module) -> bool:
    assert isinstance(module, nn.Embedding)
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _stateless(module: nn.Module) -> bool:
    return not module.track_running_stats


def _any(module: nn.Module) -> bool:
    return True


@dataclass(frozen=True)
class _Rule:
    """How a type of module becomes a layer, and which of its options the layer can do."""

    make: Callable[..., Layer]
    covers: Callable[[nn.Module], bool] = _any


_RULES: Mapping[type[nn.Module], _Rule] = MappingProxyType(
    {
        nn.Linear: _Rule(_Linear),
        nn.Conv1d: _Rule(_Convolution),
        nn.Conv2d: _Rule(_Convolution),
        nn.GroupNorm: _Rule(_ChannelNorm),
        nn.InstanceNorm1d: _Rule(_ChannelNorm, _stateless),
        nn.InstanceNorm2d: _Rule(_ChannelNorm, _stateless),
        nn.InstanceNorm3d: _Rule(_ChannelNorm, _stateless),
        nn.LayerNorm: _Rule(_LayerNorm),
        nn.Embedding: _Rule(_Embedding, _plain_embedding),
    }
)


def layer_for(name: str, module: nn.Module, values: Values, channels_last: bool) -> Layer:
    """The rule for a module with trainable parameters of its own.

    Subclasses and modules with extra parameters (weight normalisation, say) may compute anything,
    so only the very types of the table count.

    Raises:
        NotCoveredError: there is none.
    """
    rule = _RULES.get(type(module))
    if rule is None or set(values) - {"weight", "bias"}:
        raise NotCoveredError(f"layer '{name}' ({type(module).__name__}) has no rule")
    if not rule.covers(module):
        raise NotCoveredError(f"layer '{name}' ({module}) has options without a rule")
    return rule.make(module, values, channels_last)
