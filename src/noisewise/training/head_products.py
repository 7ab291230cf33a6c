"""The two matrix products of a step of heads (`noisewise.training.heads`), in fast parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["CACHED_NUMBERS", "Floats", "HeadProducts", "Wide"]

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]
CACHED_NUMBERS = 1 << 18
"""Numbers of a block: 1 MB stays in the cache between the two products."""

Split = Callable[[Floats], tuple[Floats, Floats]]

# numpy's OpenBLAS multiplies small matrices without packing them, up to this many multiplications.
# With 10 outputs it then runs at 100 GFLOP/s on a core, and at 30 to 60 above (torch's MKL: 60).
# Products with many outputs run at 70 to 100 GFLOP/s in one call.
_SMALL_PRODUCT = 1_000_000
_FEW_OUTPUTS = 32
_LEAST_ROWS = 24
_TILE_FEATURES = 833
_MANY_BLOCK = 1 << 22
_MANY_ROWS = 1024


class HeadProducts:
    """The parameters of all runs in a round, and the two matrix products of a step.

    Args:
        start: [runs, p], the runs' parameters at the start of the round.
        split: parameters [runs, p] -> views of weights [runs, k, d] and biases [runs, k].
        outputs: k.
        features: d.
        offset: what biases are multiplied by: 1, or the constant that is appended to records.

    Attributes:
        change: [runs, p] since the start of the round. It is summed by itself: added to large
            parameters at once, it would be rounded.
        buffer: [rows, d] for the records of a block.
    """

    def __init__(
        self, start: Floats, split: Split, outputs: int, features: int, offset: float
    ) -> None:
        runs, k, d = len(start), outputs, features
        self.change = np.zeros_like(start)
        self._start, self._change = split(start), split(self.change)
        self._offset = offset
        # Tensors are aligned to cache lines.
        self._weights, self._product = torch.empty(2, runs, k, d).numpy()
        self._biases = np.empty((runs, k), np.float32)
        block_rows, self._tile = _block_and_tile(runs * k, d)
        self.buffer = torch.empty(block_rows, d).numpy()
        self._sum = np.zeros_like(self._product), np.zeros((runs, k))

    def move(self) -> None:
        """Set the current parameters to start + change."""
        np.add(self._start[0], self._change[0], out=self._weights)
        np.add(self._start[1], self._change[1], out=self._biases)
        self._biases *= self._offset

    def outputs(self, x: Floats) -> Wide:
        """The outputs [runs, k, b] of the current parameters for records x [b, d]."""
        runs, k, d = self._weights.shape
        weights = self._weights.reshape(runs * k, d)
        result = np.empty((runs * k, len(x)), np.float32)
        for rows, columns in self._tiles(x):
            part = x[rows, columns].T
            if columns.start == 0:
                np.matmul(weights[:, columns], part, out=result[:, rows])
            else:
                result[:, rows] += weights[:, columns] @ part
        return np.add(result.reshape(runs, k, -1), self._biases[:, :, None], dtype=np.float64)

    def subtract_sum(self, slopes: Wide, x: Floats) -> None:
        """Subtract the sum over records of slopes [runs, k, b] times (x, a) from the change."""
        runs, k, d = self._product.shape
        narrow = slopes.astype(np.float32).reshape(runs * k, -1)
        product = self._product.reshape(runs * k, d)
        for rows, columns in self._tiles(x):
            np.matmul(narrow[:, rows], x[rows, columns], out=product[:, columns])
            self._change[0][:, :, columns] -= self._product[:, :, columns]
        self._change[1][:] -= self._offset * np.add.reduce(slopes, axis=2)

    def start_sum(self) -> None:
        """Set the sum of `add_to_sum` to 0."""
        for part in self._sum:
            part.fill(0)

    def add_to_sum(self, slopes: Wide, x: Floats) -> None:
        """Add slopes [runs, k, b] times (x, a), summed over records, to a separate sum."""
        runs, k, d = self._product.shape
        narrow = slopes.astype(np.float32).reshape(runs * k, -1)
        np.matmul(narrow, x, out=self._product.reshape(runs * k, d))
        self._sum[0][:] += self._product
        self._sum[1][:] += self._offset * np.add.reduce(slopes, axis=2)

    def sum_norms(self) -> Wide:
        """The norm [runs] of the sum of `add_to_sum`, over weights and biases together."""
        squares: Wide = np.zeros(len(self.change))
        for part in self._flat_sum():
            squares += np.einsum("rp,rp->r", part, part)
        return np.sqrt(squares)

    def subtract_own_sum(self, factors: Wide) -> None:
        """Subtract factors [runs] times the sum of `add_to_sum` from the change."""
        for change, part in zip(self._change, self._sum, strict=True):
            shaped = factors.astype(part.dtype).reshape(-1, *[1] * (part.ndim - 1))
            change -= np.where(shaped != 0, part * shaped, 0)

    def _flat_sum(self) -> Iterator[Wide]:
        for part in self._sum:
            yield part.reshape(len(part), -1).astype(np.float64)

    def subtract_noise(self, steps: Floats, noise: NDArray[np.floating[Any]]) -> None:
        """Subtract steps [runs] times noise [p] from the change."""
        if len(steps) == 1:
            self.change[0] -= noise * steps[0]
            return
        normals = torch.from_numpy(noise).float()
        torch.from_numpy(self.change).addr_(torch.from_numpy(steps), normals, alpha=-1.0)

    def _tiles(self, x: Floats) -> Iterator[tuple[slice, slice]]:
        """Slices of rows and columns, whose products are fast."""
        height, width = self._tile
        for row in range(0, x.shape[0], height):
            for column in range(0, x.shape[1], width):
                yield slice(row, row + height), slice(column, column + width)


def _block_and_tile(outputs: int, features: int) -> tuple[int, tuple[int, int]]:
    """The number of records of a block, and (rows, columns) of the parts that are multiplied."""
    if outputs > _FEW_OUTPUTS:
        block = max(_LEAST_ROWS, min(_MANY_ROWS, _MANY_BLOCK // features))
        return block, (block, features)
    columns = features
    if outputs * columns * _LEAST_ROWS > _SMALL_PRODUCT:
        columns = _TILE_FEATURES
    rows = min(_MANY_ROWS, _SMALL_PRODUCT // (outputs * columns))
    block = min(_MANY_ROWS, CACHED_NUMBERS // features)
    return -(-max(1, block) // rows) * rows, (rows, columns)
