"""`RecordAxes`: the axis of the records in each tensor that a model combines with parameters.

A tensor inside of a model may have the records on its first axis, on its second one (time first)
or several rows for each record, or it may not depend on the records at all (position numbers).
Shapes alone are ambiguous: a batch may have as many records as a sequence has positions. So the
model runs on two batches of different, unusual sizes. If both runs give the same axes, these are
used for all later batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from noisewise.training.engine.layer_interface import NotCoveredError

__all__ = ["FIRST", "PROBE_SIZES", "RecordAxes", "RecordAxis", "arranged"]

PROBE_SIZES = ((7, 11), (13, 17), (19, 23))
"""Batch sizes to compare; the next pair is used if a size occurs in the model by accident."""


class RecordAxis(NamedTuple):
    """The axis ``dim`` of a tensor, with ``factor`` rows for each record."""

    dim: int
    factor: int = 1


FIRST = RecordAxis(0)

_Event = tuple[str, tuple[tuple[int, ...], ...]]
_Log = list[tuple[_Event, list[RecordAxis | None]]]


def arranged(tensor: Tensor, axis: RecordAxis, records: int) -> Tensor:
    """The tensor with the records on its first axis: [records, ...]."""
    if axis.factor > 1:
        before, after = tensor.shape[: axis.dim], tensor.shape[axis.dim + 1 :]
        tensor = tensor.reshape(*before, records, axis.factor, *after)
    return tensor if axis.dim == 0 else tensor.movedim(axis.dim, 0)


class RecordAxes:
    """The axes of the records in all tensors that a model combines with parameters, in order."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[int, _Log]] = {}
        self._log: _Log | None = None  # of a run that guesses
        self._expected: Iterator[tuple[_Event, list[RecordAxis | None]]] = iter(())
        self._size = 0
        self.records = 0
        self.is_trial = False

    def knows(self, form: object) -> bool:
        """Whether `learn` succeeded for records of this form."""
        return form in self._known

    def start(self, form: object, records: int) -> None:
        """Begin a run of the model on a batch."""
        self.records = records
        if self._log is not None:
            self._log.clear()
            return
        self._size, log = self._known.get(form, (0, []))
        self._expected = iter(log)

    @contextmanager
    def trial(self) -> Iterator[_Log]:
        """Runs inside of the block guess axes from shapes, and write them into the result."""
        self._log, self.is_trial = [], True
        try:
            yield self._log
        finally:
            self._log, self.is_trial = None, False

    def learn(self, form: object, logs: tuple[_Log, _Log], sizes: tuple[int, int]) -> bool:
        """Store the axes if two runs with different batch sizes agree on them, else False."""
        one, other = logs
        if [axes for _, axes in one] != [axes for _, axes in other]:
            return False
        pairs = zip(one, other, strict=True)
        if not all(_agree(a, b, axes, *sizes) for (a, axes), (b, _) in pairs):
            return False
        self._known[form] = (sizes[0], one)
        return True

    def of(self, name: str, shapes: Sequence[Sequence[int]]) -> list[RecordAxis | None]:
        """The axis of the records in each tensor of the next step; None if it has no records.

        Args:
            name: of the layer or function.
            shapes: of its input tensors.

        Raises:
            NotCoveredError: the step is not the one that the trial runs had at this point.
        """
        event = (name, tuple(tuple(shape) for shape in shapes))
        if self._log is not None:
            guesses = [_guess(shape, self.records) for shape in event[1]]
            self._log.append((event, guesses))
            return guesses
        expected, axes = next(self._expected, (None, []))
        if expected is None or not _agree(expected, event, axes, self._size, self.records):
            raise NotCoveredError(f"the model does not call '{name}' in every pass")
        return axes


def _guess(shape: tuple[int, ...], records: int) -> RecordAxis | None:
    if shape and shape[0] == records:
        return FIRST
    if len(shape) > 1 and shape[1] == records:
        return RecordAxis(1)
    if shape and shape[0] > records and shape[0] % records == 0:
        return RecordAxis(0, shape[0] // records)
    return None


def _agree(one: _Event, other: _Event, axes: list[RecordAxis | None], a: int, b: int) -> bool:
    """Whether two steps are the same up to the numbers of records, a and b."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    for first, second, axis in zip(one[1], other[1], axes, strict=True):
        expected = list(first)
        if axis is not None:
            if first[axis.dim] != a * axis.factor:
                return False
            expected[axis.dim] = b * axis.factor
        if expected != list(second):
            return False
    return True
