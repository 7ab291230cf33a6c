"""Read an update matrix in row blocks: from memory, from a `RowSource` or from an iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.errors import UpdateError
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate

__all__ = [
    "RowSource",
    "StreamingEstimator",
    "Updates",
    "as_matrix",
    "as_tensor",
    "check_columns",
    "estimate_noise",
    "row_blocks",
    "slices",
]


@runtime_checkable
class RowSource(Protocol):
    """An update matrix that is not in memory, for example in files, and is read in row blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, n)."""
        ...

    def blocks(self, rows: int) -> Iterator[Matrix]:
        """Yield all rows in order, as blocks [rows, n]; the last block may be shorter."""
        ...

    def take(self, index: NDArray[np.int64]) -> Matrix:
        """Return the rows with the sorted numbers ``index`` ([k]) as [k, n]."""
        ...


Updates = Matrix | RowSource | Iterable[Matrix]
"""Input of the built-in estimators: a matrix [p, n], a `RowSource` or an iterator of row blocks."""


@runtime_checkable
class StreamingEstimator(Protocol):
    """An `Estimator` that also accepts a `RowSource` or an iterator of row blocks."""

    @property
    def takes_blocks(self) -> Literal[True]:
        """Always True; the attribute marks the capability."""
        ...

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Estimate the noise energy of each column of ``updates`` ([p, n])."""
        ...


def estimate_noise(estimator: Estimator, updates: Updates) -> NoiseEstimate:
    """Run an estimator on updates in any of the supported forms.

    An estimator that is not a `StreamingEstimator` receives all updates as one tensor in memory.

    Args:
        estimator: built-in or your own.
        updates: [p, n], a `RowSource`, or an iterator of row blocks [rows, n].

    Returns:
        The estimate for the n columns.

    Raises:
        UpdateError: the updates are malformed, or have NaN or infinite values.

    Example:
        >>> from noisewise.noise import Norm
        >>> blocks = (np.full((2, 3), value) for value in (1.0, 2.0))
        >>> estimate_noise(Norm(), blocks).variance.tolist()
        [10.0, 10.0, 10.0]
    """
    if isinstance(estimator, StreamingEstimator):
        return estimator.estimate(updates)
    return estimator.estimate(as_matrix(updates))


def as_tensor(values: Matrix) -> torch.Tensor:
    """Return ``values`` as a float32 or float64 tensor [p, n] on the same device.

    The tensor shares memory with ``values`` where possible, so the caller must not write to it. A
    copy is made if the type has to change, or if a numpy array is read-only (torch has no read-only
    tensors).

    Args:
        values: [p, n], numpy or torch.

    Raises:
        UpdateError: ``values`` is not a matrix, is empty, or does not hold real numbers.
    """
    if isinstance(values, torch.Tensor):
        tensor = values.detach()
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise UpdateError(f"updates has dtype {array.dtype}: must be real numbers")
        if not array.flags.writeable or not array.dtype.isnative or min(array.strides) < 0:
            array = array.astype(array.dtype.newbyteorder("="), order="K")
        tensor = torch.from_numpy(array)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise UpdateError(
            f"updates has shape {tuple(tensor.shape)}: must be [p, n] with a column for each "
            "client, p >= 1 and n >= 1"
        )
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.is_complex():
        raise UpdateError(f"updates has dtype {tensor.dtype}: must be real numbers")
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def row_blocks(updates: Updates, numbers: int) -> Iterator[torch.Tensor]:
    """Yield the rows of ``updates`` in order, as float tensors [rows, n].

    Blocks share memory with ``updates`` where possible, so the caller must not write to them.

    Args:
        updates: [p, n], a `RowSource`, or an iterator of row blocks.
        numbers: largest size of a block, rows times n; a block has at least one row.

    Raises:
        UpdateError: there are no rows, or the blocks have different numbers of columns.
    """
    columns: int | None = None
    for part in _parts(updates, numbers):
        tensor = as_tensor(part)
        if columns not in (None, tensor.shape[1]):
            raise UpdateError(
                f"updates has a block of shape {tuple(tensor.shape)} after one with {columns} "
                "columns: every block must have one column for each client"
            )
        columns = tensor.shape[1]
        yield from slices(tensor, max(1, numbers // columns))
    if columns is None:
        raise UpdateError("updates has no rows: must be [p, n] with p >= 1")


def slices(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """Yield views of ``rows`` consecutive rows; the last one may be shorter."""
    return (tensor[start : start + rows] for start in range(0, tensor.shape[0], rows))


def as_matrix(updates: Updates) -> torch.Tensor:
    """Return ``updates`` as one tensor [p, n]; blocks are read into memory."""
    if isinstance(updates, torch.Tensor | np.ndarray):
        return as_tensor(updates)
    return torch.cat(list(row_blocks(updates, 1 << 20)))


def check_columns(energy: NDArray[np.float64]) -> None:
    """Check that no column has NaN or infinite values.

    Args:
        energy: [n] squared norms of the columns.

    Raises:
        UpdateError: an energy is not finite; the message names the columns.
    """
    bad = np.flatnonzero(~np.isfinite(energy))
    if bad.size:
        columns = ", ".join(str(i) for i in bad[:10]) + (", ..." if bad.size > 10 else "")
        raise UpdateError(
            f"updates has NaN or infinite values in column(s) {columns} (of {energy.size}): "
            "leave these clients out of the round"
        )


def _parts(updates: Updates, numbers: int) -> Iterable[Matrix]:
    if isinstance(updates, torch.Tensor):
        return (updates,)
    if isinstance(updates, np.ndarray):
        if updates.ndim != 2 or updates.flags.writeable:
            return (updates,)
        # A read-only array, such as a memory map, has to be copied: copy one block at a time.
        rows = max(1, numbers // max(1, updates.shape[1]))
        return (updates[i : i + rows] for i in range(0, updates.shape[0], rows))
    if isinstance(updates, RowSource):
        return updates.blocks(max(1, numbers // updates.shape[1]))
    if not isinstance(updates, Iterable):
        raise UpdateError(f"updates is {type(updates).__name__}: must be a matrix or row blocks")
    return updates
