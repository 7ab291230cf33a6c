"""`Permitted`: the plans that a federation permits to its sites, as ranges, and their noise floor.

A server that weighs by noise gives all weight to an update without noise, unless it knows how much
noise every honest update has at least. That follows from the plans that the federation permits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from noisewise.aggregation.policy import noise_floor
from noisewise.checks import fraction, positive_int, positive_number
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan, make_plan

__all__ = ["Guardable", "Permitted", "floor_basis", "is_unguarded"]

_BETWEEN = 0.95  # of the least noise found: plans between those that are computed
_DEVIATIONS = 4.0  # of the energy of noise of p coordinates, whose relative deviation is sqrt(2/p)
_LEAST = 0.5  # of F: room is bounded, also for tiny models

Range = tuple[int, int]


@dataclass(frozen=True)
class Permitted:
    """With which settings a site may take part, from the least noise to the most.

    Args:
        epsilon: largest epsilon.
        delta: largest delta.
        records: smallest and largest number of records.
        batch: smallest and largest expected batch.
        epochs: smallest and largest number of local epochs.
        rounds: least number of rounds for which a budget is planned.
        clip_norm: least clipping norm.

    Example:
        >>> Permitted(epsilon=2.0, delta=1e-6, rounds=100).floor(650, 0.5, normalised=False) > 0
        True
    """

    epsilon: float = 16.0
    delta: float = 1e-4
    records: Range = (64, 400)
    batch: Range = (64, 64)
    epochs: Range = (4, 4)
    rounds: int = 3
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        positive_number("epsilon", self.epsilon)
        fraction("delta", self.delta, one_allowed=False)
        positive_int("rounds", self.rounds)
        positive_number("clip_norm", self.clip_norm)
        for name in ("records", "batch", "epochs"):
            low, high = getattr(self, name)
            positive_int(name, low)
            if positive_int(name, high) < low:
                raise InvalidValueError(name, f"{low}:{high}", "must be smallest:largest")
        if self.batch[0] > self.records[1]:
            allowed = f"must not exceed the largest number of records, {self.records[1]}"
            raise InvalidValueError("batch", self.batch[0], allowed)

    def plans(self) -> Iterator[LocalPlan]:
        """Plans at the ends of the ranges and between, among which the least noise is found.

        More epsilon, more delta, fewer rounds and a smaller clipping norm mean less noise, so only
        the extreme is taken. Records, batch and epochs go together: for the same number of steps, a
        whole multiple of the batch has the least noise.
        """
        batches = [b for b in _spread(self.batch, 4) if b <= self.records[1]]
        for batch, epochs in itertools.product(batches, sorted(set(self.epochs))):
            low, high = max(self.records[0], batch), self.records[1]
            whole = {n - n % batch for n in (*_spread((low, high), 4), low + batch - 1)}
            sizes = {low, high} | {n for n in whole if low <= n <= high}
            for records in sorted(sizes):
                spec = ClientSpec("permitted", records, batch, self.epsilon, self.delta, epochs)
                yield make_plan(spec, rounds=self.rounds, clip_norm=self.clip_norm)

    def floor(self, size: int, learning_rate: float, *, normalised: bool) -> float:
        """F for a guard: below the noise energy of every honest update, in two digits.

        Args:
            size: p, number of parameters.
            learning_rate: of the clients' local steps.
            normalised: whether updates are divided by their steps (NoiseWise).
        """
        least = noise_floor(self.plans(), size, learning_rate, normalised=normalised)
        room = max(_LEAST, 1.0 - _DEVIATIONS * math.sqrt(2.0 / positive_int("size", size)))
        return _round_down(least * _BETWEEN * room)

    def words(self) -> str:
        """One line for people."""
        return (
            f"epsilon at most {self.epsilon:g}, delta at most {self.delta:g}, "
            f"{_words(self.records)} records, batch {_words(self.batch)}, "
            f"{_words(self.epochs)} local epochs, budgets planned for at least {self.rounds} "
            f"rounds, clipping norm at least {self.clip_norm:g}"
        )


@runtime_checkable
class Guardable(Protocol):
    """An aggregator that weighs by noise and can have a `Guard`."""

    @property
    def guard(self) -> object | None:
        """The guard; None without one."""
        ...


def is_unguarded(aggregator: object) -> bool:
    """Whether an aggregator weighs by noise, and no floor protects it from quiet updates."""
    return isinstance(aggregator, Guardable) and aggregator.guard is None


def floor_basis(method: str, learning_rate: float, size: int) -> str:
    """What a noise floor depends on, besides the permitted plans, in one line."""
    return f"{method}, learning rate {learning_rate:g}, {size} parameters"


def _spread(ends: Range, number: int) -> list[int]:
    """Both ends and whole numbers between, by equal factors."""
    low, high = ends
    factor = (high / low) ** (1 / (number - 1))
    return sorted({low, high, *(round(low * factor**k) for k in range(1, number - 1))})


def _round_down(value: float) -> float:
    """``value`` in two significant digits, never more than it is."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit) * unit:.2g}")


def _words(ends: Range) -> str:
    low, high = ends
    return f"{low}" if low == high else f"{low} to {high}"
