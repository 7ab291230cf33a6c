"""The rules of linear layers and embeddings, and the table of all rules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.errors import InvalidValueError
from noisewise.training.engine.attention import Attention
from noisewise.training.engine.convolution import Convolution
from noisewise.training.engine.layer_interface import (
    CompositeRule,
    LayerOptions,
    LayerRule,
    NotCoveredError,
    Run,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.norm_rules import (
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RmsNormRule,
)
from noisewise.training.engine.padded_linear import padded_linear
from noisewise.training.engine.pieces import Affine, Lookups, Outer, Piece
from noisewise.training.engine.recurrent import Recurrent, RecurrentCell
from noisewise.training.engine.volume_convolution import Conv3d, TransposedConvolution

__all__ = ["LAYER_RULES", "RULES_BY_NAME", "layer_for", "register_layer_rule", "rule_for"]

AnyRule = type[LayerRule] | type[CompositeRule]


class _Linear(LayerRule):
    anywhere = True

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


class _InputFirstLinear(LayerRule):
    """Hugging Face's ``Conv1D``: a linear layer whose weight is [inputs, outputs]."""

    anywhere = True

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")

    def run(self, x: Tensor) -> Run:
        out = functional.linear(x, self._weight.tensor.t(), tensor_of(self._bias))
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        g = g.reshape(len(g), 1, -1, g.shape[-1])
        if self._weight.index is not None:
            yield Outer(self._weight.index, g, kept.reshape(len(g), 1, -1, kept.shape[-1]))
        yield from row_gradients(self._bias, lambda: g.sum(dim=(1, 2)))


class _Embedding(LayerRule):
    anywhere = True

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


class _EmbeddingBag(LayerRule):
    """Sums and means of embeddings; all bags are rows of one tensor [b, T]."""

    def __init__(self, module: nn.EmbeddingBag, values: Values, options: LayerOptions) -> None:
        self._weight, self._padding, self._mode = values["weight"], module.padding_idx, module.mode

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        assert isinstance(module, nn.EmbeddingBag)
        is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return is_plain and module.mode in ("sum", "mean")

    def run(self, x: Tensor) -> Run:
        if x.dim() != 2:
            raise NotCoveredError("EmbeddingBag receives bags that are not rows of one tensor")
        out = functional.embedding_bag(
            x, self._weight.tensor, mode=self._mode, padding_idx=self._padding
        )
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        assert self._weight.index is not None
        used = torch.ones_like(kept) if self._padding is None else (kept != self._padding).long()
        if self._mode == "mean":
            g = g / used.sum(1, keepdim=True).clamp(min=1)
        yield Lookups(
            self._weight.index, kept, g[:, None] * used[..., None], len(self._weight.tensor)
        )


LAYER_RULES: dict[type[nn.Module], AnyRule] = {
    nn.Linear: _Linear,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: TransposedConvolution,
    nn.ConvTranspose2d: TransposedConvolution,
    nn.ConvTranspose3d: TransposedConvolution,
    nn.GroupNorm: GroupNormRule,
    nn.InstanceNorm1d: InstanceNormRule,
    nn.InstanceNorm2d: InstanceNormRule,
    nn.InstanceNorm3d: InstanceNormRule,
    nn.LayerNorm: LayerNormRule,
    nn.RMSNorm: RmsNormRule,
    nn.Embedding: _Embedding,
    nn.EmbeddingBag: _EmbeddingBag,
    nn.MultiheadAttention: Attention,
    nn.LSTM: Recurrent,
    nn.GRU: Recurrent,
    nn.RNN: Recurrent,
    nn.LSTMCell: RecurrentCell,
    nn.GRUCell: RecurrentCell,
    nn.RNNCell: RecurrentCell,
}
"""The rule of each type of layer."""

RULES_BY_NAME: dict[str, AnyRule] = {"transformers.pytorch_utils.Conv1D": _InputFirstLinear}
"""Rules of layers from packages that are not imported here."""


def register_layer_rule(kind: type[nn.Module], rule: AnyRule) -> None:
    """Add a rule for a type of layer, or replace it.

    An engine compares its outputs, gradients and norms with backpropagation on two synthetic
    records, and does not use it if they differ. It is trusted beyond that: a rule that is wrong for
    few records breaks the privacy guarantee. Compare it with one backward pass for each record, as
    docs/models.md shows, before you train with it.

    Args:
        kind: of the layers.
        rule: a subclass of `LayerRule` (one tensor in, one tensor out) or `CompositeRule`.

    Raises:
        InvalidValueError: an argument is of another type.

    Example:
        A layer that works like `torch.nn.Linear`, with a rule of its own:

            class ScaledRule(LayerRule):
                ...  # __init__ and run, as in docs/models.md

            register_layer_rule(Scaled, ScaledRule)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InvalidValueError("kind", kind, "must be a subclass of torch.nn.Module")
    is_rule = isinstance(rule, type) and (hasattr(rule, "run") or issubclass(rule, CompositeRule))
    if not is_rule:
        raise InvalidValueError("rule", rule, "must be a subclass of LayerRule or CompositeRule")
    LAYER_RULES[kind] = rule


def rule_for(module: nn.Module) -> AnyRule | None:
    """The rule for a module, by its type, or by the type whose ``forward`` it inherits.

    Modules with extra parameters (weight normalisation, for example) may compute anything, so only
    modules with exactly the parameters of their rule are covered. A subclass is covered if it
    replaces neither ``forward`` nor an attribute of a parameter's name. A module with a ``forward``
    of its own, set on the object, is not covered.
    """
    if "forward" in vars(module):
        return None
    names = {key for key, value in module._parameters.items() if value is not None}
    for kind in type(module).__mro__:
        rule = LAYER_RULES.get(kind) or RULES_BY_NAME.get(f"{kind.__module__}.{kind.__name__}")
        if rule is None:
            if any(name in vars(kind) for name in ("forward", "__call__", "__getattr__", *names)):
                return None
            continue
        is_known = issubclass(rule, CompositeRule) or rule.required <= names <= rule.parameters
        return rule if is_known and rule.covers(module) else None
    return None


def layer_for(
    module: nn.Module, values: Values, options: LayerOptions
) -> LayerRule | CompositeRule | None:
    """The rule for a module with trainable parameters of its own; None if it has none.

    Args:
        module: the layer.
        values: its parameters by name.
        options: how layers lay out their memory.
    """
    rule = rule_for(module)
    return None if rule is None else rule(module, values, options)
