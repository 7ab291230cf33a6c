"""Update matrices in row blocks: from memory, from a `RowSource`, or from any iterator."""

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
    """An update matrix that lies elsewhere (in files, say) and is read by rows, again and again."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, n)."""
        ...

    def blocks(self, rows: int) -> Iterator[Matrix]:
        """All rows in order, at most ``rows`` at a time: [rows, n] each."""
        ...

    def take(self, index: NDArray[np.int64]) -> Matrix:
        """The rows of a sorted ``index`` ([k]): [k, n]."""
        ...


Updates = Matrix | RowSource | Iterable[Matrix]
"""What our estimators take: a matrix [p, n], a source of its rows, or an iterator of row blocks."""


@runtime_checkable
class StreamingEstimator(Protocol):
    """An `Estimator` that takes row blocks as well, and says so."""

    @property
    def takes_blocks(self) -> Literal[True]:
        """True."""
        ...

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Estimate the noise energy of each column of ``updates`` ([p, n])."""
        ...


def estimate_noise(estimator: Estimator, updates: Updates) -> NoiseEstimate:
    """Run any estimator on updates of any kind; one that does not stream gets one tensor."""
    if isinstance(estimator, StreamingEstimator):
        return estimator.estimate(updates)
    return estimator.estimate(as_matrix(updates))


def as_tensor(values: Matrix) -> torch.Tensor:
    """``values`` ([p, n], numpy or torch) as a float32 or float64 tensor on the device it is on.

    A copy is made only where the type demands it, or where numpy forbids writing (torch has no
    such notion); never written to by this package.

    Raises:
        UpdateError: not a matrix, empty, or not of real numbers.
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
    """``updates`` in order, as float tensors [rows, n] of at most about ``numbers`` numbers.

    Blocks are views where that is possible, so they must not be written to.

    Raises:
        UpdateError: no rows at all, or blocks with different numbers of columns.
    """
    columns: int | None = None
    for part in _parts(updates, numbers):
        tensor = as_tensor(part)
        if columns not in (None, tensor.shape[1]):
            raise UpdateError(
                f"updates has a block of shape {tuple(tensor.shape)} after one with {columns} "
                "columns: every block needs a column for each client"
            )
        columns = tensor.shape[1]
        yield from slices(tensor, max(1, numbers // columns))
    if columns is None:
        raise UpdateError("updates has no rows: must be [p, n] with p >= 1")


def slices(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """Views of ``rows`` rows each, the last one of what is left."""
    return (tensor[start : start + rows] for start in range(0, tensor.shape[0], rows))


def as_matrix(updates: Updates) -> torch.Tensor:
    """``updates`` as one tensor [p, n]: itself if it is in memory, else collected."""
    if isinstance(updates, torch.Tensor | np.ndarray):
        return as_tensor(updates)
    return torch.cat(list(row_blocks(updates, 1 << 20)))


def check_columns(energy: NDArray[np.float64]) -> None:
    """Refuse a matrix whose column energies ([n]) show a NaN or an infinity.

    Raises:
        UpdateError: names the columns; the remedy is to drop these clients.
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
        # Read-only (a memory map): convert piece by piece, never the whole.
        rows = max(1, numbers // max(1, updates.shape[1]))
        return (updates[i : i + rows] for i in range(0, updates.shape[0], rows))
    if isinstance(updates, RowSource):
        return updates.blocks(max(1, numbers // updates.shape[1]))
    if not isinstance(updates, Iterable):
        raise UpdateError(f"updates is {type(updates).__name__}: must be a matrix or row blocks")
    return updates
