"""`Permitted`: ranges of the plans that a federation permits to its sites, and their noise floor.

A server that weights by noise gives almost the whole weight to an update without noise, unless the
server knows the least noise of an honest update. This follows from the permitted plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from noisewise.aggregation.noise_floor import noise_floor
from noisewise.checks import fraction, positive_int, positive_number
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan, make_plan

__all__ = ["Permitted", "floor_basis"]

_BETWEEN = 0.95  # factor for plans between those that are computed, which may have less noise
_DEVIATIONS = 4.0  # margin in standard deviations of the noise energy; a relative one is sqrt(2/p)
_LEAST = 0.5  # smallest factor for this margin, for tiny models

Range = tuple[int, int]


@dataclass(frozen=True)
class Permitted:
    """The settings with which a site may take part.

    Args:
        epsilon: largest epsilon.
        delta: largest delta.
        records: smallest and largest number of records.
        batch: smallest and largest expected batch size.
        epochs: smallest and largest number of local epochs.
        rounds: smallest number of rounds for which a budget is planned.
        clip_norm: smallest clipping norm.

    Raises:
        InvalidValueError: a value or range is invalid; the message names it.

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
        """Yield permitted plans to search for the least noise.

        A larger epsilon or delta, fewer rounds and a smaller clipping norm always mean less noise,
        so only the extreme values are used. For records, batch and epochs, the ends of the ranges
        and values between them are used. Among plans with the same number of steps, the least noise
        is at a number of records that is a multiple of the batch size.
        """
        batches = [b for b in _geometric(self.batch, 4) if b <= self.records[1]]
        for batch, epochs in itertools.product(batches, sorted(set(self.epochs))):
            low, high = max(self.records[0], batch), self.records[1]
            multiples = {n - n % batch for n in (*_geometric((low, high), 4), low + batch - 1)}
            sizes = {low, high} | {n for n in multiples if low <= n <= high}
            for records in sorted(sizes):
                spec = ClientSpec("permitted", records, batch, self.epsilon, self.delta, epochs)
                yield make_plan(spec, rounds=self.rounds, clip_norm=self.clip_norm)

    def floor(self, size: int, learning_rate: float, *, normalised: bool) -> float:
        """Compute a noise floor F for `Guard`, below the noise energy of honest updates.

        Args:
            size: p, number of parameters.
            learning_rate: of the clients' local steps.
            normalised: whether updates are divided by their steps (NoiseWise).

        Returns:
            F, rounded down to two significant digits.
        """
        least = noise_floor(self.plans(), size, learning_rate, normalised=normalised)
        margin = max(_LEAST, 1.0 - _DEVIATIONS * math.sqrt(2.0 / positive_int("size", size)))
        return _round_down(least * _BETWEEN * margin)

    def words(self) -> str:
        """Return the settings as one line of text."""
        epochs, rounds = "s" * (self.epochs[1] != 1), "s" * (self.rounds != 1)
        return (
            f"epsilon at most {self.epsilon:g}, delta at most {self.delta:g}, "
            f"{_words(self.records)} records, batch {_words(self.batch)}, "
            f"{_words(self.epochs)} local epoch{epochs}, budgets planned for at least "
            f"{self.rounds} round{rounds}, clipping norm at least {self.clip_norm:g}"
        )


def floor_basis(method: str, learning_rate: float, size: int) -> str:
    """Return one line with the settings that a noise floor depends on, besides permitted plans.

    `noisewise flower new` stores it with the floor, and the server app compares it.
    """
    return f"{method}, learning rate {learning_rate:g}, {size} parameters"


def _geometric(ends: Range, number: int) -> list[int]:
    """Return up to ``number`` integers from one end to the other, spaced by equal factors."""
    low, high = ends
    factor = (high / low) ** (1 / (number - 1))
    return sorted({low, high, *(round(low * factor**k) for k in range(1, number - 1))})


def _round_down(value: float) -> float:
    """Return ``value`` rounded down to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit) * unit:.2g}")


def _words(ends: Range) -> str:
    low, high = ends
    return f"{low}" if low == high else f"{low} to {high}"
