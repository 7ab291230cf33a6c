"""Arrays of float32 by name, in the safetensors format, read without a copy and nothing believed.

The format (huggingface/safetensors): 8 bytes with the size of a JSON header, the header with type,
shape and position of every array, and the values. Only float32 is accepted, in the order of the
positions, without gaps and without metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.site.frames import FrameError, strict_json

__all__ = ["largest_payload", "pack_arrays", "unpack_arrays"]

_F32 = np.dtype("<f4")
_MOST_DIMENSIONS = 8
_LARGEST_SHAPE = 2**40  # product of the sizes that are not 0
_SLACK = 1 << 16
_BYTES_FOR_A_NAME = 1024


def largest_payload(n_arrays: int, n_values: int) -> int:
    """The largest size in bytes of this number of arrays with this number of values."""
    return 4 * n_values + _largest_header(n_arrays)


def _largest_header(n_arrays: int) -> int:
    return _BYTES_FOR_A_NAME * n_arrays + _SLACK


def pack_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> list[memoryview]:
    """Arrays as buffers; written one after the other they are a safetensors file.

    Args:
        arrays: float32; they are not copied if they are contiguous.
    """
    plain = {name: np.ascontiguousarray(one, dtype=_F32) for name, one in arrays.items()}
    entries, start = {}, 0
    for name, one in plain.items():
        shape = list(arrays[name].shape)  # ascontiguousarray gives a scalar one dimension
        entries[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [start, start + one.nbytes],
        }
        start += one.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    values = [one.reshape(-1).data.cast("B") for one in plain.values() if one.size]
    return [memoryview(len(text).to_bytes(8, "little") + text), *values]


def unpack_arrays(payload: memoryview, n_arrays: int) -> dict[str, NDArray[np.float32]]:
    """Views of the arrays of a payload.

    Args:
        payload: bytes as `pack_arrays` writes them.
        n_arrays: how many are expected. It bounds the header before it is parsed, since parsed JSON
            takes many times its bytes in memory.

    Raises:
        FrameError: the payload is anything else than float32 arrays that fill it exactly.
    """
    size = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or size > len(payload) - 8:
        raise FrameError("payload", f"{len(payload)} bytes", "must be safetensors")
    if size > (most := _largest_header(n_arrays)):
        raise FrameError("header of the arrays", f"{size} bytes", f"must have at most {most}")
    values = payload[8 + size :]
    arrays: dict[str, NDArray[np.float32]] = {}
    start = 0
    for name, entry in strict_json(bytes(payload[8 : 8 + size]), "header of the arrays").items():
        shape, end = _entry(name, entry, start)
        if end > len(values):
            raise FrameError(f"array {name[:40]}", f"{end} bytes", "ends after the payload")
        arrays[name] = np.frombuffer(values[start:end], _F32).reshape(shape)
        start = end
    if start != len(values):
        raise FrameError("payload", f"{len(values)} bytes of values", f"must be {start}")
    return arrays


def _entry(name: str, entry: Any, start: int) -> tuple[list[int], int]:
    """Shape and end of one array, from its entry in the header."""
    field = f"array {name[:40]}"
    if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
        raise FrameError(field, "its entry", "must have dtype, shape and data_offsets only")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != "F32":
        raise FrameError(field, str(entry["dtype"])[:20], "must be F32")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise FrameError(field, "its shape", f"must have at most {_MOST_DIMENSIONS} sizes")
    if any(type(one) is not int or one < 0 for one in shape):
        raise FrameError(field, str(shape)[:40], "must have sizes from 0 on")
    if math.prod(one or 1 for one in shape) > _LARGEST_SHAPE:  # numpy bounds empty arrays, too
        raise FrameError(field, str(shape)[:40], f"must have at most {_LARGEST_SHAPE} values")
    end = start + 4 * math.prod(shape)
    if offsets != [start, end] or any(type(one) is not int for one in offsets):
        raise FrameError(field, str(offsets)[:40], f"must have the offsets [{start}, {end}]"[:80])
    return shape, end
