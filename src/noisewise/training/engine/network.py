"""`Network`: the engine's copy of a model, which records the inputs of its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisewise.training.engine.cleared_rows import without_rows
from noisewise.training.engine.layer_interface import (
    CompositeRule,
    Gradients,
    LayerOptions,
    LayerRule,
    Method,
    NotCoveredError,
    Value,
    Values,
)
from noisewise.training.engine.layer_rules import layer_for
from noisewise.training.engine.pieces import Piece
from noisewise.training.engine.record_axes import FIRST, RecordAxes, RecordAxis, arranged
from noisewise.training.engine.reference_layer import ReferenceLayer
from noisewise.training.engine.rewrites import pool_before_relu
from noisewise.training.engine.shared_functions import combine
from noisewise.training.engine.shared_values import (
    Combine,
    Root,
    SharedValue,
    parameter_root,
    values_of,
)
from noisewise.training.inputs import Inputs, call_arguments, count_records, form_of, output_of
from noisewise.training.parameters import ParameterLayout
from noisewise.training.transformers_masks import same_masks

__all__ = ["Network", "Use"]


class Use(NamedTuple):
    """One use of parameters in one pass of the model: a call of a layer, or of a function.

    Attributes:
        name: of the layer or function.
        kept: its inputs, as the gradients need them.
        gradients: computes the gradients of the parameters.
        versions: of ``kept`` when they were recorded.
        edge: of the output in the graph.
        is_first: whether the input needs no gradient.
        axes: of the records in ``kept`` and in the output.
    """

    name: str
    kept: tuple[Tensor, ...]
    gradients: Gradients
    versions: tuple[int, ...]
    edge: GradientEdge
    is_first: bool
    axes: tuple[Sequence[RecordAxis], RecordAxis]

    def pieces(self, g: Tensor) -> Iterator[Piece]:
        """Per-record gradients of the parameters, from the gradient at the output."""
        return self.gradients(*self.kept, g)

    def without(self, records: Tensor) -> Use:
        """The same use with zeros for the given records."""
        return self._replace(kept=tuple(without_rows(part, records) for part in self.kept))

    def arranged(self, records: int, g: Tensor) -> tuple[Use, Tensor]:
        """The use and the gradient at its output with the records first.

        Raises:
            NotCoveredError: the records are not where they should be, or an input was changed.
        """
        if tuple(part._version for part in self.kept) != self.versions:
            raise NotCoveredError(f"the input of layer '{self.name}' was changed in place")
        use, (inside, outside) = self, self.axes
        if outside != FIRST or any(axis != FIRST for axis in inside):
            pairs = zip(self.kept, inside, strict=True)
            kept = tuple(arranged(part, axis, records) for part, axis in pairs)
            use, g = self._replace(kept=kept), arranged(g, outside, records)
        if any(part.shape[:1] != (records,) for part in (*use.kept, g)):
            raise NotCoveredError(
                f"the input of layer '{self.name}' does not have the {records} records first"
            )
        return use, g


class Network:
    """A copy of a model whose trainable parameters are views of one vector.

    Each layer with a rule runs on aliases of the copy's parameters. So a gradient at a parameter
    itself shows that the model uses the parameter outside of its layer, where the rule does not
    apply.

    Args:
        model: its current structure, buffers and mode are copied.
        layout: the order of the trainable parameters.
        like: a vector with the dtype and device to use.
        options: of the layers.
        by_reference: names of the submodules that run as `ReferenceLayer`.

    Attributes:
        without_rule: names of the layers without a rule.
        own_rules: names of the layers with a rule that is not one of this package.

    Raises:
        NotCoveredError: the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ParameterLayout,
        like: Tensor,
        options: LayerOptions,
        by_reference: Collection[str] = (),
    ) -> None:
        self.dtype, self.device = like.dtype, like.device
        self._layout = layout
        try:
            self._module = copy.deepcopy(model)
        except Exception as error:
            raise NotCoveredError(f"the model cannot be copied ({error})") from error
        pool_before_relu(self._module)
        self._flat = torch.zeros(layout.size, dtype=like.dtype, device=like.device)
        own = dict(self._module.named_parameters())
        self._own = [own[name] for name in layout.names]
        self.aliases: list[Tensor] = []
        index: dict[int, int] = {}
        for number, (parameter, view) in enumerate(
            zip(self._own, layout.unflatten(self._flat).values(), strict=True)
        ):
            parameter.data, parameter.grad = view, None
            self.aliases.append(view.detach().requires_grad_())
            index[id(parameter)] = number
        self._own_edges = [get_gradient_edge(parameter) for parameter in self._own]
        self._buffers = [
            (module._buffers, key, buffer, buffer._version)
            for module in self._module.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.uses: list[Use] = []
        self.axes = RecordAxes()
        self.has_cuts = False
        self._running = ""  # name of the layer with a rule that runs now
        self._methods: dict[tuple[int, str], Method] = {}
        self.without_rule: list[str] = []
        self.own_rules: list[str] = []
        self._combine: Combine = self._combined
        for name in by_reference:
            self._refer(name, index)
        for name, module in self._module.named_modules():
            if any(name == whole or name.startswith(whole + ".") for whole in by_reference):
                continue
            values = {
                key: Value(self.aliases[index[id(p)]], index[id(p)])
                if p.requires_grad
                else Value(p.detach(), None)
                for key, p in module._parameters.items()
                if p is not None
            }
            if any(value.index is not None for value in values.values()):
                self._prepare(name, module, values, options, index)

    def _combined(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return combine(self, func, args, kwargs)
        except NotCoveredError as error:
            roots = [root for value in values_of((args, kwargs)) for root in value._origin.roots]
            names = [self._layout.names[root.index] for root in roots if root.index is not None]
            if error.layer is None and names:
                error.layer = names[0].rpartition(".")[0]
            raise

    def _refer(self, name: str, index: dict[int, int]) -> None:
        """Let a submodule run by `ReferenceLayer`."""
        module = self._module.get_submodule(name)
        plain = copy.deepcopy(module).requires_grad_(False)
        own = dict(module.named_parameters())
        for key, parameter in plain.named_parameters():  # torch's checkpoints read them later
            parameter.data = own[key].detach()
        values = {
            key: Value(self.aliases[index[id(p)]], index[id(p)])
            if p.requires_grad
            else Value(p.detach(), None)
            for key, p in module.named_parameters()
        }
        layer = ReferenceLayer(name, plain, values)
        module.__dict__["forward"] = self._named(name, partial(layer.call, self))

    def _prepare(
        self,
        name: str,
        module: nn.Module,
        values: Values,
        options: LayerOptions,
        index: dict[int, int],
    ) -> None:
        """Let a module run by its rule; what else reads its parameters gets shared values."""
        layer = layer_for(module, values, options)
        if layer is None:
            self.without_rule.append(name)
        else:
            module.__dict__["forward"] = self._recorded(name, layer)
            if not type(layer).__module__.startswith("noisewise."):
                self.own_rules.append(name)
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                number = index[id(parameter)]
                root = parameter_root(parameter, number, self._layout.names[number])
                with torch.enable_grad():
                    module.__dict__[key] = self.shared(parameter, (root,))

    def _recorded(self, name: str, layer: LayerRule | CompositeRule) -> Callable[..., Any]:
        if isinstance(layer, CompositeRule):
            return self._named(name, partial(layer.call, self))
        axes_of, add = self.axes.of, self._add

        def forward(input: Tensor, *more: object, **named: object) -> Tensor:
            if more or any(value is not None for value in named.values()):
                raise NotCoveredError(f"layer '{name}' is called with more arguments")
            if isinstance(input, SharedValue):
                origin = input._origin
                return self._of_parameters(name, layer, origin.value, origin.roots)
            [axis] = axes_of(name, (input.shape,))
            if axis is None:
                if input.requires_grad:
                    raise NotCoveredError(f"the records are not in the input of layer '{name}'")
                return self._of_parameters(name, layer, input, ())
            if axis != FIRST and not layer.anywhere:
                raise NotCoveredError(f"the records are not first in the input of layer '{name}'")
            kept, out, gradients = layer.run(input)
            is_first = not input.requires_grad
            return add(name, (kept,), out, gradients, ((axis,), axis), is_first)

        return self._named(name, forward)

    def _named(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the layer's name in what it raises."""

        def named(*args: Any, **kwargs: Any) -> Any:
            outer, self._running = self._running, name
            try:
                return forward(*args, **kwargs)
            except NotCoveredError as error:
                error.layer = error.layer or name
                raise
            finally:
                self._running = outer

        return named

    def _of_parameters(
        self, name: str, layer: LayerRule, x: Tensor, roots: tuple[Root, ...]
    ) -> Tensor:
        """Run a layer on an input without records, such as position numbers."""
        if not layer.anywhere:
            raise NotCoveredError(f"the input of layer '{name}' does not depend on the records")
        kept, out, gradients = layer.run(x)

        def pieces(g: Tensor) -> Iterator[Piece]:
            return gradients(kept.expand(len(g), *kept.shape), g)

        return self.shared(out, (*roots, Root(out, pieces, name=name)))

    def shared(self, value: Tensor, roots: tuple[Root, ...]) -> Tensor:
        """See `Recorder`."""
        return SharedValue.of(value, roots, self._combine)

    def method(self, name: str) -> Method:
        """See `Recorder`."""
        return self._methods.setdefault((len(self.uses), name), Method())

    def fix_methods(self) -> None:
        """Make the methods that were chosen so far final."""
        for method in self._methods.values():
            method.is_fixed = True

    def record(
        self,
        name: str,
        kept: Sequence[Tensor],
        out: Tensor,
        gradients: Gradients,
        axes: tuple[Sequence[RecordAxis], RecordAxis] | None = None,
    ) -> Tensor:
        """See `Recorder`."""
        self.has_cuts = True
        name = self._running or name
        axes = axes or ([FIRST] * len(kept), FIRST)
        return self._add(name, tuple(kept), out, gradients, axes, False)

    def _add(
        self,
        name: str,
        kept: tuple[Tensor, ...],
        out: Tensor,
        gradients: Gradients,
        axes: tuple[Sequence[RecordAxis], RecordAxis],
        is_first: bool,
    ) -> Tensor:
        if out._is_view():  # an in-place change of a view would move its edge
            out = out.clone()
        node = out.grad_fn
        if node is not None:
            edge = GradientEdge(node, out.output_nr)
            versions = tuple([part._version for part in kept])
            self.uses.append(Use(name, kept, gradients, versions, edge, is_first, axes))
        return out

    def load(self, theta: Tensor) -> None:
        """Set the trainable parameters to ``theta`` [p]."""
        if theta.shape != self._flat.shape:
            self._layout.unflatten(theta)  # raises the error that names the shapes
        self._flat.copy_(theta)

    @torch.no_grad()
    def randomise(self) -> None:
        """Set the parameters to random values of the usual scale, drawn by torch's generator."""
        for alias in self.aliases:
            fan_in = alias[0].numel() if alias.dim() > 1 else 1
            alias.normal_(std=fan_in**-0.5)

    def __call__(self, inputs: Inputs) -> Tensor:
        """The model's outputs [b, ...] with a graph; replaces the recorded uses of layers."""
        self.uses.clear()
        self.axes.start(form_of(inputs), count_records(inputs))
        positional, named = call_arguments(inputs)
        with torch.enable_grad(), same_masks():
            outputs = output_of(self._module(*positional, **named))
        if isinstance(outputs, SharedValue):
            raise NotCoveredError("the model's output does not depend on the records")
        if outputs.shape[:1] != (count_records(inputs),):
            raise NotCoveredError("the model's output does not have the records first")
        for owner, key, buffer, version in self._buffers:
            if owner[key] is not buffer or buffer._version != version:
                raise NotCoveredError(f"the model writes to its buffer '{key}'")
        return outputs

    def output_gradients(self, outputs: Tensor, weights: Tensor) -> list[tuple[Use, Tensor]]:
        """The gradient at the output of every layer that was used.

        Args:
            outputs: [b, ...] of the last call.
            weights: gradient at the outputs.

        Raises:
            NotCoveredError: an input does not have the records first, or a parameter is used
                outside of its layer.
        """
        uses = list(self.uses)
        self.uses.clear()
        if not outputs.requires_grad:
            return []
        if len(uses) == 1 and uses[0].is_first and uses[0].edge.node is outputs.grad_fn:
            reached = [(uses[0], weights)]  # a single layer: no backward pass is needed
        else:
            reached = self._propagate(outputs, weights, uses)
        records = outputs.shape[0]
        return [use.arranged(records, g) for use, g in reached]

    def _propagate(
        self, outputs: Tensor, weights: Tensor, uses: list[Use]
    ) -> list[tuple[Use, Tensor]]:
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, [*(use.edge for use in uses), *self._own_edges], weights, allow_unused=True
        )
        for name, gradient in zip(self._layout.names, gradients[len(uses) :], strict=True):
            if gradient is not None:
                layer = name.rpartition(".")[0]
                raise NotCoveredError(f"parameter '{name}' is used outside of its layer", layer)
        return [(use, g) for use, g in zip(uses, gradients, strict=False) if g is not None]

    def batch_gradients(self, outputs: Tensor, weights: Tensor) -> list[Tensor | None]:
        """The gradient of the sum over records for each parameter, inside or outside of layers."""
        self.uses.clear()
        count = len(self.aliases)
        if not outputs.requires_grad:
            return [None] * count
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, [*self.aliases, *self._own], weights, allow_unused=True
        )
        return [
            a if b is None else b if a is None else a + b
            for a, b in zip(gradients[:count], gradients[count:], strict=True)
        ]
