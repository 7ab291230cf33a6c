"""Find arrays in safetensors, npz and npy files and read them in parts."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.npy import read_npy_header

__all__ = ["StoredArray", "find_arrays"]

_SAFETENSORS_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bf16"}
_SAFETENSORS_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class StoredArray:
    """An array in a file. Its values stay on disk until they are read.

    Attributes:
        path: the file.
        type: numpy's name of the type, or ``bf16``.
        shape: shape of the array.
        fortran: whether the array is stored column by column (Fortran order).
        offset: position of the first value in bytes, in the file or in ``member``.
        member: name of a compressed member of a zip file, which can only be read from its start;
            None if the values can be read from the file directly.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    fortran: bool
    offset: int
    member: str | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def check_floating(self, field: str) -> None:
        """Check that the values are floating-point numbers.

        Raises:
            InvalidValueError: they are not; ``field`` is the name in the message.
        """
        if self.type != "bf16" and np.dtype(self.type).kind != "f":
            raise InvalidValueError(
                field, f"{self.type} of shape {self.shape}", "must be floating-point numbers"
            )

    def split(self, parts: int) -> list[StoredArray]:
        """Return the same values as ``parts`` vectors of equal length, in the order of the file."""
        size = self.size // parts
        width = self._raw().itemsize
        return [
            replace(self, shape=(size,), fortran=False, offset=self.offset + i * size * width)
            for i in range(parts)
        ]

    def stream(self, numbers: int) -> Iterator[NDArray[np.floating]]:
        """Yield all values in the order of the file, at most ``numbers`` at a time."""
        with self._open() as file:
            for start in range(0, self.size, numbers):
                yield self._next(file, min(numbers, self.size - start))

    def read(self, runs: Sequence[tuple[int, int]]) -> NDArray[np.floating]:
        """Read the values in sorted half-open ranges ``runs`` and return them as one vector."""
        with self._open() as file:
            parts = []
            for start, stop in runs:
                file.seek(self.offset + start * self._raw().itemsize)
                parts.append(self._next(file, stop - start))
        return np.concatenate(parts)

    def _raw(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.type == "bf16" else np.dtype(self.type)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """Open the file at the first value; seeking in a compressed member reads skipped bytes."""
        if self.member is None:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                yield file
            return
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as member:
            member.seek(self.offset)
            yield member

    def _next(self, file: IO[bytes], count: int) -> NDArray[np.floating]:
        dtype = self._raw()
        data = file.read(count * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise InvalidValueError("file", str(self.path), "is truncated: the array is incomplete")
        values = np.frombuffer(data, dtype=dtype)
        if self.type == "bf16":  # the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        if dtype.itemsize == 2:
            return values.astype(np.float32)
        return values.astype(dtype.newbyteorder("="))


def find_arrays(path: Path) -> dict[str, StoredArray]:
    """Find all arrays in a file without reading their values.

    Args:
        path: a safetensors, npz or npy file.

    Returns:
        The arrays by name; the only array of an npy file has the empty name.

    Raises:
        InvalidValueError: the file cannot be read or is malformed.
    """
    try:
        if path.suffix == ".npz":
            return _in_npz(path)
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                return {"": _npy_header(path, file)}
        return _in_safetensors(path)
    except InvalidValueError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidValueError(
            "file", str(path), f"must be a readable safetensors, npz or npy file ({error})"
        ) from error


def _in_npz(path: Path) -> dict[str, StoredArray]:
    arrays = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            with archive.open(info) as member:
                array = _npy_header(path, member)
            if info.compress_type == zipfile.ZIP_STORED:
                # A local header has 30 bytes; the last 4 are the lengths of name and extra field.
                raw.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
                start = info.header_offset + 30 + name + extra
                array = replace(array, offset=start + array.offset)
            else:
                array = replace(array, member=info.filename)
            arrays[info.filename.removesuffix(".npy")] = array
    return arrays


def _npy_header(path: Path, file: IO[bytes]) -> StoredArray:
    shape, fortran, dtype = read_npy_header(file)
    if dtype.hasobject:
        raise InvalidValueError(
            "file", str(path), "contains Python objects, which are never loaded"
        )
    if any(size < 0 for size in shape):
        raise ValueError(f"invalid shape {shape}")
    fortran = fortran and len(shape) > 1
    return StoredArray(path, dtype.str, shape, fortran, file.tell())


def _in_safetensors(path: Path) -> dict[str, StoredArray]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        total = path.stat().st_size
        if not 2 <= length <= min(_SAFETENSORS_HEADER, total - 8):
            raise ValueError("not a safetensors header")
        header = json.loads(file.read(length))
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(int(size) for size in entry["shape"])
        start, stop = (int(x) for x in entry["data_offsets"])
        kind = _SAFETENSORS_TYPES.get(entry["dtype"])
        if kind is None:
            raise InvalidValueError(
                str(path), f"{entry['dtype']} of shape {shape}", "must be floating-point numbers"
            )
        array = StoredArray(path, kind, shape, fortran=False, offset=8 + length + start)
        width = 2 if kind == "bf16" else np.dtype(kind).itemsize
        if (
            min(shape, default=0) < 0
            or stop - start != array.size * width
            or 8 + length + stop > total
            or start < 0
        ):
            raise ValueError(f"the size of {name} in bytes does not match its shape {shape}")
        arrays[name] = array
    return arrays
