"""`SpendingLimit`: does one more round fit into a budget? Mostly answered without an accountant."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from noisewise.privacy import accounting
from noisewise.privacy.composition import (
    Counts,
    add_steps,
    answer,
    composed_epsilon,
    key_of,
    merged,
    multiple,
    shared_grids,
    within_bounds,
)

__all__ = ["SpendingLimit", "limit_for"]

_MARGIN, _MARGIN_OF_ONE_KIND, _MARGIN_ON_ONE_GRID = 0.003, 0.0005, 1e-7
"""Counts far ahead must stay this share below the limit to vouch for smaller counts: two upper
bounds of nearly the same spending can differ by less. Grids are settled to 0.2%; steps of one kind
have nearly the same grid; on one grid epsilon grows with the counts, up to rounding."""

_NEAR = 0.002
"""A look ahead ends so near below that, or nearer where little is left."""

_MOST_LOOKS, _MOST_CERTIFICATES, _LONGEST_WINDOW = 12, 4, 64
_MOST_DOUBLINGS = 24


@dataclass(frozen=True)
class _Certificate:
    """All counts from ``low`` to ``high`` are within the limit.

    Attributes:
        low: counts for which the accountant itself gave an epsilon above 0.
        high: counts with an epsilon just below the limit.
        share: that epsilon over the limit.
        grid: on which it was computed; None if not on a single one.
    """

    low: Counts
    high: Counts
    share: float
    grid: object

    def covers(self, total: Counts, accountant: str) -> bool:
        """Whether it vouches for ``total``."""
        if not (_at_most(self.low, total) and _at_most(total, self.high)):
            return False
        if self.share <= 1 - _MARGIN:
            return True
        if len(self.high) == 1 and self.share <= 1 - _MARGIN_OF_ONE_KIND:
            return True
        return self.grid is not None and self.grid == _single_grid(total, accountant)


def _at_most(counts: Counts, others: Counts) -> bool:
    return all(steps <= others.get(kind, 0) for kind, steps in counts.items())


def _single_grid(counts: Counts, accountant: str) -> object:
    """What two counts share if the one's epsilon is at most the other's; None if nothing is sure.

    Sums of Renyi DP at all orders grow with the counts. So does epsilon by loss distributions of
    the same kinds on the same grid.
    """
    key = key_of(counts)
    if accountant != "pld":
        return accountant if len(key) > 1 else None
    parts = merged(key)
    if any(z < (accounting.SMALLEST_PLD_NOISE if q < 1 else 0.05) for q, z, _ in parts):
        return None
    if len(parts) > 1:
        grids = shared_grids(parts)
    elif parts[0][0] < 1:
        grids = accounting.grid_widths(*parts[0])
    else:
        return None
    return (len(parts) > 1, grids[0]) if len(grids) == 1 else None


class SpendingLimit:
    """Answers "are these counts within the limit?", mostly from what it already knows.

    Spending grows with the counts. So counts that lie between known good ones are within the
    limit, and counts that are nowhere below known bad ones are beyond it; an accountant is asked
    only in between. From its second question on, the limit looks ahead in the direction of the
    latest requests (one plan, or several in turn), so that a process that reserves many rounds asks
    an accountant a few dozen times in all. An answer from memory is the accountant's, or stricter.

    Args:
        epsilon: the limit.
        delta: at which delta.
        accountant: one of `noisewise.privacy.accounting.ACCOUNTANTS`.
    """

    def __init__(self, epsilon: float, delta: float, accountant: str) -> None:
        self.epsilon, self._delta, self._accountant = epsilon, delta, accountant
        self._lock = threading.Lock()
        self._certificates: list[_Certificate] = []
        self._last: Counts | None = None
        self._beyond: list[Counts] = []
        self._asked: list[Counts] = []
        self._hits, self._window, self._pause, self._waited = 4, 1, 0, 0

    def allows(
        self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int
    ) -> bool:
        """Whether ``counts`` plus the steps are within the limit.

        Raises:
            InvalidValueError: outside of the accountants' bounds.
            AccountingError: the accountant gives no number to promise.
        """
        total = add_steps(counts, sample_rate, noise_multiplier, steps)
        with self._lock:
            if total == self._last:
                return True
            if any(one.covers(total, self._accountant) for one in self._certificates):
                self._hits += 1
                return True
            if any(_at_most(bad, total) for bad in self._beyond):
                return False
            if not self._fits(total):
                self._beyond = [*self._beyond[-7:], total]
                return False
            self._last = total
            self._asked = [*self._asked[-_LONGEST_WINDOW:], total]
            if len(self._asked) > 1:
                self._consider_looking(total)
            return True

    def room(self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int) -> int:
        """How many times the steps still fit, exactly (up to 2^24, and the accountants' bounds)."""

        def fits(times: int) -> bool:
            more = add_steps(counts, sample_rate, noise_multiplier, times * steps)
            known = within_bounds(more, self._delta, self._accountant)
            return known and self._fits(more)

        return _largest(fits)

    # ------------------------------------------------------------ looking ahead

    def _consider_looking(self, total: Counts) -> None:
        """Look ahead, in a longer view and less often if the last certificates were of no use."""
        self._waited += 1
        if self._waited <= self._pause:
            return
        if self._hits < 4:
            self._window = min(2 * self._window, 2 * _LONGEST_WINDOW)
            self._pause = min(2 * self._pause + 1, _LONGEST_WINDOW)
        else:
            self._pause = 0
        self._hits = self._waited = 0
        self._look_ahead(total, self._direction(total))

    def _direction(self, total: Counts) -> Counts:
        """What the latest requests added; all counts if that is not known."""
        if self._window < len(self._asked):
            before = self._asked[-1 - self._window]
            if _at_most(before, total):
                added = {kind: steps - before.get(kind, 0) for kind, steps in total.items()}
                return {kind: steps for kind, steps in added.items() if steps}
        return total

    def _look_ahead(self, total: Counts, direction: Counts) -> None:
        """Find counts ahead that are just within the limit, in a few secant steps.

        Spending follows a power of the variance of the loss, between its root and itself.
        """
        start, growth = _variance(total), _variance(direction)
        spent = answer(key_of(total), self._delta, self._accountant)
        if not (spent > 0 and growth > 0):
            return
        near = min(_NEAR, (1 - spent / self.epsilon) / 8)
        best: tuple[Counts, float, object] | None = None
        good, bad, at, power = 0.0, math.inf, 0.0, 0.6
        for _ in range(_MOST_LOOKS):
            aim = (1 - near / 2) * self.epsilon
            times = ((start + at * growth) * (aim / spent) ** (1 / power) - start) / growth
            if not good < times < bad:
                times = (good + bad) / 2 if math.isfinite(bad) else 2 * good + 1
            ahead = {
                kind: steps + int(times * direction.get(kind, 0)) for kind, steps in total.items()
            }
            if ahead == total:
                break
            found = answer(key_of(ahead), self._delta, self._accountant)
            grid = _single_grid(ahead, self._accountant)
            if found <= 0:  # beyond what the accountant answers for
                bad = times
                continue
            if found <= (1 - self._margin(ahead, grid)) * self.epsilon:
                good, best = times, (ahead, found / self.epsilon, grid)
                if found >= (1 - self._margin(ahead, grid) - near) * self.epsilon:
                    break
            else:
                bad = times
            if times != at and found != spent:
                ratio = (start + times * growth) / (start + at * growth)
                power = min(max(math.log(found / spent) / math.log(ratio), 0.3), 3.0)
            at, spent = times, found
        if best is not None:
            certificate = _Certificate(total, *best)
            self._certificates = [*self._certificates[1 - _MOST_CERTIFICATES :], certificate]

    @staticmethod
    def _margin(counts: Counts, grid: object) -> float:
        if grid is not None:
            return _MARGIN_ON_ONE_GRID
        return _MARGIN_OF_ONE_KIND if len(counts) == 1 else _MARGIN

    # ------------------------------------------------------------ asking the accountant

    def _fits(self, counts: Counts) -> bool:
        """Whether the accountant's epsilon of the counts is at most the limit.

        Where it says 0 to them, an epsilon of a multiple is an upper bound, and quicker than the
        least multiple that `composed_epsilon` looks for.
        """
        if within_bounds(counts, self._delta, self._accountant):
            key = key_of(counts)
            for factor in (1, 4, 16, 64, 256):
                found = answer(multiple(key, factor), self._delta, self._accountant)
                if found > 0:
                    if found <= self.epsilon:
                        return True
                    break
        return composed_epsilon(counts, self._delta, self._accountant) <= self.epsilon


@functools.lru_cache(maxsize=64)
def limit_for(epsilon: float, delta: float, accountant: str) -> SpendingLimit:
    """The limit of this process for a budget; what it found out serves ledgers opened later."""
    return SpendingLimit(epsilon, delta, accountant)


def _variance(counts: Counts) -> float:
    """Variance of the loss of all steps, roughly: the scale on which spending grows."""
    return sum(steps * accounting.step_loss_std(q, z) ** 2 for (q, z), steps in counts.items())


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number for which a falling condition holds; 0 if for none from 1 on."""
    low, high = 0, 1
    while high < 1 << _MOST_DOUBLINGS and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
