"""`SharedValue`: a tensor that a model computes from its parameters alone, before it meets records.

Class tokens, position tables, layer scales and normalised weights are such tensors. Where one meets
records, the gradient at that point is computed for each record: an element-wise operation uses one
copy of the value for each record (`one_for_each`), a matrix product gives an outer product, and any
other function of torch is differentiated for each record by `torch.func`. A second step takes these
gradients back to the parameters (`Roots.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noisewise.training.engine.cleared_rows import without_cleared
from noisewise.training.engine.pieces import Piece, Rows

__all__ = ["Combine", "Root", "Roots", "SharedValue", "parameter_root", "values_of"]


@dataclass(frozen=True, eq=False)
class Root:
    """A tensor whose per-record gradients are known as pieces: a parameter or a layer's output.

    Attributes:
        tensor: the value.
        pieces: gradients [b, *tensor.shape] -> per-record gradients of parameters.
        index: the number of the parameter; None for a layer's output.
        name: of the parameter or layer.
    """

    tensor: Tensor
    pieces: Callable[[Tensor], Iterable[Piece]]
    index: int | None = None
    name: str = "a parameter"


def parameter_root(parameter: Tensor, index: int, name: str = "a parameter") -> Root:
    """The root of a parameter."""
    return Root(parameter, lambda g: [Rows(index, g.reshape(len(g), -1))], index, name)


@dataclass(frozen=True)
class Roots:
    """Where a shared value comes from.

    Attributes:
        value: the plain tensor, with a graph back to the roots.
        roots: the parameters and layers that it is computed from.
    """

    value: Tensor
    roots: tuple[Root, ...]

    @property
    def parameter(self) -> int | None:
        """The number of the parameter that the value is, unchanged."""
        is_root = len(self.roots) == 1 and self.roots[0].tensor is self.value
        return self.roots[0].index if is_root else None

    def pieces(self, gradients: Tensor) -> Iterator[Piece]:
        """Per-record gradients of the parameters, from those of the value [b, *value.shape]."""
        if len(self.roots) == 1 and self.roots[0].tensor is self.value:
            yield from self.roots[0].pieces(gradients)
            return
        for root, gradient in zip(self.roots, self._back(gradients), strict=True):
            if gradient is not None:
                yield from root.pieces(without_cleared(gradient))

    def _back(self, gradients: Tensor) -> list[Tensor | None]:
        """Gradients at the roots; which way is taken depends on the parameters' graph alone."""
        roots = [root.tensor for root in self.roots]
        back = partial(torch.autograd.grad, self.value, roots, retain_graph=True, allow_unused=True)
        gradients = gradients.to(self.value.dtype)
        try:
            return list(back(gradients, is_grads_batched=True))
        except RuntimeError:
            rows = [back(row) for row in gradients]
            return [
                None if parts[0] is None else torch.stack(parts)
                for parts in zip(*rows, strict=True)
            ]


Combine = Callable[[Callable[..., Any], Any, Any], Any]


class SharedValue(Tensor):
    """A tensor that passes every torch function that reads it to the network."""

    _origin: Roots
    _combine: Combine

    @staticmethod
    def of(value: Tensor, roots: tuple[Root, ...], combine: Combine) -> SharedValue:
        """Wrap a plain tensor.

        A use that torch does not report, such as a custom `autograd.Function`, sends its gradient
        to the parameter itself, which the network detects.
        """
        shared = value.as_subclass(SharedValue)
        shared._origin, shared._combine = Roots(value, roots), combine
        return shared

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(iter(values_of((args, kwargs))))
        return first._combine(func, args, kwargs)

    def __deepcopy__(self, memo: object) -> SharedValue:
        return self


def values_of(tree: Any) -> Iterator[SharedValue]:
    """All shared values in nested arguments."""
    if isinstance(tree, SharedValue):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from values_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from values_of(value)
