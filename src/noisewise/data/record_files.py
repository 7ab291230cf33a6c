"""Read records from npz and safetensors files; neither format can run code."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.npy import read_npy_header

__all__ = ["MAX_BYTES", "SUFFIXES", "check_size", "joined_inputs", "read_arrays"]

MAX_BYTES = 4 << 30
KEYS = ("inputs", "targets", "test_inputs", "test_targets")


def read_arrays(
    path: Path, max_bytes: int | None = MAX_BYTES, persons: str = "persons"
) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``.npz`` or ``.safetensors`` file.

    Args:
        path: file with ``inputs`` and ``targets``, and optionally ``test_inputs`` and
            ``test_targets``, and arrays that say whose records they are.
        max_bytes: reject a file with more bytes before it is read; None sets no limit.
        persons: name of the array that says whose records they are; with ``test_`` before it, of
            that for the test records.

    Returns:
        The arrays by name.

    Raises:
        InvalidValueError: the file is too large, damaged, or has other arrays.
    """
    check_size(path, path.stat().st_size, max_bytes)
    try:
        arrays = _READERS[path.suffix](path, max_bytes)
    except InvalidValueError:
        raise
    except Exception as error:  # safetensors and zipfile raise many types
        raise InvalidValueError("file", str(path), f"cannot be read ({error})") from error
    allowed_names = {frozenset(KEYS[:2]), frozenset(KEYS)}
    parts = {name.partition(".")[0] if "inputs." in name else name for name in arrays}
    parts -= {persons} | ({f"test_{persons}"} if "test_targets" in parts else set())
    if frozenset(parts) not in allowed_names or parts & set(arrays) & {
        name.partition(".")[0] for name in arrays if "inputs." in name
    }:
        raise InvalidValueError(
            "file",
            str(path),
            "must contain inputs and targets (optionally test_inputs and test_targets; several "
            f"input arrays as inputs.NAME; persons as {persons}), not {sorted(arrays)}",
        )
    return arrays


def joined_inputs(arrays: Mapping[str, NDArray[Any]], part: str = "inputs") -> Any:
    """The inputs of a file: one array, or a mapping of ``inputs.NAME``; a tuple of ``inputs.0``...

    Args:
        arrays: of `read_arrays`.
        part: "inputs" or "test_inputs".

    Example:
        >>> sorted(joined_inputs({"inputs.ids": np.zeros(2), "inputs.mask": np.ones(2)}))
        ['ids', 'mask']
    """
    if part in arrays:
        return arrays[part]
    named = {
        name.removeprefix(f"{part}."): array
        for name, array in sorted(arrays.items())
        if name.startswith(f"{part}.")
    }
    if all(name.isdigit() for name in named):
        return tuple(named[name] for name in sorted(named, key=int))
    return named


def _read_npz(path: Path, max_bytes: int | None) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        check_size(path, sum(entry.file_size for entry in entries), max_bytes)
        for entry in entries:  # a header can claim any shape: compare it with the size
            with archive.open(entry) as member:
                shape, _, dtype = read_npy_header(member)
                if member.tell() + math.prod(shape) * dtype.itemsize != entry.file_size:
                    raise InvalidValueError("file", str(path), f"{entry.filename} is damaged")
    with np.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def _read_safetensors(path: Path, max_bytes: int | None) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file  # checks the sizes in its header against the file's

    arrays: dict[str, NDArray[Any]] = load_file(path)
    return arrays


_READERS: Mapping[str, Callable[[Path, int | None], dict[str, NDArray[Any]]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}
SUFFIXES = (*_READERS, ".csv", ".parquet")


def check_size(path: Path, size: int, max_bytes: int | None) -> None:
    """Raise `InvalidValueError` if ``size`` is above ``max_bytes``; None sets no limit."""
    if max_bytes is not None and size > max_bytes:
        raise InvalidValueError("file", str(path), f"has {size} bytes, more than {max_bytes}")
