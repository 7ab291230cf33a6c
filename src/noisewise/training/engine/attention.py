"""The rule of `nn.MultiheadAttention`, which `nn.TransformerEncoderLayer` and others use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.layer_interface import (
    CompositeRule,
    LayerOptions,
    NotCoveredError,
    Recorder,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.pieces import Outer, Parts, Piece, Single

__all__ = ["Attention"]


class _Stacked:
    """Gradients of a matrix whose blocks of rows are used at different positions.

    Args:
        index: of the matrix.
        blocks: gradients of each block of rows, in order.
        sizes: number of values of each block.
    """

    def __init__(self, index: int, blocks: Sequence[Outer], sizes: Sequence[int]) -> None:
        self.indices = (index,)
        self._blocks, self._sizes = blocks, list(sizes)

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`."""
        total = self._blocks[0].squared_norms(floor)
        for block in self._blocks[1:]:
            total = total + block.squared_norms(floor)
        return total

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        rows = torch.split(parts[self.indices[0]], self._sizes)
        for block, part in zip(self._blocks, rows, strict=True):
            block.add_sum(factors, [part])

    def split(self) -> list[Single]:
        """See `Piece`."""
        return [self]

    def evidence(self) -> list[Tensor]:
        """See `Piece`."""
        return [tensor for block in self._blocks for tensor in block.evidence()]

    def rows(self) -> Tensor:
        """See `Single`."""
        return torch.cat([block.rows() for block in self._blocks], 1)


class Attention(CompositeRule):
    """Queries, keys and values of one width, without extra keys; the output layer is a layer."""

    def __init__(
        self, module: nn.MultiheadAttention, values: Values, options: LayerOptions
    ) -> None:
        self._module = module
        self._weight, self._bias = values["in_proj_weight"], values.get("in_proj_bias")

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """See `CompositeRule`."""
        assert isinstance(module, nn.MultiheadAttention)
        is_plain = module._qkv_same_embed_dim and module.bias_k is None and module.bias_v is None
        return is_plain and not module.add_zero_attn

    def call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """See `CompositeRule`; the arguments are those of `nn.MultiheadAttention`."""
        return self._run(recorder, *args, **kwargs)

    def _run(
        self,
        recorder: Recorder,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module, inputs = self._module, [query]
        inputs += [] if key is query and value is query else [key]
        inputs += [] if value is key else [value]
        if any(part.dim() != 3 or part.is_nested for part in inputs):
            raise NotCoveredError("MultiheadAttention receives an input without a batch dimension")
        if not module.batch_first:
            inputs = [part.transpose(0, 1) for part in inputs]
        if any(part.shape[0] != recorder.axes.records for part in inputs):
            raise NotCoveredError("the batch of MultiheadAttention is not the records")
        q, k, v = (self._heads(part) for part in self._projections(recorder, inputs))
        mask = self._mask(q, key_padding_mask, attn_mask)
        dropout = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = functional.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = module.out_proj(mixed.transpose(1, 2).flatten(2))
        return out if module.batch_first else out.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self._module.num_heads, -1).transpose(1, 2)

    def _mask(self, q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores [b, heads, L, S]."""
        parts = []
        for part in (mask, padding):
            if part is not None and part.dtype == torch.bool:
                part = torch.zeros_like(part, dtype=q.dtype).masked_fill_(part, -math.inf)
            parts.append(part)
        mask, padding = parts
        if mask is not None and mask.dim() == 3:  # [b * heads, L, S]
            mask = mask.view(q.shape[0], -1, *mask.shape[1:])
        if padding is None:
            return mask
        padding = padding[:, None, None, :]
        return padding if mask is None else mask + padding

    def _projections(self, recorder: Recorder, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Queries, keys and values, from one to three inputs, as one recorded product."""
        weight, bias = self._weight.tensor, tensor_of(self._bias)
        width = weight.shape[1]
        rows = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(inputs)]
        rows = [count * width for count in rows]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        outs = [
            functional.linear(x, block, shift)
            for x, block, shift in zip(inputs, torch.split(weight, rows), biases, strict=True)
        ]
        shapes = [out.shape[1:] for out in outs]
        flat = outs[0] if len(outs) == 1 else torch.cat([out.flatten(1) for out in outs], 1)

        def gradients(*kept_and_g: Tensor) -> Iterator[Piece]:
            *kept, g = kept_and_g
            parts = _unflattened(g.flatten(1), shapes)
            if self._weight.index is not None:
                blocks = [
                    Outer(self._weight.index if len(parts) == 1 else 0, x[:, None], part[:, None])
                    for x, part in zip(kept, parts, strict=True)
                ]
                sizes = [count * width for count in rows]
                yield blocks[0] if len(blocks) == 1 else _Stacked(self._weight.index, blocks, sizes)
            yield from row_gradients(
                self._bias, lambda: torch.cat([part.sum(1) for part in parts], 1)
            )

        out = recorder.record("MultiheadAttention", inputs, flat, gradients)
        parts = [out] if len(outs) == 1 else _unflattened(out, shapes)
        return [block for part in parts for block in torch.split(part, width, 2)]


def _unflattened(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = torch.split(flat, [shape.numel() for shape in shapes], 1)
    return [piece.reshape(len(flat), *shape) for piece, shape in zip(pieces, shapes, strict=True)]
