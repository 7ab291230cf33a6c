"""The layers that the fast engine knows, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.convolution import Convolution
from noisewise.training.engine.layer import (
    Layer,
    LayerOptions,
    NotCoveredError,
    Run,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.padding import padded_linear
from noisewise.training.engine.pieces import Affine, Lookups, Outer, Piece

__all__ = ["layer_for"]


class _Linear:
    def __init__(self, module: nn.Linear, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._apply = padded_linear if options.padded else functional.linear

    def run(self, x: Tensor) -> Run:
        out = self._apply(x, self._weight.tensor, tensor_of(self._bias))
        return Run(x, out, self.gradients)

    def gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        weight, bias = self._weight.index, None if self._bias is None else self._bias.index
        if g.dim() == 2 and weight is not None:
            yield Affine(weight, bias, kept, g)
            return
        g = g.reshape(len(g), 1, -1, g.shape[-1])
        if weight is not None:
            yield Outer(weight, kept.reshape(len(g), 1, -1, kept.shape[-1]), g)
        yield from row_gradients(self._bias, lambda: g.sum(dim=(1, 2)))


class _ChannelNorm:
    """GroupNorm and InstanceNorm: gradients of the scale and shift of each channel."""

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values.get("weight"), values.get("bias")
        self._eps = float(module.eps)  # type: ignore[arg-type]
        self._groups = module.num_groups if isinstance(module, nn.GroupNorm) else None
        self._kind = type(module).__name__

    def _normal(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self._groups is not None:
            return functional.group_norm(x, self._groups, weight, bias, self._eps)
        return functional.instance_norm(x, weight=weight, bias=bias, eps=self._eps)

    def run(self, x: Tensor) -> Run:
        if self._groups is None and x.dim() < 3:
            raise NotCoveredError(f"{self._kind} gets an input without a batch dimension")
        out = self._normal(x, tensor_of(self._weight), tensor_of(self._bias))
        return Run(x, out, self.gradients)

    def gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        def over_positions(values: Tensor) -> Tensor:
            return values.flatten(2).sum(2) if values.dim() > 2 else values

        yield from row_gradients(self._bias, lambda: over_positions(g))
        yield from row_gradients(
            self._weight, lambda: over_positions(g * self._normal(kept, None, None))
        )


class _LayerNorm:
    def __init__(self, module: nn.LayerNorm, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values.get("weight"), values.get("bias")
        self._shape, self._eps = list(module.normalized_shape), module.eps

    def _normal(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, self._shape, weight, bias, self._eps)

    def run(self, x: Tensor) -> Run:
        if x.dim() <= len(self._shape):
            raise NotCoveredError("LayerNorm gets an input without a batch dimension")
        out = self._normal(x, tensor_of(self._weight), tensor_of(self._bias))
        return Run(x, out, self.gradients)

    def gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        def over_positions(values: Tensor) -> Tensor:
            inner = len(self._shape)
            return values.reshape(len(values), -1, values.shape[-inner:].numel()).sum(1)

        yield from row_gradients(self._bias, lambda: over_positions(g))
        yield from row_gradients(
            self._weight, lambda: over_positions(g * self._normal(kept, None, None))
        )


class _Embedding:
    def __init__(self, module: nn.Embedding, values: Values, options: LayerOptions) -> None:
        self._weight, self._padding = values["weight"], module.padding_idx

    def run(self, x: Tensor) -> Run:
        out = functional.embedding(x, self._weight.tensor, self._padding)
        return Run(x, out, self.gradients)

    def gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
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
        nn.Conv1d: _Rule(Convolution),
        nn.Conv2d: _Rule(Convolution),
        nn.GroupNorm: _Rule(_ChannelNorm),
        nn.InstanceNorm1d: _Rule(_ChannelNorm, _stateless),
        nn.InstanceNorm2d: _Rule(_ChannelNorm, _stateless),
        nn.InstanceNorm3d: _Rule(_ChannelNorm, _stateless),
        nn.LayerNorm: _Rule(_LayerNorm),
        nn.Embedding: _Rule(_Embedding, _plain_embedding),
    }
)


def layer_for(name: str, module: nn.Module, values: Values, options: LayerOptions) -> Layer:
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
    return rule.make(module, values, options)
