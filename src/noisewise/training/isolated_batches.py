"""`IsolatedBatches`: passes records through a model in batches in which they cannot interact.

The batch sizes are those that `noisewise.training.batch_size_check` accepts; fillers complete the
last batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.training.batch_size_check import BatchSizeCheck
from noisewise.training.inputs import Inputs, concatenate, map_inputs, select

__all__ = ["IsolatedBatches", "portions"]

_log = logging.getLogger(__name__)

Run = Callable[[Inputs, Tensor, int], None]
"""(inputs [b, ...], targets [b, ...], used): process the first ``used`` rows, or raise."""


def portions(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split ``count`` records into batches of accepted sizes.

    Args:
        count: number of records.
        sizes: accepted sizes, ascending.

    Yields:
        Start, number of records and size of each batch; the rest of a batch is for fillers.
    """
    largest = sizes[-1]
    for start in range(0, count, largest):
        records = min(largest, count - start)
        yield start, records, next(size for size in sizes if size >= records)


@dataclass(frozen=True)
class IsolatedBatches:
    """Accepted batch sizes, and a synthetic record that fills incomplete batches.

    Attributes:
        check: the accepted batch sizes.
        filler: inputs [1, ...] and targets [1, ...] of the synthetic record.
    """

    check: BatchSizeCheck
    filler: tuple[Inputs, Tensor]

    def apply(self, inputs: Inputs, targets: Tensor, run: Run) -> None:
        """Pass all records to ``run``. Only records for which it raises an exception are left out.

        If a batch fails, each of its records is passed again in a batch of fillers, where it gives
        the same row as before.

        Args:
            inputs: [n, ...].
            targets: [n, ...].
            run: processes one batch.

        Raises:
            Exception: raised by ``run`` for fillers alone, so not caused by a record.
        """
        for start, records, size in portions(len(targets), self.check.sizes):
            rows = slice(start, start + records)
            part = select(inputs, rows), targets[rows]
            try:
                run(*self._filled(*part, size), records)
            except Exception:
                self.one_by_one(*part, run)

    def one_by_one(self, inputs: Inputs, targets: Tensor, run: Run) -> None:
        """Pass each record to ``run`` in a batch of fillers; see `apply`."""
        size = self.check.sizes[0]
        run(*self._filled(select(inputs, slice(0)), targets[:0], size), 0)
        for row in range(len(targets)):
            one = slice(row, row + 1)
            try:
                run(*self._filled(select(inputs, one), targets[one], size), 1)
            except Exception as error:
                kind = type(error).__name__  # the message could contain the record
                _log.warning("a record is left out: the model or the loss raised %s", kind)

    def _filled(self, inputs: Inputs, targets: Tensor, size: int) -> tuple[Inputs, Tensor]:
        """The records followed by fillers, in new memory, so that the layout is always the same."""
        missing = size - len(targets)

        def fillers(one: Tensor) -> Tensor:
            return one.expand(missing, *one.shape[1:])

        x, y = map_inputs(fillers, self.filler[0]), fillers(self.filler[1])
        inputs = map_inputs(Tensor.contiguous, inputs)
        return concatenate(inputs, x), torch.cat([targets.contiguous(), y])
