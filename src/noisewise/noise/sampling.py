"""Select the coordinates that an estimator reads: all, a random sample, or sub-matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.checks import non_negative_int, positive_int
from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource, Updates, as_tensor, row_blocks

__all__ = [
    "Drawn",
    "SampleSize",
    "SampledEstimator",
    "draw_rows",
    "sample_index",
    "submatrices",
]

SampleSize = int | Literal["auto"] | None
"""Number of coordinates p' to read; None for all; ``auto`` for all unless p n^2 is large."""

_RUN = 32  # rows drawn together: fewer places to read in a file, and chunks of neighbours
_LEAST = 10_000  # fewest rows of ``auto``: a relative error of sqrt(2/p') = 1.4%


@dataclass(frozen=True)
class Drawn:
    """The rows to estimate from, and the number of rows that they were drawn from.

    Attributes:
        values: [p', n], or the updates themselves if all rows are read.
        total: p; None if the updates are an iterator that has not been read yet.
    """

    values: Updates
    total: int | None

    def scale(self, rows: int) -> float:
        """Return p / p', the factor for an energy that was computed on ``rows`` = p' rows."""
        return 1.0 if self.total is None else self.total / rows


@dataclass(frozen=True)
class SampledEstimator:
    """What the estimators share that read a sample of the coordinates.

    Attributes:
        sample: number of coordinates to read, None for all, or ``auto`` (see `draw_rows`).
        seed: seed of the sample. None draws a new, unpredictable sample for each estimate.
    """

    sample: SampleSize = "auto"
    seed: int | None = 0

    def __post_init__(self) -> None:
        if self.sample is not None and self.sample != "auto":
            try:
                positive_int("sample", self.sample)
            except InvalidValueError:
                allowed = 'must be a whole number >= 1, None for all rows, or "auto"'
                raise InvalidValueError("sample", self.sample, allowed) from None
        if self.seed is not None:
            non_negative_int("seed", self.seed)

    @property
    def takes_blocks(self) -> Literal[True]:
        """See `StreamingEstimator`."""
        return True

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.reseeding.Reseedable`."""
        return replace(self, seed=seed)


def draw_rows(
    updates: Updates,
    sample: SampleSize,
    seed: int | None,
    budget: int,
    *,
    one_pass: bool,
    most: int | None = None,
) -> Drawn:
    """Draw the rows to estimate from; updates that are not sampled are returned unread.

    The noise of an update has the same variance in every coordinate, so p' random coordinates
    determine it with a relative error of about sqrt(2 / p'), at a cost that does not depend on p.
    The paper uses the first rows (its section on scalability), which belong to one layer; this
    sample comes from the whole model.

    Args:
        updates: [p, n], or a source or iterator of row blocks.
        sample: p'; None for all rows. ``auto`` uses all rows if p n^2 <= ``budget``, and otherwise
            budget / n^2 rows, but at least 10,000.
        seed: seed of the sample; None for the operating system's randomness. A client that can
            predict the sample could leave out the noise there, so a deployed server uses None.
        budget: see ``sample``.
        one_pass: whether the estimator reads an iterator once without storing it. ``auto`` then
            does not sample iterators, because that would save nothing.
        most: upper limit of ``auto``, for estimators whose cost is dominated by passes over the
            rows rather than by n^2.

    Returns:
        The rows [p', n], and p where it is known.

    Raises:
        UpdateError: the updates are malformed.
    """
    if isinstance(updates, torch.Tensor | np.ndarray):
        updates = updates if updates.ndim == 2 and 0 not in updates.shape else as_tensor(updates)
    elif not isinstance(updates, RowSource):
        if sample is None or (sample == "auto" and one_pass):
            return Drawn(updates, None)
        return _draw_from_iterator(updates, sample, seed, budget, most)
    p, n = (int(size) for size in updates.shape)
    count = _count(n, sample, budget, most)
    if count is None or count >= p:
        return Drawn(updates, p)
    index = sample_index(p, count, seed)
    if isinstance(updates, RowSource):
        return Drawn(updates.take(index), p)
    if isinstance(updates, torch.Tensor):
        return Drawn(updates[torch.from_numpy(index).to(updates.device)], p)
    return Drawn(updates[index], p)


def sample_index(p: int, count: int, seed: int | None) -> NDArray[np.int64]:
    """Draw ``count`` of the rows 0..p-1, in ascending order.

    The rows are divided into strata of equal size, and a run of 32 neighbouring rows is drawn at a
    random position in each. So every layer is represented in proportion to its size, and a file is
    read in few places. If that many runs would cover more than half of the rows, single rows are
    drawn instead.

    Args:
        p: number of rows.
        count: number of rows to draw; all rows if it is p or more.
        seed: seed of the sample; None for the operating system's randomness.

    Returns:
        [min(count, p)] row numbers.
    """
    if count >= p:
        return np.arange(p)
    rng = np.random.default_rng(seed)
    runs = -(-count // _RUN)
    if runs * _RUN > p // 2:
        return np.sort(rng.choice(p, count, replace=False))
    edges = np.arange(runs + 1) * p // runs
    last_offset = np.diff(edges) - _RUN
    starts = edges[:-1] + np.floor(rng.random(runs) * (last_offset + 1)).astype(np.int64)
    return np.asarray((starts[:, None] + np.arange(_RUN)).ravel()[:count])


def submatrices(p: int, rows: int, number: int | None) -> list[slice]:
    """Return the rows of the paper's sub-matrices M_1 .. M_Q, Q = floor(p / p').

    The last sub-matrix ends with the last row, as in the paper.

    Args:
        p: number of rows of M.
        rows: p', number of rows of a sub-matrix. If p' >= p, the only sub-matrix is M.
        number: how many sub-matrices, evenly spaced from the first; None for all.

    Returns:
        One slice of the rows for each sub-matrix.
    """
    if rows >= p:
        return [slice(0, p)]
    q = p // rows
    starts = [j * rows for j in range(q - 1)] + [p - rows if q > 1 else 0]
    if number is None or number >= q:
        chosen = starts
    else:
        chosen = [starts[j * q // number] for j in range(number)]
    return [slice(start, start + rows) for start in chosen]


def _count(n: int, sample: SampleSize, budget: int, most: int | None) -> int | None:
    if sample != "auto":
        return sample
    count = max(_LEAST, budget // n**2)
    return count if most is None else min(count, most)


def _draw_from_iterator(
    updates: Iterable[object], sample: SampleSize, seed: int | None, budget: int, most: int | None
) -> Drawn:
    """Draw a uniform sample from an iterator of unknown length.

    Each row gets a random key, and the rows with the smallest keys are kept.
    """
    rng = np.random.default_rng(seed)
    held: list[torch.Tensor] = []
    keys: list[NDArray[np.float64]] = []
    total = count = 0

    def keep_smallest() -> None:
        all_keys = np.concatenate(keys)
        best = np.sort(np.argpartition(all_keys, count - 1)[:count])
        held[:] = [torch.cat(held)[torch.from_numpy(best)]]
        keys[:] = [all_keys[best]]

    for block in row_blocks(updates, 1 << 20):  # type: ignore[arg-type]
        count = count or _count(block.shape[1], sample, budget, most) or 1
        total += block.shape[0]
        held.append(block.cpu())
        keys.append(rng.random(block.shape[0]))
        if sum(len(part) for part in keys) > 2 * count:
            keep_smallest()
    if sum(len(part) for part in keys) > count:
        keep_smallest()
    return Drawn(torch.cat(held), total)
