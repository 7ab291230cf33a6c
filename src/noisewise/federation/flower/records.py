"""Flower's array records and our flat parameter vector, with every claim of a record checked.

An array of Flower is the bytes of a ``.npy`` file with a name, a shape and a type beside it. None
of them is believed: the header is read first, and nothing is allocated before it fits the layout.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from noisewise.errors import InvalidValueError, UpdateError
from noisewise.npy import read_npy_header
from noisewise.training.parameters import ParameterLayout

__all__ = ["layout_of", "read_theta", "to_record"]

_HEADER = 4096  # bytes that a .npy header may take; numpy's own are 128
_VERSIONS = ((1, 0), (2, 0))  # of the .npy format
_TYPE = np.dtype("<f4")


def to_record(layout: ParameterLayout, theta: Tensor) -> ArrayRecord:
    """The parameters [p] under their names."""
    parts = layout.unflatten(theta.detach().cpu())
    return ArrayRecord({name: Array(part.contiguous().numpy()) for name, part in parts.items()})


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
    names = list(record.keys())
    if set(names) != set(layout.names) or len(names) != len(layout.names):
        missing = [n for n in layout.names if n not in record][:3]
        extra = [str(n)[:40] for n in names if n not in layout.names][:3]
        raise UpdateError(f"has other names: missing {missing}, not asked for {extra}")
    theta = torch.empty(layout.size, dtype=torch.float32)
    parts = layout.unflatten(theta)
    for name in layout.names:
        parts[name].copy_(torch.from_numpy(_decode(record[name], name, tuple(parts[name].shape))))
    return theta


def _decode(array: Array, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    data = array.data
    size = _TYPE.itemsize * int(np.prod(shape, dtype=np.int64))
    if not isinstance(data, bytes) or not size < len(data) <= size + _HEADER:
        raise UpdateError(f"array {name} is not {size} bytes of values and a short header")
    file = io.BytesIO(data)
    try:
        found, by_columns, dtype = read_npy_header(file, versions=_VERSIONS)
    except ValueError as error:
        raise UpdateError(f"array {name} has no .npy header ({type(error).__name__})") from None
    if dtype != _TYPE:
        raise UpdateError(f"array {name} has dtype {str(dtype)[:20]}, expected float32")
    if found != shape:
        raise UpdateError(f"array {name} has shape {str(found)[:60]}, expected {shape}")
    start = file.tell()
    if len(data) - start != size:
        raise UpdateError(f"array {name} has {len(data) - start} bytes, expected {size}")
    flat = np.frombuffer(data, dtype=_TYPE, offset=start)
    values = flat.reshape(shape, order="F" if by_columns else "C")
    return np.array(values, dtype=np.float32, order="C")
