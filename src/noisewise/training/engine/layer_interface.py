"""`LayerRule`, the interface of layer rules, and the types that rules use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from noisewise.training.engine.pieces import Piece, Rows

__all__ = [
    "Gradients",
    "LayerOptions",
    "LayerRule",
    "NotCoveredError",
    "Run",
    "Value",
    "Values",
    "row_gradients",
    "tensor_of",
]


class NotCoveredError(Exception):
    """The layer rules do not cover a model; the message has the reason."""


@dataclass(frozen=True)
class Value:
    """A layer's parameter as the engine's copy of the model uses it.

    Attributes:
        tensor: its value; requires a gradient if the parameter is trainable.
        index: its number among the trainable parameters; None if the parameter is frozen.
    """

    tensor: Tensor
    index: int | None


Values = Mapping[str, Value]
"""A layer's parameters by name."""

Gradients = Callable[[Tensor, Tensor], Iterator[Piece]]
"""(kept input, gradient at the output) -> per-record gradients of the layer's parameters."""


class Run(NamedTuple):
    """The result of one call of a layer.

    Attributes:
        kept: [b, ...] the input, or what the gradients need of it.
        out: [b, ...] the output.
        gradients: computes the gradients from ``kept`` and the gradient at the output.
    """

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


class LayerRule(Protocol):
    """How the engine's copy runs a type of layer and computes its per-record gradients.

    A rule is a subclass with `run`, and an entry in `noisewise.training.engine.layer_rules`.

    Args:
        module: the layer; gives its options.
        values: its parameters by name.
        options: how layers lay out their memory.
    """

    parameters: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})
    """Names of the parameters that the rule covers; a module with others is not covered."""

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None: ...

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """Whether the rule is exact for the module's options."""
        return True

    def run(self, x: Tensor) -> Run:
        """The layer's output, and how to compute the gradients of its parameters from there."""
        ...


def tensor_of(value: Value | None) -> Tensor | None:
    """The tensor of a parameter; None if the layer does not have it."""
    return None if value is None else value.tensor


def row_gradients(value: Value | None, rows: Callable[[], Tensor]) -> Iterator[Piece]:
    """The gradients [b, n] of a parameter; nothing if it is frozen or missing in the layer."""
    if value is not None and value.index is not None:
        yield Rows(value.index, rows())
