"""Flower's array records and the server's flat parameter vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from noisewise.errors import InvalidValueError
from noisewise.flower.arrays import DecodedArrays, array_record
from noisewise.training.parameters import ParameterLayout

__all__ = ["layout_of", "read_theta", "to_record"]


def to_record(layout: ParameterLayout, theta: Tensor) -> ArrayRecord:
    """The parameters [p] under their names."""
    parts = layout.unflatten(theta.detach().cpu())
    return array_record({name: part.numpy() for name, part in parts.items()})


def layout_of(record: ArrayRecord) -> ParameterLayout:
    """Names and shapes of a server's initial arrays.

    Raises:
        InvalidValueError: if an array is not float32. Buffers such as counters do not take part in
            training: send the trainable parameters only.
    """
    for name, array in record.items():
        if array.dtype != "float32":
            raise InvalidValueError(
                f"initial_arrays[{name!r}]", array.dtype, "must be float32: trainable parameters"
            )
    if not record:
        raise InvalidValueError("initial_arrays", "none", "must hold the model's parameters")
    shapes = tuple(torch.Size(array.shape) for array in record.values())
    return ParameterLayout(tuple(record.keys()), shapes)


def read_theta(record: Mapping[str, Array], layout: ParameterLayout) -> Tensor:
    """The arrays of a record as one vector [p].

    Raises:
        UpdateError: if names, shapes, types or sizes are not those of the layout; one line, in
            bounded length whatever the record claims.
    """
    return layout.gather(DecodedArrays(record))
