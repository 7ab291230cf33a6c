"""Quiet rows: find the coordinates in which the clients' common signal is weak.

DP noise has the same variance in every coordinate of an update. The signal does not: most of it is
in a few layers and rows. In the other rows, the columns are almost pure noise. This module divides
the rows into chunks of neighbours and ranks the chunks by energy, with each column in units of its
noise. If a chunk were chosen by its own energy, the choice would favour rows whose noise happens to
be small. So the energy of the odd rows of a chunk decides about its even rows, and the energy of
the even rows about the odd ones: their noise is independent, and their signal is similar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.noise.blocks import RowSource, Updates, check_columns, row_blocks
from noisewise.noise.gram import unsafe

__all__ = ["ChunkGrams", "chunk_grams"]

_CHUNK = 16  # rows of a half chunk: few enough to resolve the signal, enough to measure it
_MEMORY = 5_000_000  # most numbers in memory: 20 MB in float32
_BLOCK = 1 << 18  # numbers that are read at a time
_LEAST_CHUNKS = 16  # with fewer chunks, all rows are used
_WITH_SHAPE = (torch.Tensor, np.ndarray, RowSource)


@dataclass(frozen=True)
class ChunkGrams:
    """Gram matrices of all half chunks of an update matrix M ([p, n]).

    Attributes:
        total: [n, n] float64, M^T M over all rows.
        rows: p.
        halves: [k, 2, n, n], of the even and the odd rows of each chunk. The last rows of M, if
            they do not fill a chunk, are only in ``total``.
        half_rows: number of rows of a half chunk.
    """

    total: NDArray[np.float64]
    rows: int
    halves: NDArray[np.floating]
    half_rows: int

    def quiet(self, psi: NDArray[np.float64], share: float) -> tuple[NDArray[np.float64], int]:
        """Sum the Gram matrices of the quietest half chunks.

        Args:
            psi: [n] noise variance of one coordinate of each column.
            share: share of the half chunks, in (0, 1]; 1 uses all rows.

        Returns:
            The Gram matrix [n, n], and the number of rows in it.
        """
        if share >= 1 or not len(self.halves):
            return self.total, self.rows
        energy = self._energy(psi)
        limit = np.partition(energy.ravel(), self._rank(share))[self._rank(share)]
        chosen = energy[:, ::-1] <= limit  # the energy of one half decides about the other
        gram = np.asarray(np.sum(self.halves[chosen], axis=0, dtype=np.float64))
        return gram, int(np.count_nonzero(chosen)) * self.half_rows

    def differ(self, psi: NDArray[np.float64]) -> bool:
        """Test whether the signal is stronger in some chunks than in others.

        The test is the correlation of the two halves' log energies, at four standard errors. It is
        negative without signal, with rows in random order, and with fewer than 16 chunks; then no
        chunk is quieter than the others.

        Args:
            psi: [n] noise variance of one coordinate of each column.
        """
        k = len(self.halves)
        if k < _LEAST_CHUNKS:
            return False
        logs = np.log(np.maximum(self._energy(psi), np.finfo(np.float32).tiny))
        logs = logs - logs.mean(axis=0)
        scatter = logs.T @ logs
        if scatter[0, 0] <= 0 or scatter[1, 1] <= 0:
            return False
        return bool(scatter[0, 1] / math.sqrt(scatter[0, 0] * scatter[1, 1]) > 4 / math.sqrt(k))

    def _energy(self, psi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy of each half chunk ([k, 2]), with each column in units of its noise."""
        diagonals = np.einsum("khii->khi", self.halves).astype(np.float64)
        return np.asarray(diagonals @ (1 / psi))

    def columns(self, keep: NDArray[np.int64]) -> ChunkGrams:
        """Return the Gram matrices of the columns with the numbers ``keep`` only."""
        both = np.ix_(keep, keep)
        halves = self.halves[:, :, both[0], both[1]]
        return ChunkGrams(self.total[both], self.rows, halves, self.half_rows)

    def _rank(self, share: float) -> int:
        count = 2 * len(self.halves)
        return min(count - 1, max(0, math.ceil(share * count) - 1))


def chunk_grams(updates: Updates) -> ChunkGrams:
    """Compute the Gram matrices of the half chunks in one pass.

    Memory is bounded for any p: a larger p gives longer chunks. If p is not known in advance,
    neighbouring chunks are merged when the limit is reached.

    Args:
        updates: [p, n], or a source or iterator of row blocks.

    Returns:
        The Gram matrices of all half chunks and of all rows.

    Raises:
        UpdateError: the updates are malformed, or have NaN or infinite values; the message names
            the columns.
    """
    work: _Work | None = None
    numbers = _BLOCK
    if isinstance(updates, _WITH_SHAPE) and len(updates.shape) == 2 and 0 not in updates.shape:
        work = _Work.of(n=int(updates.shape[1]), p=int(updates.shape[0]))
        chunk = 2 * work.half_rows * work.n
        numbers = max(1, _BLOCK // chunk) * chunk  # whole chunks: no rows to copy between blocks
    for block in row_blocks(updates, numbers):
        work = work or _Work.of(n=block.shape[1], p=0)
        work.add(block)
    assert work is not None  # row_blocks raises an error for an empty matrix
    check_columns(np.diagonal(work.total))
    return ChunkGrams(work.total, work.rows, work.halves(), work.half_rows)


@dataclass
class _Work:
    """The chunks and the total of the rows read so far."""

    n: int
    half_rows: int
    limit: int  # most chunks in memory
    total: NDArray[np.float64]
    parts: list[NDArray[np.floating]]
    rest: torch.Tensor | None = None
    rows: int = 0

    @classmethod
    def of(cls, n: int, p: int) -> _Work:
        limit = max(64, _MEMORY // (2 * n * n))
        half = max(_CHUNK, math.ceil(n / 4), math.ceil(p / (2 * limit)))
        return cls(n, half, limit, np.zeros((n, n)), [])

    def add(self, block: torch.Tensor) -> None:
        self.rows += block.shape[0]
        if self.rest is not None:
            block = torch.cat([self.rest.to(block), block])
        chunks = block.shape[0] // (2 * self.half_rows)
        whole = chunks * 2 * self.half_rows
        self.rest = block[whole:].clone() if whole < block.shape[0] else None
        if chunks:
            part = self._grams(block[:whole].reshape(chunks, self.half_rows, 2, self.n))
            self.total += part.sum(axis=(0, 1), dtype=np.float64)
            self.parts.append(part)
        while sum(len(part) for part in self.parts) > self.limit:
            self._merge()

    def halves(self) -> NDArray[np.floating]:
        """Return all half chunks, and add the remaining rows to the total."""
        if self.rest is not None:
            last = self.rest.cpu().double().numpy()
            self.total += last.T @ last
            self.rest = None
        shape = (0, 2, self.n, self.n)
        return np.concatenate(self.parts) if self.parts else np.zeros(shape, dtype=np.float32)

    def _grams(self, chunks: torch.Tensor) -> NDArray[np.floating]:
        """[k, rows, 2, n] -> [k, 2, n, n]."""
        halves = chunks.unbind(dim=2)
        grams = torch.stack([torch.bmm(half.transpose(1, 2), half) for half in halves], dim=1)
        energy = grams.diagonal(dim1=2, dim2=3).sum(dim=(0, 1))
        if chunks.dtype == torch.float32 and unsafe(energy):
            return self._grams(chunks.cpu().double())
        return np.asarray(grams.cpu().numpy())

    def _merge(self) -> None:
        """Merge pairs of neighbouring chunks; an odd last chunk stays in the total only."""
        held = np.concatenate(self.parts)
        pairs = len(held) // 2
        merged = held[: 2 * pairs].reshape(pairs, 2, 2, self.n, self.n).sum(axis=1)
        self.parts = [merged]
        self.half_rows *= 2
