"""`SpendingLimit`: whether one more round fits into a budget, mostly without an accountant."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from noisewise.privacy.composition import (
    Counts,
    add_steps,
    composed_epsilon,
    epsilon_or_zero,
    kinds_of,
    merge_unsampled,
    multiplied,
    within_bounds,
)
from noisewise.privacy.pld_accountant import fits_in_memory, grid_widths, loss_variance

__all__ = ["SpendingLimit", "limit_for"]

_MARGIN, _MARGIN_OF_ONE_KIND, _MARGIN_ON_ONE_GRID = 0.003, 0.0005, 1e-7
"""A certificate's largest counts must have an epsilon this share below the limit: two upper bounds
of nearly the same spending can differ by less than this share. The share depends on whether the
upper bounds come from refined grids (0.2% tolerance), from steps of one kind (nearly the same grid)
or from the same grid, on which epsilon grows with the counts up to rounding."""

_NEAR = 0.002
"""The search for a certificate ends this share below the largest allowed epsilon, or nearer where
little budget is left."""

_MOST_EVALUATIONS, _MOST_CERTIFICATES, _LONGEST_WINDOW = 12, 4, 64
_MOST_DOUBLINGS = 24


@dataclass(frozen=True)
class _Certificate:
    """States that all counts from ``low`` to ``high`` are within the limit.

    Attributes:
        low: counts for which the accountant returned an epsilon above 0.
        high: counts with an epsilon just below the limit.
        share: this epsilon divided by the limit.
        grid: the grid that it was computed on, see `_single_grid`; None if there were several.
    """

    low: Counts
    high: Counts
    share: float
    grid: object

    def covers(self, total: Counts, accountant: str) -> bool:
        """Whether ``total`` is between ``low`` and ``high`` and comparable to ``high``."""
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
    """A value that is equal for counts whose epsilons are comparable; None if they may not be.

    Larger counts with the same value never have a smaller epsilon: sums of Renyi DP at all orders
    grow with the counts, and so does epsilon by loss distributions on the same grid.
    """
    kinds = kinds_of(counts)
    if accountant != "pld":
        return accountant if len(kinds) > 1 else None
    kinds = merge_unsampled(kinds)
    if not fits_in_memory(kinds) or (len(kinds) == 1 and kinds[0][0] == 1):
        return None
    widths = grid_widths(kinds)
    return (len(kinds) > 1, widths[0]) if len(widths) == 1 else None


class SpendingLimit:
    """Decides whether counts of steps are within a limit of epsilon, mostly from earlier results.

    Epsilon grows with the counts. So counts between two counts known to be within the limit are
    within it, and counts of at least those known to exceed it exceed it; the accountant is called
    only for others. From the second call on, the limit searches ahead in the direction of the
    latest requests (one plan, or several in turn) for counts just within the limit, so a process
    that reserves thousands of rounds calls an accountant a few dozen times. A decision without the
    accountant is the same as with it, or stricter.

    Args:
        epsilon: the limit.
        delta: at which delta.
        accountant: one of `noisewise.privacy.accounting.ACCOUNTANTS`.

    Example:
        >>> limit = SpendingLimit(1.0, 1e-5, "pld")
        >>> limit.allows({}, 0.01, 2.0, 100)
        True
        >>> limit.remaining({}, 0.01, 2.0, 100)
        24
    """

    def __init__(self, epsilon: float, delta: float, accountant: str) -> None:
        self.epsilon, self._delta, self._accountant = epsilon, delta, accountant
        self._lock = threading.Lock()
        self._certificates: list[_Certificate] = []
        self._last: Counts | None = None
        self._exceeding: list[Counts] = []
        self._evaluated: list[Counts] = []
        self._hits, self._window, self._pause, self._waited = 4, 1, 0, 0

    def allows(
        self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int
    ) -> bool:
        """Whether ``counts`` and further steps together are within the limit.

        Args:
            counts: number of steps by (sample_rate, noise_multiplier).
            sample_rate: q of the further steps.
            noise_multiplier: z of the further steps.
            steps: number of further steps.

        Raises:
            InvalidValueError: the counts are outside of the accountants' bounds.
            AccountingError: the accountant has no valid epsilon for the counts.
        """
        total = add_steps(counts, sample_rate, noise_multiplier, steps)
        with self._lock:
            if total == self._last:
                return True
            if any(held.covers(total, self._accountant) for held in self._certificates):
                self._hits += 1
                return True
            if any(_at_most(counts, total) for counts in self._exceeding):
                return False
            if not self._fits(total):
                self._exceeding = [*self._exceeding[-7:], total]
                return False
            self._last = total
            self._evaluated = [*self._evaluated[-_LONGEST_WINDOW:], total]
            if len(self._evaluated) > 1:
                self._plan_search(total)
            return True

    def remaining(
        self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int
    ) -> int:
        """How many times the steps fit in addition to ``counts``, exactly.

        The result is at most 2^24, and at most what the accountants' bounds allow.

        Args:
            counts: number of steps by (sample_rate, noise_multiplier).
            sample_rate: q of the steps.
            noise_multiplier: z of the steps.
            steps: number of steps of one time.
        """

        def fits(times: int) -> bool:
            total = add_steps(counts, sample_rate, noise_multiplier, times * steps)
            return within_bounds(total, self._delta, self._accountant) and self._fits(total)

        return _largest(fits)

    # ------------------------------------------------------------ searching ahead

    def _plan_search(self, total: Counts) -> None:
        """Search ahead; less often and with a longer window if the last results covered little."""
        self._waited += 1
        if self._waited <= self._pause:
            return
        if self._hits < 4:
            self._window = min(2 * self._window, 2 * _LONGEST_WINDOW)
            self._pause = min(2 * self._pause + 1, _LONGEST_WINDOW)
        else:
            self._pause = 0
        self._hits = self._waited = 0
        self._search_ahead(total, self._direction(total))

    def _direction(self, total: Counts) -> Counts:
        """The steps that the latest requests added; all counts if that is unknown."""
        if self._window < len(self._evaluated):
            before = self._evaluated[-1 - self._window]
            if _at_most(before, total):
                added = {kind: steps - before.get(kind, 0) for kind, steps in total.items()}
                return {kind: steps for kind, steps in added.items() if steps}
        return total

    def _search_ahead(self, total: Counts, direction: Counts) -> None:
        """Find larger counts just within the limit, by secant steps, and add a certificate.

        Epsilon grows like a power, from 0.5 to 1, of the variance of the loss.
        """
        start, growth = _variance(total), _variance(direction)
        spent = epsilon_or_zero(kinds_of(total), self._delta, self._accountant)
        if not (spent > 0 and growth > 0):
            return
        near = min(_NEAR, (1 - spent / self.epsilon) / 8)
        best: tuple[Counts, float, object] | None = None
        within, beyond, at, power = 0.0, math.inf, 0.0, 0.6  # multiples of the direction
        for _ in range(_MOST_EVALUATIONS):
            target = (1 - near / 2) * self.epsilon
            times = ((start + at * growth) * (target / spent) ** (1 / power) - start) / growth
            if not within < times < beyond:
                times = (within + beyond) / 2 if math.isfinite(beyond) else 2 * within + 1
            ahead = {
                kind: steps + int(times * direction.get(kind, 0)) for kind, steps in total.items()
            }
            if ahead == total:
                break
            epsilon = epsilon_or_zero(kinds_of(ahead), self._delta, self._accountant)
            grid = _single_grid(ahead, self._accountant)
            if epsilon <= 0:  # outside of the accountant's bounds
                beyond = times
                continue
            if epsilon <= (1 - self._margin(ahead, grid)) * self.epsilon:
                within, best = times, (ahead, epsilon / self.epsilon, grid)
                if epsilon >= (1 - self._margin(ahead, grid) - near) * self.epsilon:
                    break
            else:
                beyond = times
            if times != at and epsilon != spent:
                ratio = (start + times * growth) / (start + at * growth)
                power = min(max(math.log(epsilon / spent) / math.log(ratio), 0.3), 3.0)
            at, spent = times, epsilon
        if best is not None:
            certificate = _Certificate(total, *best)
            self._certificates = [*self._certificates[1 - _MOST_CERTIFICATES :], certificate]

    @staticmethod
    def _margin(counts: Counts, grid: object) -> float:
        if grid is not None:
            return _MARGIN_ON_ONE_GRID
        return _MARGIN_OF_ONE_KIND if len(counts) == 1 else _MARGIN

    # ------------------------------------------------------------ calling the accountant

    def _fits(self, counts: Counts) -> bool:
        """Whether the accountant's epsilon of the counts is at most the limit.

        Where the accountant returns 0, the epsilon of a multiple of the counts is an upper bound.
        It is computed faster than the smallest such multiple that `composed_epsilon` searches for.
        """
        if within_bounds(counts, self._delta, self._accountant):
            kinds = kinds_of(counts)
            for factor in (1, 4, 16, 64, 256):
                epsilon = epsilon_or_zero(multiplied(kinds, factor), self._delta, self._accountant)
                if epsilon > 0:
                    if epsilon <= self.epsilon:
                        return True
                    break
        return composed_epsilon(counts, self._delta, self._accountant) <= self.epsilon


@functools.lru_cache(maxsize=64)
def limit_for(epsilon: float, delta: float, accountant: str) -> SpendingLimit:
    """The limit of this process for a budget; ledgers that are opened later share its results."""
    return SpendingLimit(epsilon, delta, accountant)


def _variance(counts: Counts) -> float:
    """Approximate variance of the loss of all steps, with which epsilon grows."""
    return loss_variance((q, z, steps) for (q, z), steps in counts.items())


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number for which a monotone condition holds; 0 if it fails for 1."""
    low, high = 0, 1
    while high < 1 << _MOST_DOUBLINGS and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
