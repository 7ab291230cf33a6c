"""What a layer of the engine's private copy is: it runs, and knows its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from noisewise.training.engine.pieces import Piece, Rows

__all__ = [
    "Gradients",
    "Layer",
    "LayerOptions",
    "NotCoveredError",
    "Run",
    "Value",
    "Values",
    "row_gradients",
    "tensor_of",
]


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
"""A layer's parameters by name."""

Gradients = Callable[[Tensor, Tensor], Iterator[Piece]]
"""(what was kept of the input, gradient at the output) -> per-sample gradients."""


class Run(NamedTuple):
    """One call of a layer; the records come first in both tensors."""

    kept: Tensor
    out: Tensor
    gradients: Gradients


@dataclass(frozen=True)
class LayerOptions:
    """How layers lay out their memory.

    Attributes:
        channels_last: whether convolutions work in that layout.
        padded: whether linear layers pad their matrices (see `padding`).
    """

    channels_last: bool = True
    padded: bool = False


class Layer(Protocol):
    """One layer of the private copy."""

    def run(self, x: Tensor) -> Run:
        """The layer's output, and how to get the gradients of its parameters from there."""
        ...


def tensor_of(value: Value | None) -> Tensor | None:
    """The tensor of a parameter that a layer may not have."""
    return None if value is None else value.tensor


def row_gradients(value: Value | None, rows: Callable[[], Tensor]) -> Iterator[Piece]:
    """The gradients [b, n] of a parameter that a layer may not have, or that may be frozen."""
    if value is not None and value.index is not None:
        yield Rows(value.index, rows())
