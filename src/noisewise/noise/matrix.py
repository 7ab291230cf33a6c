"""Update matrices as numpy arrays: one place for shape, type and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.errors import UpdateError
from noisewise.noise.estimate import Matrix

__all__ = ["as_array", "check_finite", "column_energy"]

_BLOCK = 1 << 16  # numbers of one row block: small enough for the cache


def as_array(updates: Matrix) -> NDArray[np.floating[Any]]:
    """``updates`` ([p, n], numpy or torch on any device) as a floating numpy array.

    A copy is made only where device or type demand it.

    Raises:
        UpdateError: not a matrix, empty, or not of real numbers.
    """
    if isinstance(updates, torch.Tensor):
        tensor = updates.detach().cpu()
        updates = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    array = np.asarray(updates)
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] == 0:
        raise UpdateError(
            f"updates has shape {array.shape}: must be [p, n], a column for each client, p, n >= 1"
        )
    if array.dtype.kind in "iub" or array.dtype == np.float16:
        return array.astype(np.float32 if array.dtype == np.float16 else np.float64)
    if array.dtype not in (np.float32, np.float64):
        raise UpdateError(f"updates has dtype {array.dtype}: must be float32 or float64")
    return array


def column_energy(M: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """[n] squared norms of the columns of M ([p, n]), summed in float64 over row blocks."""
    p, n = M.shape
    rows = max(1, _BLOCK // n)
    energy = np.zeros(n)
    for start in range(0, p, rows):
        block = M[start : start + rows].astype(np.float64)
        energy += np.einsum("ij,ij->j", block, block)
    return energy


def check_finite(energy: NDArray[np.float64]) -> None:
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
