"""Read update matrices from files, completely or in row blocks, without executing anything in them.

The input is one file with an array ``updates`` of shape p x n, or one file for each client with one
array of length p, in safetensors, npz or npy format. Rows are read with plain file reads and not
with memory maps, so a matrix of any size needs a few megabytes of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.stored_arrays import StoredArray, find_arrays
from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource

__all__ = ["ColumnFiles", "MatrixFile", "open_updates", "read_updates"]

_ARRAY = "updates"
_SUFFIXES = (".safetensors", ".npz", ".npy")


class MatrixFile:
    """A `RowSource`: one array [p, n] in a file, stored row by row.

    Attributes:
        names: the n clients' names, which are the numbers of their columns.
    """

    def __init__(self, array: StoredArray) -> None:
        self._array = array
        self.names = tuple(str(i) for i in range(array.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """(p, n)."""
        return self._array.shape[0], self._array.shape[1]

    def blocks(self, rows: int) -> Iterator[NDArray[np.floating]]:
        """Yield all rows in order, at most ``rows`` at a time: [rows, n]."""
        n = self.shape[1]
        for part in self._array.stream(rows * n):
            yield part.reshape(-1, n)

    def take(self, index: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the rows with the sorted numbers ``index`` ([k]) as [k, n]."""
        n = self.shape[1]
        runs = [(start * n, stop * n) for start, stop in _runs(index)]
        return self._array.read(runs).reshape(-1, n)


class ColumnFiles:
    """A `RowSource`: n stored arrays [p], one for each client.

    Attributes:
        names: the n clients' names, usually the names of their files.
    """

    def __init__(self, columns: Sequence[StoredArray], names: Sequence[str]) -> None:
        self._columns, self.names = tuple(columns), tuple(names)

    @property
    def shape(self) -> tuple[int, int]:
        """(p, n)."""
        return self._columns[0].size, len(self._columns)

    def blocks(self, rows: int) -> Iterator[NDArray[np.floating]]:
        """Yield all rows in order, at most ``rows`` at a time: [rows, n]."""
        streams = [column.stream(rows) for column in self._columns]
        for parts in zip(*streams, strict=True):
            yield np.stack(parts).T

    def take(self, index: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the rows with the sorted numbers ``index`` ([k]) as [k, n]."""
        runs = _runs(index)
        return np.stack([column.read(runs) for column in self._columns]).T


def open_updates(path: Path | str | Sequence[Path | str]) -> MatrixFile | ColumnFiles:
    """Open updates in files; the estimators of `noisewise.noise` accept the result.

    Args:
        path: a file with an array ``updates`` [p, n]. Or several files, one for each client, each
            with one array of p numbers; or a folder of such files, which are sorted by name.

    Returns:
        A `RowSource` with the clients' ``names``.

    Raises:
        InvalidValueError: a file cannot be read, or does not have the expected array.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for client in ("a", "b"):
        ...         np.save(Path(folder, f"{client}.npy"), np.ones(5))
        ...     updates = open_updates(folder)
        ...     updates.names, updates.shape
        (('a', 'b'), (5, 2))
    """
    if isinstance(path, str | Path):
        path = Path(path)
        if not path.is_dir():
            return _matrix(path)
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            allowed = "must be a folder with safetensors, npz or npy files"
            raise InvalidValueError("file", str(path), allowed)
        return _columns(files)
    paths = [Path(one) for one in path]
    if not paths:
        raise InvalidValueError("file", paths, "must be at least one file")
    return _matrix(paths[0]) if len(paths) == 1 else _columns(paths)


def read_updates(path: Path | str) -> Tensor:
    """Read the array ``updates`` [p, n] of a file into memory.

    Raises:
        InvalidValueError: the file cannot be read, or does not have such an array.
    """
    source: RowSource = open_updates(path)
    return torch.cat([torch.as_tensor(np.asarray(part)) for part in source.blocks(1 << 16)])


def _arrays_of(path: Path) -> dict[str, StoredArray]:
    if not path.exists():
        raise InvalidValueError("file", str(path), "must be a file with updates; it does not exist")
    return find_arrays(path)


def _matrix(path: Path) -> MatrixFile | ColumnFiles:
    arrays = _arrays_of(path)
    if path.suffix != ".npy" and _ARRAY not in arrays:
        names = ", ".join(arrays) or "no array"
        raise InvalidValueError(
            "file", str(path), f"must contain an array named {_ARRAY}; it contains {names}"
        )
    array = next(iter(arrays.values())) if path.suffix == ".npy" else arrays[_ARRAY]
    if len(array.shape) != 2 or 0 in array.shape:
        raise InvalidValueError(
            "updates",
            f"{array.type} of shape {array.shape}",
            "must be floating-point numbers of shape p x n, one column for each client",
        )
    array.check_floating("updates")
    if not array.fortran:
        return MatrixFile(array)
    columns = array.split(array.shape[1])  # stored column by column: one vector for each client
    return ColumnFiles(columns, [str(i) for i in range(len(columns))])


def _columns(paths: Sequence[Path]) -> ColumnFiles:
    columns: list[StoredArray] = []
    for path in paths:
        arrays = _arrays_of(path)
        if len(arrays) != 1:
            names = ", ".join(arrays) or "no array"
            raise InvalidValueError(
                "file",
                str(path),
                f"must contain one array, the client's update; it contains {names}",
            )
        (array,) = arrays.values()
        array.check_floating(str(path))
        if array.size == 0 or array.size != max(array.shape, default=0):
            raise InvalidValueError(
                "file", str(path), f"must contain a vector of p numbers, not shape {array.shape}"
            )
        if columns and array.size != columns[0].size:
            raise InvalidValueError(
                "file",
                str(path),
                f"has {array.size} numbers, but {paths[0]} has {columns[0].size}: all clients' "
                "updates must have the same length",
            )
        columns.append(array)
    return ColumnFiles(columns, [path.stem for path in paths])


def _runs(index: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Convert sorted row numbers to half-open ranges of consecutive rows."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(index)]]) - 1
    return [(int(index[a]), int(index[b]) + 1) for a, b in zip(starts, stops, strict=True)]
