"""Epsilon of steps with different sampling rates and noise: what a ledger holds after plans change.

Counts are whole numbers of steps by (q, z). Every epsilon here is an upper bound, and it is made
from those counts alone, so that it can be made again from the ledger's entries at any time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import accounting
from noisewise.privacy.accounting import ACCOUNTANTS, DEFAULT_ACCOUNTANT, RENYI, epsilon_of
from noisewise.privacy.loss_distribution import compose_steps
from noisewise.privacy.renyi import Array

__all__ = ["Counts", "SpendingLimit", "add_steps", "composed_epsilon"]

Counts = Mapping[tuple[float, float], int]
"""Steps by (sample_rate q, noise_multiplier z)."""

_Key = tuple[tuple[float, float, int], ...]

_MARGIN, _MARGIN_OF_ONE_KIND = 0.003, 0.0005
"""A count far ahead must stay this share below a limit to vouch for all smaller counts: two upper
bounds of nearly the same spending differ by less (grids are settled to 0.2%; steps of one kind and
of nearly the same number have nearly the same grid)."""

_NEAR = 0.002
"""To look ahead ends so near below that."""

_MOST_DOUBLINGS = 24


def add_steps(counts: Counts, sample_rate: float, noise_multiplier: float, steps: int) -> Counts:
    """``counts`` with more steps of one kind."""
    key = (sample_rate, noise_multiplier)
    return {**counts, key: counts.get(key, 0) + steps}


def composed_epsilon(counts: Counts, delta: float, accountant: str = DEFAULT_ACCOUNTANT) -> float:
    """Epsilon of all steps together at ``delta``, an upper bound; 0 for no steps at all.

    Steps of one kind give exactly `epsilon_of`. Steps can be so private that an accountant answers
    0, which we never take for an answer: then the least multiple of the counts of which it says
    more is reported instead, since spending only grows.

    Raises:
        AccountingError: no multiple of the counts gives a number that we may promise.

    Example:
        >>> half = composed_epsilon({(0.01, 1.0): 500}, 1e-5)
        >>> both = composed_epsilon({(0.01, 1.0): 500, (0.02, 2.0): 500}, 1e-5)
        >>> half < both < 2 * half
        True
    """
    if accountant not in ACCOUNTANTS:
        raise InvalidValueError(
            "accountant", accountant, f"must be one of {', '.join(ACCOUNTANTS)}"
        )
    fraction("delta", delta, one_allowed=False)
    for (rate, noise), steps in counts.items():
        fraction("sample_rate", rate)
        positive_number("noise_multiplier", noise)
        positive_int("steps", steps)
    if not counts:
        return 0.0
    return _promised(
        tuple(sorted((q, z, steps) for (q, z), steps in counts.items())), delta, accountant
    )


@functools.lru_cache(maxsize=4096)
def _promised(key: _Key, delta: float, accountant: str) -> float:
    epsilon = _answer(key, delta, accountant)
    return epsilon if epsilon > 0 else _least_promisable(key, delta, accountant)


def _least_promisable(key: _Key, delta: float, accountant: str) -> float:
    """Epsilon of the least multiple of the counts (to 1%) for which it is above 0."""
    silent, spoken, epsilon = 1, 2, 0.0
    for _ in range(_MOST_DOUBLINGS):
        epsilon = _answer(_multiple(key, spoken), delta, accountant)
        if epsilon > 0:
            break
        silent, spoken = spoken, 2 * spoken
    else:
        raise AccountingError(
            f"accountant '{accountant}' gives no epsilon above 0 at delta = {delta:g} for "
            f"(q, z, steps) = {list(key)}: not a number to promise; lower delta"
        )
    while spoken - silent > max(1, spoken // 100):
        middle = (silent + spoken) // 2
        found = _answer(_multiple(key, middle), delta, accountant)
        if found > 0:
            spoken, epsilon = middle, min(epsilon, found)
        else:
            silent = middle
    return epsilon


def _multiple(key: _Key, factor: int) -> _Key:
    return tuple((q, z, factor * steps) for q, z, steps in key)


@functools.lru_cache(maxsize=4096)
def _answer(key: _Key, delta: float, accountant: str) -> float:
    """What the accountant says; 0 where it says nothing that counts."""
    if len(key) == 1:
        try:
            return epsilon_of(*key[0], delta, accountant)
        except AccountingError:
            return 0.0
    try:
        epsilon = _pld(key, delta) if accountant == "pld" else _renyi(key, delta, accountant)
    except ArithmeticError:  # numbers beyond the range of floats
        return 0.0
    return epsilon if math.isfinite(epsilon) and epsilon > 0 else 0.0


# ---------------------------------------------------------------- Renyi DP adds up


@functools.lru_cache(maxsize=256)
def _one_step_renyi(accountant: str, sample_rate: float, noise_multiplier: float) -> Array:
    """Renyi DP of one step at all of the accountant's orders; inf where dp-accounting gave up."""
    orders = RENYI[accountant].orders
    used, values = accounting._renyi(orders, sample_rate, noise_multiplier, 1)
    known = dict(zip(used.tolist(), values.tolist(), strict=True))
    return np.array([known.get(order, math.inf) for order in orders])


def _renyi(key: _Key, delta: float, accountant: str) -> float:
    total: Array = sum(
        (steps * _one_step_renyi(accountant, q, z) for q, z, steps in key), start=np.zeros(1)
    )
    sound = np.isfinite(total)
    if not sound.any():
        return 0.0
    orders = np.array(RENYI[accountant].orders)[sound]
    return accounting._renyi_epsilon(accountant, orders, total[sound], delta)


# ---------------------------------------------------------------- loss distributions convolve


def _merged(key: _Key) -> _Key:
    """All Gaussian steps without sampling as one, exactly: 1 / z^2 adds up over steps."""
    precision = sum(steps / z**2 for q, z, steps in key if q == 1)
    sampled = tuple(part for part in key if part[0] < 1)
    # Rounded towards more epsilon, by a little more than the sum's own rounding.
    return (*sampled, (1.0, precision**-0.5 * (1 - 1e-13), 1)) if precision else sampled


def _pld(key: _Key, delta: float) -> float:
    """By privacy loss distributions on one grid for all kinds of steps: an upper bound on any grid.

    The grid follows `accounting._pld_interval` with the mean variance of a step's loss in place of
    the variance, and is refined from coarse to fine where the finest would be large.
    """
    parts = _merged(key)
    if len(parts) == 1:
        return epsilon_of(*parts[0], delta, "pld")
    smallest = accounting.SMALLEST_PLD_NOISE
    if any(z < (smallest if q < 1 else 0.05) for q, z, _ in parts):
        return _renyi(key, delta, "rdp")  # a looser upper bound
    variance = sum(steps * accounting.step_loss_std(q, z) ** 2 for q, z, steps in parts)
    each = math.sqrt(variance / sum(steps for _, _, steps in parts))
    widest = max(accounting._largest_loss(q, z) for q, z, _ in parts)
    wanted = min(0.12 * each, 0.03 * math.sqrt(variance), 0.05)
    finest = max(wanted, widest / accounting._FINE_GRID)
    interval = max(finest, widest / accounting._COARSE_GRID)
    epsilon = _pld_on_grid(parts, delta, interval)
    while interval > finest and epsilon > 0:
        interval = max(finest, interval / 4)
        coarser, epsilon = epsilon, _pld_on_grid(parts, delta, interval)
        if epsilon > (1 - accounting._SETTLED) * coarser:
            return min(coarser, epsilon)
    return epsilon


def _pld_on_grid(parts: _Key, delta: float, interval: float) -> float:
    with np.errstate(over="ignore"):
        whole = [
            compose_steps(accounting._one_step(q, z, interval), steps) for q, z, steps in parts
        ]
        total = functools.reduce(lambda one, other: one.compose(other), whole)
        return float(total.get_epsilon_for_delta(delta))


# ---------------------------------------------------------------- a limit, asked again and again


def _at_most(counts: Counts, others: Counts) -> bool:
    return all(steps <= others.get(kind, 0) for kind, steps in counts.items())


class SpendingLimit:
    """Answers "are these counts within the limit?", mostly from what it already knows.

    Spending grows with the counts. So counts that are nowhere above known good ones are within the
    limit, and counts that are nowhere below known bad ones are beyond it; an accountant is asked
    only in between. From its second question on, it looks ahead for how many more steps of the same
    kind there is room, so that a process that reserves many rounds does not ask for each.

    Args:
        epsilon: the limit.
        delta: at which delta.
        accountant: one of `ACCOUNTANTS`.
    """

    def __init__(self, epsilon: float, delta: float, accountant: str) -> None:
        self.epsilon, self._delta, self._accountant = epsilon, delta, accountant
        self._within: Counts | None = None
        self._last: Counts | None = None
        self._beyond: list[Counts] = []
        self._asked, self._hits, self._looking = 0, 0, True

    def allows(
        self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int
    ) -> bool:
        """Whether ``counts`` plus the steps are within the limit."""
        total = add_steps(counts, sample_rate, noise_multiplier, steps)
        if total == self._last:
            return True
        if self._within is not None and _at_most(total, self._within):
            self._hits += 1
            return True
        if any(_at_most(bad, total) for bad in self._beyond):
            return False
        self._asked += 1
        if not self._fits(total, self.epsilon):
            self._beyond = [*self._beyond[-7:], total]
            return False
        self._last = total
        if self._within is not None and self._hits < 4:
            self._looking = False  # plans take turns: to look ahead in one direction is in vain
        if self._asked > 1 and self._looking:
            self._hits = 0
            self._look_ahead(total, sample_rate, noise_multiplier, steps)
        return True

    def room(self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int) -> int:
        """How many times the steps still fit, exactly (up to 2^24)."""

        def fits(times: int) -> bool:
            more = add_steps(counts, sample_rate, noise_multiplier, times * steps)
            return self._fits(more, self.epsilon)

        return _largest(fits)

    def _look_ahead(
        self, counts: Counts, sample_rate: float, noise_multiplier: float, steps: int
    ) -> None:
        """Find counts well ahead that are just within the limit, in a few secant steps.

        Spending follows a power of the number of rounds, between its root and itself.
        """

        def ahead(times: int) -> Counts:
            return add_steps(counts, sample_rate, noise_multiplier, times * steps)

        done = counts[sample_rate, noise_multiplier] / steps
        margin = _MARGIN_OF_ONE_KIND if len(counts) == 1 else _MARGIN
        highest, enough = (1 - margin) * self.epsilon, (1 - margin - _NEAR) * self.epsilon
        good, bad, power = 0, 1 << _MOST_DOUBLINGS, 0.6
        times, spent = 0, self._upper(counts)
        for _ in range(10):
            aim = (highest + enough) / 2 / spent
            guess = min(max(int((times + done) * aim ** (1 / power) - done), good + 1), bad - 1)
            if guess <= good:
                break
            found = self._upper(ahead(guess))
            good, bad = (guess, bad) if found <= highest else (good, guess)
            if enough <= found <= highest:
                break
            if guess != times and found != spent:
                power = math.log(found / spent) / math.log((guess + done) / (times + done))
                power = min(max(power, 0.3), 3.0)
            times, spent = guess, found
        if good:
            self._within = ahead(good)
        else:  # so near to the limit, each question is put to the accountant
            self._looking = False

    def _upper(self, counts: Counts) -> float:
        """An upper bound of the spending: of a multiple, where an accountant says 0 to less."""
        key = tuple(sorted((q, z, steps) for (q, z), steps in counts.items()))
        for factor in (1, 4, 16, 64, 256):
            found = _answer(_multiple(key, factor), self._delta, self._accountant)
            if found > 0:
                return found
        return composed_epsilon(counts, self._delta, self._accountant)

    def _fits(self, counts: Counts, epsilon: float) -> bool:
        """Whether an upper bound of the spending is at most epsilon; the quickest one will do."""
        if self._upper(counts) <= epsilon:
            return True
        return composed_epsilon(counts, self._delta, self._accountant) <= epsilon


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number for which a falling condition holds; 0 if for none from 1 on."""
    low, high = 0, 1
    while high < 1 << _MOST_DOUBLINGS and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
