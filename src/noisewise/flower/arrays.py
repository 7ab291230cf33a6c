"""Flower's array records and numpy arrays, with every claim of a record checked.

An array of Flower is the bytes of a ``.npy`` file together with a name, a shape and a type. None
of them is trusted: the header is read first, and no memory of the size that it claims is allocated.
This file needs no torch: a relay at a site imports it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from noisewise.errors import UpdateError
from noisewise.flower.wire import ARRAY_TYPE, LONGEST_HEADER, NPY_VERSIONS
from noisewise.npy import read_npy_header

__all__ = ["DecodedArrays", "array_record"]


class DecodedArrays(Mapping[str, NDArray[np.float32]]):
    """The arrays of a record by name; each is decoded when it is read.

    Reading raises an `UpdateError` of one line if an array's bytes are no float32 ``.npy`` file.
    """

    def __init__(self, record: Mapping[str, Array]) -> None:
        self._record = record

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """A view of the array's bytes."""
        return _decode(self._record[name], str(name)[:40])

    def __iter__(self) -> Iterator[str]:
        return iter(self._record.keys())

    def __len__(self) -> int:
        return len(self._record.keys())


def array_record(arrays: Mapping[str, NDArray[np.float32]]) -> ArrayRecord:
    """Arrays by name as a record."""
    return ArrayRecord({name: Array(np.asarray(one, order="C")) for name, one in arrays.items()})


def _decode(array: Array, name: str) -> NDArray[np.float32]:
    data = array.data
    if not isinstance(data, bytes):
        raise UpdateError(f"array {name} is {type(data).__name__[:20]}, expected bytes")
    file = io.BytesIO(data)
    try:
        shape, by_columns, dtype = read_npy_header(file, versions=NPY_VERSIONS)
    except ValueError as error:
        raise UpdateError(f"array {name} has no .npy header ({type(error).__name__})") from None
    start, count = file.tell(), math.prod(shape)
    if dtype != ARRAY_TYPE:
        raise UpdateError(f"array {name} has dtype {str(dtype)[:20]}, expected float32")
    if start > LONGEST_HEADER or len(data) - start != ARRAY_TYPE.itemsize * count:
        sizes = f"{start} bytes of header and {len(data) - start} of values"
        raise UpdateError(f"array {name} has {sizes}, expected those of shape {str(shape)[:60]}")
    try:
        flat = np.frombuffer(data, dtype=ARRAY_TYPE, count=count, offset=start)
        return flat.reshape(shape, order="F" if by_columns else "C")
    except ValueError:  # negative sizes, or more dimensions than numpy allows
        raise UpdateError(f"array {name} has the invalid shape {str(shape)[:60]}") from None
