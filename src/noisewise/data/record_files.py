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

__all__ = ["MAX_BYTES", "SUFFIXES", "check_size", "read_arrays"]

MAX_BYTES = 4 << 30
KEYS = ("inputs", "targets", "test_inputs", "test_targets")


def read_arrays(path: Path, max_bytes: int | None = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``.npz`` or ``.safetensors`` file.

    Args:
        path: file with ``inputs`` and ``targets``, and optionally ``test_inputs`` and
            ``test_targets``.
        max_bytes: reject a file with more bytes before it is read; None sets no limit.

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
    wanted = {frozenset(KEYS[:2]), frozenset(KEYS)}
    if frozenset(arrays) not in wanted:
        raise InvalidValueError(
            "file",
            str(path),
            f"must contain inputs and targets (optionally test_inputs and test_targets), not "
            f"{sorted(arrays)}",
        )
    return arrays


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
SUFFIXES = (*_READERS, ".csv")


def check_size(path: Path, size: int, max_bytes: int | None) -> None:
    """Raise `InvalidValueError` if ``size`` is above ``max_bytes``; None sets no limit."""
    if max_bytes is not None and size > max_bytes:
        raise InvalidValueError("file", str(path), f"has {size} bytes, more than {max_bytes}")
