"""`Inputs`: the records of a batch as a model receives them: one tensor, or several.

A model is called as ``model(x)``, ``model(*tensors)`` or ``model(**tensors)``. All tensors have the
records first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisewise.errors import InvalidValueError

__all__ = [
    "Inputs",
    "call_arguments",
    "concatenate",
    "count_records",
    "form_of",
    "map_inputs",
    "output_of",
    "select",
    "tensors_of",
]

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Tensors [b, ...]: one, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``)."""


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of ``inputs``, in order.

    Example:
        >>> [len(part) for part in tensors_of({"ids": torch.zeros(2, 3), "mask": torch.ones(2, 3)})]
        [2, 2]
    """
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to each tensor, and keep the structure.

    Example:
        >>> inputs = (torch.arange(4), torch.arange(8).reshape(4, 2))
        >>> map_inputs(lambda tensor: tensor[:1], inputs)
        (tensor([0]), tensor([[0, 1]]))
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(part) for name, part in inputs.items()}
    return tuple(function(part) for part in inputs)


def concatenate(one: Inputs, other: Inputs) -> Inputs:
    """The records of ``one`` followed by those of ``other``, in new memory.

    Example:
        >>> concatenate({"x": torch.zeros(1)}, {"x": torch.ones(2)})
        {'x': tensor([0., 1., 1.])}
    """
    parts = iter([torch.cat(pair) for pair in zip(tensors_of(one), tensors_of(other), strict=True)])
    return map_inputs(lambda _: next(parts), one)


def select(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """The records with the given numbers, or of a slice.

    Example:
        >>> select({"x": torch.arange(4)}, slice(1, 3))
        {'x': tensor([1, 2])}
        >>> select(torch.arange(4), torch.tensor([3, 0]))
        tensor([3, 0])
    """
    if isinstance(rows, slice):
        return map_inputs(lambda part: part[rows], inputs)
    return map_inputs(lambda part: part.index_select(0, rows), inputs)


def count_records(inputs: Inputs) -> int:
    """The number of records.

    Example:
        >>> count_records((torch.zeros(5, 2), torch.zeros(5)))
        5
    """
    return tensors_of(inputs)[0].shape[0]


def form_of(inputs: Inputs) -> object:
    """Names, shapes and types of one record's tensors; equal for inputs of the same form."""
    names = tuple(inputs) if isinstance(inputs, dict) else ()
    return names, tuple((part.shape[1:], part.dtype) for part in tensors_of(inputs))


def call_arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and named arguments with which a model is called.

    Example:
        >>> call_arguments({"x": torch.zeros(1)})
        ((), {'x': tensor([0.])})
    """
    if isinstance(inputs, dict):
        return (), inputs
    return tensors_of(inputs), {}


def output_of(result: object) -> Tensor:
    """The output tensor of a model: what the loss receives.

    Args:
        result: what the model returned: a tensor; a tuple or list, whose first item is the output;
            or an object or dict with ``logits``, like the outputs of Hugging Face models.

    Raises:
        InvalidValueError: ``result`` has no such tensor.

    Example:
        >>> output_of((torch.zeros(2, 3), "hidden states")).shape
        torch.Size([2, 3])
    """
    if isinstance(result, Tensor):
        return result
    output: object = result
    if hasattr(result, "logits"):
        output = result.logits
    elif isinstance(result, dict) and "logits" in result:
        output = result["logits"]
    elif isinstance(result, tuple | list) and result:
        output = result[0]
    if not isinstance(output, Tensor):
        raise InvalidValueError(
            "the model's output",
            type(result).__name__,
            "must be a tensor, a tuple that starts with one, or an object with `logits`",
        )
    return output
