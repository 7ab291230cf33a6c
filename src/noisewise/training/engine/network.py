"""`Network`: the engine's copy of a model, which records the inputs of its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisewise.training.engine.layer_interface import (
    Gradients,
    LayerOptions,
    LayerRule,
    NotCoveredError,
    Value,
)
from noisewise.training.engine.layer_rules import layer_for
from noisewise.training.engine.rewrites import pool_before_relu
from noisewise.training.parameters import ParameterLayout

__all__ = ["Network", "Use"]


class Use(NamedTuple):
    """One call of a layer in one pass of the model.

    Attributes:
        name: of the layer.
        kept: [b, ...] the layer's input, see `Run`.
        gradients: computes the gradients of the layer's parameters.
        version: of ``kept`` when it was recorded.
        edge: of the layer's output in the graph.
        is_first: whether the layer's input needs no gradient.
    """

    name: str
    kept: Tensor
    gradients: Gradients
    version: int
    edge: GradientEdge
    is_first: bool

    def without(self, records: Tensor) -> Use:
        """The same use with zeros for the given records."""
        return self._replace(kept=self.kept.index_fill(0, records, 0))

    def check(self, records: int, rows: int) -> None:
        """Reject inputs for which the rules are not exact."""
        if rows != records or self.kept.shape[0] != records:
            raise NotCoveredError(
                f"the input of layer '{self.name}' does not have the {records} records first"
            )
        if self.kept._version != self.version:
            raise NotCoveredError(f"the input of layer '{self.name}' was changed in place")


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

    Raises:
        NotCoveredError: a layer has no rule, or the model cannot be copied.
    """

    def __init__(
        self, model: nn.Module, layout: ParameterLayout, like: Tensor, options: LayerOptions
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
        for name, module in self._module.named_modules():
            values = {
                key: Value(self.aliases[index[id(p)]], index[id(p)])
                if p.requires_grad
                else Value(p.detach(), None)
                for key, p in module._parameters.items()
                if p is not None
            }
            if any(value.index is not None for value in values.values()):
                layer = layer_for(name, module, values, options)
                module.__dict__["forward"] = self._recorded(name, layer)

    def _recorded(self, name: str, layer: LayerRule) -> Callable[[Tensor], Tensor]:
        uses = self.uses

        def forward(input: Tensor) -> Tensor:
            kept, out, gradients = layer.run(input)
            if out._is_view():  # an in-place change of a view would move its edge
                out = out.clone()
            node = out.grad_fn
            if node is not None:
                edge = GradientEdge(node, out.output_nr)
                first = not input.requires_grad
                uses.append(Use(name, kept, gradients, kept._version, edge, first))
            return out

        return forward

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

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's outputs [b, ...] with a graph; replaces the recorded uses of layers."""
        self.uses.clear()
        outputs = self._module(inputs)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != inputs.shape[:1]:
            raise NotCoveredError("the model does not return one tensor with the records first")
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
        for use, g in reached:
            use.check(records, g.shape[0])
        return reached

    def _propagate(
        self, outputs: Tensor, weights: Tensor, uses: list[Use]
    ) -> list[tuple[Use, Tensor]]:
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, [*(use.edge for use in uses), *self._own_edges], weights, allow_unused=True
        )
        for name, gradient in zip(self._layout.names, gradients[len(uses) :], strict=True):
            if gradient is not None:
                raise NotCoveredError(f"parameter '{name}' is used outside of its layer")
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
