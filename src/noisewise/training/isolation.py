"""Records go through a model in batches of accepted sizes, without any effect on each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.training.row_check import RowCheck

__all__ = ["Isolation", "portions"]

_log = logging.getLogger(__name__)

Run = Callable[[Tensor, Tensor, int], None]
"""(inputs [b, ...], targets [b, ...], used): process the first ``used`` rows, or raise."""


def portions(count: int, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut ``count`` records into batches of accepted sizes: (start, records, size) each.

    Args:
        count: number of records.
        rows: accepted sizes, ascending.
    """
    largest = rows[-1]
    for start in range(0, count, largest):
        records = min(largest, count - start)
        yield start, records, next(size for size in rows if size >= records)


@dataclass(frozen=True)
class Isolation:
    """Accepted batch sizes, and a made-up record that fills up a batch.

    Attributes:
        check: what the self-check found.
        filler: inputs [1, ...] and targets [1, ...].
    """

    check: RowCheck
    filler: tuple[Tensor, Tensor]

    def apply(self, inputs: Tensor, targets: Tensor, run: Run) -> None:
        """Pass all records to ``run``. A record for which it raises is left out, and no other.

        If a batch fails, its records go one by one, each in a batch of fillers, which gives them
        the same rows as before.

        Raises:
            Exception: whatever ``run`` raises for fillers alone; then no record is at fault.
        """
        for start, records, size in portions(len(inputs), self.check.rows):
            part = inputs[start : start + records], targets[start : start + records]
            try:
                run(*self._filled(*part, size), records)
            except Exception:
                self._one_by_one(*part, run)

    def _one_by_one(self, inputs: Tensor, targets: Tensor, run: Run) -> None:
        size = self.check.rows[0]
        run(*self._filled(inputs[:0], targets[:0], size), 0)
        for pair in zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True):
            try:
                run(*self._filled(*pair, size), 1)
            except Exception as error:
                kind = type(error).__name__  # its text may hold the record
                _log.warning("a record is left out: the model or the loss raised %s", kind)

    def _filled(self, inputs: Tensor, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The records and then fillers, in memory of their own: the layout never varies."""
        missing = size - len(inputs)
        x, y = (value.expand(missing, *value.shape[1:]) for value in self.filler)
        return torch.cat([inputs.contiguous(), x]), torch.cat([targets.contiguous(), y])
