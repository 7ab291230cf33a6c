"""`LayerRule`, the interface of layer rules, and the types that rules use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from noisewise.training.engine.pieces import Piece, Rows

if TYPE_CHECKING:
    from noisewise.training.engine.record_axes import RecordAxes, RecordAxis
    from noisewise.training.engine.shared_values import Root

__all__ = [
    "CompositeRule",
    "Gradients",
    "LayerOptions",
    "LayerRule",
    "Method",
    "NotCoveredError",
    "Recorder",
    "Run",
    "Value",
    "Values",
    "row_gradients",
    "tensor_of",
]


class NotCoveredError(Exception):
    """The layer rules do not cover a model; the message has the reason.

    Args:
        reason: why.
        layer: name of the layer that causes it; None if it is not known.
    """

    def __init__(self, reason: str, layer: str | None = None) -> None:
        super().__init__(reason)
        self.layer = layer


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

Gradients = Callable[..., Iterator[Piece]]
"""(*kept inputs, gradient at the output) -> per-record gradients of the layer's parameters."""


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

    required: ClassVar[frozenset[str]] = frozenset({"weight"})
    """Names of the parameters that a module must have."""

    anywhere: ClassVar[bool] = False
    """Whether the rule works with more axes between the records and the last ones. Then the records
    need not be first in the layer's input."""

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None: ...

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """Whether the rule is exact for the module's options."""
        return True

    def run(self, x: Tensor) -> Run:
        """The layer's output, and how to compute the gradients of its parameters from there."""
        ...


@dataclass
class Method:
    """How `torch.func` differentiates a function; chosen on public records in a deployment.

    Attributes:
        one_by_one: whether `vmap` does not support it, so that each record is computed separately.
        is_fixed: whether the choice is final.
    """

    one_by_one: bool = False
    is_fixed: bool = False


class Recorder(Protocol):
    """What composite rules and functions of parameters need of the network."""

    axes: RecordAxes

    def record(
        self,
        name: str,
        kept: Sequence[Tensor],
        out: Tensor,
        gradients: Gradients,
        axes: tuple[Sequence[RecordAxis], RecordAxis] = ...,
    ) -> Tensor:
        """Record one use of parameters, whose gradients are computed at ``out``.

        Args:
            name: of the layer or function.
            kept: what the gradients need, with records.
            out: the output with a graph, in which no gradient of a parameter is needed.
            gradients: computes per-record gradients from ``kept`` and the gradient at ``out``.
            axes: of the records in each tensor of ``kept`` and in ``out``; first by default.

        Returns:
            The tensor to continue with.
        """
        ...

    def shared(self, value: Tensor, roots: tuple[Root, ...]) -> Tensor:
        """Wrap a value that depends on parameters alone."""
        ...

    def method(self, name: str) -> Method:
        """The method for the next use, which has this name; the same one in every pass."""
        ...


class CompositeRule:
    """A rule for a layer with several inputs, outputs or steps, such as an LSTM.

    Args:
        module: the layer; gives its options.
        values: its parameters by name.
        options: how layers lay out their memory.
    """

    def __init__(self, module: nn.Module, values: Values, options: LayerOptions) -> None: ...

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """Whether the rule is exact for the module's options and parameters."""
        return True

    def call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and record every use of its parameters."""
        raise NotImplementedError


def tensor_of(value: Value | None) -> Tensor | None:
    """The tensor of a parameter; None if the layer does not have it."""
    return None if value is None else value.tensor


def row_gradients(value: Value | None, rows: Callable[[], Tensor]) -> Iterator[Piece]:
    """The gradients [b, n] of a parameter; nothing if it is frozen or missing in the layer."""
    if value is not None and value.index is not None:
        yield Rows(value.index, rows())
