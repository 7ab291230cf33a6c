"""Second moments of the updates in one pass: squared column norms and the Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.noise.blocks import Updates, check_columns, row_blocks

__all__ = ["Gram", "column_energy", "gram_matrix", "unsafe"]

_BLOCK = 1 << 18
_BLOCK_ELSEWHERE = 1 << 24
_SAFE = (1e-25, 1e25)  # energies of a block for which float32 neither underflows nor overflows


@dataclass(frozen=True)
class Gram:
    """M^T M ([n, n] float64) of an update matrix M, and the number of rows p of M."""

    matrix: NDArray[np.float64]
    rows: int


def gram_matrix(updates: Updates) -> Gram:
    """Compute M^T M of the updates in one pass.

    Products within a block are summed in the type of the updates, and blocks in float64. If the
    float32 products of a block could underflow or overflow, that block is computed in float64.

    Args:
        updates: [p, n], or a source or iterator of row blocks.

    Returns:
        M^T M and p.

    Raises:
        UpdateError: the updates are malformed, or have NaN or infinite values; the message names
            the columns.
    """
    total: NDArray[np.float64] | None = None
    rows = 0
    for block in row_blocks(updates, _block(updates)):
        product = torch.mm(block.T, block)
        if unsafe(product.diagonal()):
            double = block.cpu().double()
            product = torch.mm(double.T, double)
        part = product.cpu().double().numpy()
        total = part.copy() if total is None else total + part
        rows += block.shape[0]
    assert total is not None  # row_blocks raises an error for an empty matrix
    check_columns(np.diagonal(total))
    return Gram(total, rows)


def column_energy(updates: Updates) -> tuple[NDArray[np.float64], int]:
    """Compute the squared norm ||M_i||^2 of each column in one pass.

    Args:
        updates: [p, n], or a source or iterator of row blocks.

    Returns:
        The squared norms [n] in float64, and p.

    Raises:
        UpdateError: as in `gram_matrix`.
    """
    total: NDArray[np.float64] | None = None
    rows = 0
    for block in row_blocks(updates, _block(updates)):
        energy = block.square().sum(dim=0)
        if unsafe(energy):
            energy = block.cpu().double().square().sum(dim=0)
        part = energy.cpu().double().numpy()
        total = part.copy() if total is None else total + part
        rows += block.shape[0]
    assert total is not None  # row_blocks raises an error for an empty matrix
    check_columns(total)
    return total, rows


def unsafe(energy: torch.Tensor) -> bool:
    """Return whether float32 energies ([n]) may be wrong by underflow or overflow, or are NaN."""
    low, high = (float(value) for value in torch.aminmax(energy))
    return energy.dtype == torch.float32 and not (low > _SAFE[0] and high < _SAFE[1])


def _block(updates: Updates) -> int:
    """Return the size of a block: it fits into the cache of a CPU; other devices get large ones."""
    device = updates.device.type if isinstance(updates, torch.Tensor) else "cpu"
    return _BLOCK if device == "cpu" else _BLOCK_ELSEWHERE
