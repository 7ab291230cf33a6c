"""The rules of the fast engine: one class for each kind of layer, and the table of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.convolution import Convolution
from noisewise.training.engine.layer_interface import (
    LayerOptions,
    LayerRule,
    NotCoveredError,
    Run,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.padded_linear import padded_linear
from noisewise.training.engine.pieces import Affine, Lookups, Outer, Piece

__all__ = ["LAYER_RULES", "layer_for"]


class _Linear(LayerRule):
    def __init__(self, module: nn.Linear, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._apply = padded_linear if options.padded else functional.linear

    def run(self, x: Tensor) -> Run:
        out = self._apply(x, self._weight.tensor, tensor_of(self._bias))
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        weight, bias = self._weight.index, None if self._bias is None else self._bias.index
        if g.dim() == 2 and weight is not None:
            yield Affine(weight, bias, kept, g)
            return
        g = g.reshape(len(g), 1, -1, g.shape[-1])
        if weight is not None:
            yield Outer(weight, kept.reshape(len(g), 1, -1, kept.shape[-1]), g)
        yield from row_gradients(self._bias, lambda: g.sum(dim=(1, 2)))


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
        if x.dim() < self._fewest_dimensions:
            raise NotCoveredError(f"{self._kind} receives an input without a batch dimension")
        out = self._normalised(x, tensor_of(self._weight), tensor_of(self._bias))
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        yield from row_gradients(self._bias, lambda: self._over_positions(g))
        yield from row_gradients(
            self._weight, lambda: self._over_positions(g * self._normalised(kept, None, None))
        )


class _GroupNorm(_Norm):
    _fewest_dimensions = 2

    def __init__(self, module: nn.GroupNorm, values: Values, options: LayerOptions) -> None:
        super().__init__(module, values, options)
        self._groups, self._eps = module.num_groups, module.eps

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(x, self._groups, weight, bias, self._eps)


class _InstanceNorm(_Norm):
    _fewest_dimensions = 3

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None:
        super().__init__(module, values, options)
        self._eps = float(module.eps)  # type: ignore[arg-type]

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        return not module.track_running_stats

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.instance_norm(x, weight=weight, bias=bias, eps=self._eps)


class _LayerNorm(_Norm):
    def __init__(self, module: nn.LayerNorm, values: Values, options: LayerOptions) -> None:
        super().__init__(module, values, options)
        self._shape, self._eps = list(module.normalized_shape), module.eps
        self._fewest_dimensions = len(self._shape) + 1

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, self._shape, weight, bias, self._eps)

    def _over_positions(self, values: Tensor) -> Tensor:
        size = values.shape[-len(self._shape) :].numel()
        return values.reshape(len(values), -1, size).sum(1)


class _Embedding(LayerRule):
    def __init__(self, module: nn.Embedding, values: Values, options: LayerOptions) -> None:
        self._weight, self._padding = values["weight"], module.padding_idx

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        assert isinstance(module, nn.Embedding)
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

    def run(self, x: Tensor) -> Run:
        out = functional.embedding(x, self._weight.tensor, self._padding)
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        assert self._weight.index is not None
        tokens = kept.flatten(1) if kept.dim() > 1 else kept[:, None]
        g = g.reshape(*tokens.shape, g.shape[-1])
        if self._padding is not None:
            g = g.masked_fill((tokens == self._padding)[..., None], 0.0)
        yield Lookups(self._weight.index, tokens, g, len(self._weight.tensor))


LAYER_RULES: dict[type[nn.Module], type[LayerRule]] = {
    nn.Linear: _Linear,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.GroupNorm: _GroupNorm,
    nn.InstanceNorm1d: _InstanceNorm,
    nn.InstanceNorm2d: _InstanceNorm,
    nn.InstanceNorm3d: _InstanceNorm,
    nn.LayerNorm: _LayerNorm,
    nn.Embedding: _Embedding,
}
"""The rule of each type of layer. Subclasses of these types are not covered."""


def layer_for(name: str, module: nn.Module, values: Values, options: LayerOptions) -> LayerRule:
    """The rule for a module with trainable parameters of its own.

    Subclasses and modules with extra parameters (weight normalisation, for example) may compute
    anything, so only the exact types of the table with the parameters of their rule are covered.

    Args:
        name: of the module in the model, for the error.
        module: the layer.
        values: its parameters by name.
        options: how layers lay out their memory.

    Raises:
        NotCoveredError: there is no rule for the module or its options.
    """
    rule = LAYER_RULES.get(type(module))
    if rule is None or set(values) - rule.parameters:
        raise NotCoveredError(f"layer '{name}' ({type(module).__name__}) has no rule")
    if not rule.covers(module):
        raise NotCoveredError(f"layer '{name}' ({module}) has options without a rule")
    return rule(module, values, options)
