"""Second moments of the updates in one streaming pass: column energies and the Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.noise.blocks import Updates, check_columns, row_blocks

__all__ = ["Gram", "column_energy", "gram_matrix", "unsafe"]

_BLOCK = 1 << 18
_BLOCK_ELSEWHERE = 1 << 24
_SAFE = (1e-25, 1e25)  # energies of a block for which float32 neither under- nor overflows


@dataclass(frozen=True)
class Gram:
    """M^T M ([n, n] float64) of an update matrix, and its number of rows p."""

    matrix: NDArray[np.float64]
    rows: int


def gram_matrix(updates: Updates) -> Gram:
    """M^T M of ``updates`` ([p, n]), in one streaming pass.

    Products of one block are summed in the type of the updates, blocks in float64. A block whose
    float32 products would under- or overflow is done in float64.

    Raises:
        UpdateError: malformed, or NaN or infinite values; names the columns.
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
    assert total is not None  # row_blocks refuses an empty matrix
    check_columns(np.diagonal(total))
    return Gram(total, rows)


def column_energy(updates: Updates) -> tuple[NDArray[np.float64], int]:
    """||M_i||^2 of each column of ``updates`` ([p, n]) as [n] float64, and p.

    Raises:
        UpdateError: malformed, or NaN or infinite values; names the columns.
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
    assert total is not None  # row_blocks refuses an empty matrix
    check_columns(total)
    return total, rows


def unsafe(energy: torch.Tensor) -> bool:
    """Whether float32 energies ([n]) may have lost something to under- or overflow (or NaN)."""
    low, high = (float(value) for value in torch.aminmax(energy))
    return energy.dtype == torch.float32 and not (low > _SAFE[0] and high < _SAFE[1])


def _block(updates: Updates) -> int:
    """Numbers to take at a time: what fits in the cache of a CPU, and large steps elsewhere."""
    device = updates.device.type if isinstance(updates, torch.Tensor) else "cpu"
    return _BLOCK if device == "cpu" else _BLOCK_ELSEWHERE
