"""`Stopwatch`: the time that each part of a run's rounds takes. It is not part of the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["PARTS", "Part", "Stopwatch"]

Part = Literal["local training", "aggregation", "evaluation", "accounting", "checkpoint"]
PARTS: tuple[Part, ...] = (
    "local training",
    "aggregation",
    "evaluation",
    "accounting",
    "checkpoint",
)


@dataclass
class Stopwatch:
    """Wall-clock seconds of each part of the rounds; the rest is ``other``.

    Example:
        >>> clock = Stopwatch()
        >>> with clock.round(), clock.part("evaluation"):
        ...     pass
        >>> [row["part"] for row in clock.rows()]
        ['local training', 'aggregation', 'evaluation', 'accounting', 'checkpoint', 'other']
        >>> clock.rounds
        1
    """

    rounds: int = 0
    total: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Measure one whole round."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total += time.perf_counter() - start
            self.rounds += 1

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Measure one part within a round; parts must not overlap."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def overhead(self) -> float:
        """Share of the time that is not local training, in [0, 1]; 0 before the first round."""
        return 1 - self.seconds["local training"] / self.total if self.total > 0 else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """One row for each part: seconds, seconds per round, share of the total."""
        parts = dict(self.seconds) | {"other": max(0.0, self.total - sum(self.seconds.values()))}
        return [
            {
                "part": name,
                "seconds": spent,
                "seconds_per_round": spent / max(1, self.rounds),
                "share": spent / self.total if self.total > 0 else 0.0,
            }
            for name, spent in parts.items()
        ]

    def summary(self) -> dict[str, Any]:
        """The content of ``timing.json``."""
        return {
            "rounds": self.rounds,
            "seconds": self.total,
            "rounds_per_minute": 60 * self.rounds / self.total if self.total > 0 else 0.0,
            "overhead": self.overhead,
            "parts": self.rows(),
        }
