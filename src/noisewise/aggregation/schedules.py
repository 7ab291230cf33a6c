"""`Schedule`: the clients' learning rate over the rounds of a run.

A client trains a round with the rate ``learning_rate * factor(round)``. The server divides the
updates by the factor before it aggregates them and multiplies the result by it. Therefore an
aggregator, a guard and an estimator that remembers earlier rounds always see updates of the same
scale: noise energies and the noise floor are those of ``learning_rate``. The factor is public and
depends on the number of the round only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from noisewise.checks import fraction, non_negative_int, positive_int
from noisewise.errors import InvalidValueError

__all__ = ["SCHEDULES", "Schedule"]


def _step(schedule: Schedule, done: int, total: int) -> float:
    return schedule.decay ** (done // schedule.every)


_SHAPES: Mapping[str, Callable[[Schedule, int, int], float]] = {
    "constant": lambda schedule, done, total: 1.0,
    "linear": lambda schedule, done, total: 1.0 - done / total,
    "cosine": lambda schedule, done, total: 0.5 * (1.0 + math.cos(math.pi * done / total)),
    "step": _step,
}
SCHEDULES = tuple(_SHAPES)
"""The names of all schedules."""


@dataclass(frozen=True)
class Schedule:
    """Factors of the learning rate, by the number of the round.

    Attributes:
        name: "constant", "linear" or "cosine" (from 1 towards ``final`` over the rounds), or "step"
            (times ``decay`` after every ``every`` rounds).
        rounds: T, over which "linear" and "cosine" fall; later rounds have the last factor.
        warmup_rounds: first rounds in which the factor rises evenly to 1.
        final: the factor that "linear" and "cosine" tend to, from 0 (never reached) to 1.
        every: rounds between two steps of "step".
        decay: factor of each step.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> Schedule("linear", rounds=4).factors()
        [1.0, 0.75, 0.5, 0.25]
        >>> Schedule("constant", rounds=4, warmup_rounds=2).factors()
        [0.5, 1.0, 1.0, 1.0]
    """

    name: str
    rounds: int
    warmup_rounds: int = 0
    final: float = 0.0
    every: int = 1
    decay: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in _SHAPES:
            allowed = "must be one of " + ", ".join(_SHAPES)
            raise InvalidValueError("schedule.name", self.name, allowed)
        positive_int("schedule.rounds", self.rounds)
        non_negative_int("schedule.warmup_rounds", self.warmup_rounds)
        if self.warmup_rounds >= self.rounds:
            allowed = f"must be less than the {self.rounds} rounds of the schedule"
            raise InvalidValueError("schedule.warmup_rounds", self.warmup_rounds, allowed)
        positive_int("schedule.every", self.every)
        fraction("schedule.decay", self.decay)
        if self.final != 0.0:
            fraction("schedule.final", self.final)

    def factor(self, round_number: int) -> float:
        """The factor of a round, counted from 1; above 0 and at most 1."""
        number = min(round_number, self.rounds)
        if number <= self.warmup_rounds:
            return number / self.warmup_rounds
        done, total = number - 1 - self.warmup_rounds, self.rounds - self.warmup_rounds
        shape = max(_SHAPES[self.name](self, done, total), 1e-12)  # "step" may underflow
        if self.name in ("linear", "cosine"):
            shape = self.final + (1.0 - self.final) * shape
        return shape

    def factors(self) -> list[float]:
        """The factors of all rounds."""
        return [self.factor(number) for number in range(1, self.rounds + 1)]
