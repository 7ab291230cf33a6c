"""Which coordinates an estimator reads: all, a random sample, or the paper's sub-matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.checks import non_negative_int, positive_int
from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource, Updates, as_tensor, row_blocks

__all__ = ["Drawn", "SampleSize", "check_sample", "draw_rows", "sample_index", "submatrices"]

SampleSize = int | Literal["auto"] | None
"""Number of coordinates p' to read; None for all; ``auto`` for all unless p n^2 is large."""

_RUN = (
    32  # neighbouring rows that are drawn together: files are read in few places, chunks stay whole
)
_LEAST = 10_000  # rows that ``auto`` never goes below: a relative error of sqrt(2/p') = 1.4%


@dataclass(frozen=True)
class Drawn:
    """The rows to estimate from, and of how many they are a sample.

    Attributes:
        values: [p', n], or the updates themselves where all rows are read.
        total: p; None while the updates are an iterator that is still to be read to its end.
    """

    values: Updates
    total: int | None

    def scale(self, rows: int) -> float:
        """The factor p / p', by which an energy found on ``rows`` = p' rows is multiplied."""
        return 1.0 if self.total is None else self.total / rows


def check_sample(sample: SampleSize, seed: int | None) -> None:
    """Refuse a sample size or seed that makes no sense, by name."""
    if sample is not None and sample != "auto":
        try:
            positive_int("sample", sample)
        except InvalidValueError:
            allowed = 'must be a whole number >= 1, None for all rows, or "auto"'
            raise InvalidValueError("sample", sample, allowed) from None
    if seed is not None:
        non_negative_int("seed", seed)


def draw_rows(
    updates: Updates,
    sample: SampleSize,
    seed: int | None,
    budget: int,
    *,
    one_pass: bool,
    most: int | None = None,
) -> Drawn:
    """Rows to estimate from; what is not sampled is handed through unread.

    The noise of an update has the same variance in every coordinate, so p' random ones give it to
    a relative error of about sqrt(2 / p') at a cost that does not grow with p. The paper takes the
    first rows (its section on scalability), which are one layer; these are from the whole model.

    Args:
        updates: [p, n], or a source or iterator of row blocks.
        sample: p'; None for all rows; ``auto`` for all rows while p n^2 <= ``budget``, and then
            the number that keeps p' n^2 there (but 10,000 at least).
        seed: of the choice; None takes the operating system's randomness. A client that knew the
            choice could spare those coordinates its noise, so a deployed server takes None.
        budget: see ``sample``.
        one_pass: the estimator reads an iterator to its end without keeping it, so ``auto`` has
            nothing to save there.
        most: ``auto`` takes no more rows than this: with few columns it is passes over rows that
            cost, not n^2.
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
    """``count`` of the rows 0..p-1, sorted: short runs, one at random in each of equal strata.

    Every layer is then represented by its share, and a file is read in few places.
    """
    if count >= p:
        return np.arange(p)
    rng = np.random.default_rng(seed)
    runs = -(-count // _RUN)
    if runs * _RUN > p // 2:  # too dense for runs
        return np.sort(rng.choice(p, count, replace=False))
    edges = np.arange(runs + 1) * p // runs
    room = np.diff(edges) - _RUN
    starts = edges[:-1] + np.floor(rng.random(runs) * (room + 1)).astype(np.int64)
    return np.asarray((starts[:, None] + np.arange(_RUN)).ravel()[:count])


def submatrices(p: int, rows: int, number: int | None) -> list[slice]:
    """The paper's sub-matrices M_1 .. M_Q of ``rows`` = p' rows each, Q = floor(p / p').

    The last one is aligned to the end, as in the paper. ``number`` takes only so many of them,
    evenly spread and beginning with the first; None takes all. With p' >= p it is M itself.
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
    """A uniform sample of an iterator of unknown length: the rows with the smallest random keys."""
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
