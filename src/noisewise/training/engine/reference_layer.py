"""`ReferenceLayer`: a submodule without rules, differentiated for each record by `torch.func`.

The rest of the model keeps its rules. The submodule runs once for the whole batch; its per-record
gradients come from its kept inputs and the gradient at its outputs, in chunks that bound memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from noisewise.training.engine.layer_interface import NotCoveredError, Recorder, Value
from noisewise.training.engine.record_axes import FIRST, RecordAxis, arranged
from noisewise.training.engine.shared_functions import by_record_gradients
from noisewise.training.engine.shared_values import Roots, SharedValue, parameter_root

__all__ = ["ReferenceLayer"]


class ReferenceLayer:
    """Runs a submodule and records it as one use of all its parameters.

    Args:
        name: of the submodule.
        module: a plain copy of it.
        values: its parameters by name, also those of its parts.
    """

    def __init__(self, name: str, module: nn.Module, values: Mapping[str, Value]) -> None:
        self._name, self._module = name, module
        self._values = dict(values)
        self._trained = [key for key, value in values.items() if value.index is not None]

    def call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """Run the submodule on the batch."""
        if any(isinstance(part, PackedSequence) for part in (*args, *kwargs.values())):
            raise NotCoveredError(f"'{self._name}' receives a packed sequence")
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(leaf, SharedValue) for leaf in leaves):
            raise NotCoveredError(f"an input of '{self._name}' is a parameter")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        axes = recorder.axes.of(self._name, [tensor.shape for tensor in tensors])
        pairs = list(zip(tensors, axes, strict=True))
        if any(axis is None and part.requires_grad for part, axis in pairs):
            raise NotCoveredError(f"the records are not on an axis of an input of '{self._name}'")
        if any(axis is not None and axis.factor > 1 for axis in axes):
            raise NotCoveredError(f"an input of '{self._name}' has several rows for each record")
        input_axes = [axis for axis in axes if axis is not None]
        inputs = [part for part, axis in pairs if axis is not None]

        def run(values: Sequence[Tensor], records: Sequence[Tensor]) -> Any:
            rows = iter(records)
            leaf_axes = iter(axes)
            new_leaves = [
                next(rows) if isinstance(leaf, Tensor) and next(leaf_axes) is not None else leaf
                for leaf in leaves
            ]
            positional, named = tree_unflatten(new_leaves, spec)
            fixed = {k: v.tensor for k, v in self._values.items() if v.index is None}
            trained = dict(zip(self._trained, values, strict=True))
            return functional_call(self._module, {**fixed, **trained}, positional, named)

        roots = [self._values[key] for key in self._trained]
        values = [value.tensor.detach().requires_grad_() for value in roots]
        versions = [value._version for value in values]
        before = torch.get_rng_state() if recorder.axes.is_trial else None
        result = run(values, inputs)
        if versions != [value._version for value in values]:
            raise NotCoveredError(f"'{self._name}' changes its parameters in place")
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise NotCoveredError(f"'{self._name}' draws random numbers")
        return self._record(recorder, run, inputs, input_axes, result)

    def _record(
        self,
        recorder: Recorder,
        run: Callable[[Sequence[Tensor], Sequence[Tensor]], Any],
        inputs: list[Tensor],
        input_axes: list[RecordAxis],
        result: Any,
    ) -> Any:
        """Record all outputs as one tensor [b, n], and return its parts with their own axes."""
        outs, form = tree_flatten(result)
        which = [number for number, out in enumerate(outs) if _is_trained(out)]
        axes = recorder.axes.of(self._name + " (output)", [outs[n].shape for n in which])
        if any(axis is None or axis.factor > 1 for axis in axes):
            raise NotCoveredError(f"the records are not on an axis of an output of '{self._name}'")
        output_axes = [axis for axis in axes if axis is not None]
        records = recorder.axes.records

        def flat(result: Any, records: int) -> Tensor:
            leaves = tree_flatten(result)[0]
            parts = [
                arranged(leaves[n], axis, records).reshape(records, -1)
                for n, axis in zip(which, output_axes, strict=True)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

        def of_rows(values: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
            pairs = zip(rows, input_axes, strict=True)
            return flat(run(values, [row.movedim(0, axis.dim) for row, axis in pairs]), 1)

        origins = [
            Roots(value.tensor, (parameter_root(value.tensor, value.index),))
            for value in (self._values[key] for key in self._trained)
            if value.index is not None
        ]
        whole = recorder.record(
            self._name,
            inputs,
            flat(result, records).clone(),
            by_record_gradients(of_rows, origins, recorder.method(self._name)),
            (input_axes, FIRST),
        )
        shapes = [
            arranged(outs[n], p, records).shape for n, p in zip(which, output_axes, strict=True)
        ]
        parts = torch.split(whole, [shape[1:].numel() for shape in shapes], 1)
        for number, axis, shape, part in zip(which, output_axes, shapes, parts, strict=True):
            outs[number] = part.reshape(shape).movedim(0, axis.dim)
        return tree_unflatten(outs, form)


def _is_trained(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
