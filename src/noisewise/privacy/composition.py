"""Epsilon of steps with different sampling rates and noise: what a ledger holds after plans change.

Counts are whole numbers of steps by (q, z). Every epsilon here is an upper bound, and it is made
from those counts alone, so that it can be made again from the ledger's entries at any time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from noisewise.checks import fraction, positive_number
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import accounting
from noisewise.privacy.accounting import (
    DEFAULT_ACCOUNTANT,
    MOST_STEPS,
    RENYI,
    check_bounds,
    epsilon_of,
)
from noisewise.privacy.loss_distribution import compose_steps
from noisewise.privacy.renyi import Array

__all__ = ["MOST_KINDS", "Counts", "add_steps", "composed_epsilon"]

Counts = Mapping[tuple[float, float], int]
"""Steps by (sample_rate q, noise_multiplier z)."""

Key = tuple[tuple[float, float, int], ...]
"""The same as a value, sorted: (q, z, steps)."""

MOST_KINDS = 64
"""Kinds of steps, (q, z), that ``pld`` composes: each adds a convolution of its own."""

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
        InvalidValueError: a count is invalid or outside of the accountants' bounds
            (`noisewise.privacy.accounting`), or ``pld`` is asked for more than 64 kinds.
        AccountingError: no multiple of the counts gives a number that we may promise.

    Example:
        >>> half = composed_epsilon({(0.01, 1.0): 500}, 1e-5)
        >>> both = composed_epsilon({(0.01, 1.0): 500, (0.02, 2.0): 500}, 1e-5)
        >>> half < both < 2 * half
        True
    """
    check_counts(counts, delta, accountant)
    if not counts:
        return 0.0
    return _promised(key_of(counts), delta, accountant)


def check_counts(counts: Counts, delta: float, accountant: str) -> None:
    """Refuse counts for which no accountant answers in bounded time.

    Raises:
        InvalidValueError: names the field.
    """
    for (rate, noise), steps in counts.items():
        check_bounds(rate, steps, delta, accountant)
        positive_number("noise_multiplier", noise)
    fraction("delta", delta, one_allowed=False)
    if accountant == "pld" and len(counts) > MOST_KINDS:
        raise InvalidValueError(
            "kinds of steps",
            len(counts),
            f"accountant 'pld' composes at most {MOST_KINDS} different (sample_rate, "
            "noise_multiplier); use one of those in the ledger, or accountant 'rdp'",
        )
    total = sum(steps for (rate, _), steps in counts.items() if rate < 1)
    if total:
        check_bounds(0.5, total, delta, accountant)


def key_of(counts: Counts) -> Key:
    """Counts as a value to cache by."""
    return tuple(sorted((q, z, steps) for (q, z), steps in counts.items()))


def within_bounds(counts: Counts, delta: float, accountant: str) -> bool:
    """Whether `check_counts` accepts the counts."""
    try:
        check_counts(counts, delta, accountant)
    except InvalidValueError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _promised(key: Key, delta: float, accountant: str) -> float:
    epsilon = answer(key, delta, accountant)
    return epsilon if epsilon > 0 else _least_promisable(key, delta, accountant)


def _least_promisable(key: Key, delta: float, accountant: str) -> float:
    """Epsilon of the least multiple of the counts (to 1%) for which it is above 0."""
    silent, spoken, epsilon = 1, 2, 0.0
    for _ in range(_MOST_DOUBLINGS):
        epsilon = answer(multiple(key, spoken), delta, accountant)
        if epsilon > 0:
            break
        silent, spoken = spoken, 2 * spoken
        if spoken * max(steps for _, _, steps in key) > MOST_STEPS:
            break
    if not epsilon > 0:
        raise AccountingError(
            f"accountant '{accountant}' gives no epsilon above 0 at delta = {delta:g} for "
            f"(q, z, steps) = {list(key)}: not a number to promise; lower delta"
        )
    while spoken - silent > max(1, spoken // 100):
        middle = (silent + spoken) // 2
        found = answer(multiple(key, middle), delta, accountant)
        if found > 0:
            spoken, epsilon = middle, min(epsilon, found)
        else:
            silent = middle
    return epsilon


def multiple(key: Key, factor: int) -> Key:
    """``factor`` times the counts."""
    return tuple((q, z, factor * steps) for q, z, steps in key)


@functools.lru_cache(maxsize=4096)
def answer(key: Key, delta: float, accountant: str) -> float:
    """What the accountant says; 0 where it says nothing that counts."""
    counts = {(q, z): steps for q, z, steps in key}
    if not within_bounds(counts, delta, accountant):
        return 0.0
    if len(key) == 1:
        try:
            return epsilon_of(*key[0], delta, accountant)
        except AccountingError:
            return 0.0
    try:
        epsilon = _pld(key, delta) if accountant == "pld" else _renyi(key, delta, accountant)
    except (ArithmeticError, ValueError, MemoryError):  # beyond floats, or beyond this machine
        return 0.0
    except AccountingError:
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


def _renyi(key: Key, delta: float, accountant: str) -> float:
    total: Array = sum(
        (steps * _one_step_renyi(accountant, q, z) for q, z, steps in key), start=np.zeros(1)
    )
    sound = np.isfinite(total)
    if not sound.any():
        return 0.0
    orders = np.array(RENYI[accountant].orders)[sound]
    return accounting._renyi_epsilon(accountant, orders, total[sound], delta)


# ---------------------------------------------------------------- loss distributions convolve


def merged(key: Key) -> Key:
    """All Gaussian steps without sampling as one, exactly: 1 / z^2 adds up over steps."""
    precision = sum(steps / z**2 for q, z, steps in key if q == 1)
    sampled = tuple(part for part in key if part[0] < 1)
    # Rounded towards more epsilon, by a little more than the sum's own rounding.
    return (*sampled, (1.0, precision**-0.5 * (1 - 1e-13), 1)) if precision else sampled


def _pld(key: Key, delta: float) -> float:
    """By privacy loss distributions on one grid for all kinds of steps: an upper bound on any grid.

    The grid is refined from coarse to fine where the finest would be large, see `shared_grids`.
    """
    parts = merged(key)
    if len(parts) == 1:
        return epsilon_of(*parts[0], delta, "pld")
    smallest = accounting.SMALLEST_PLD_NOISE
    if any(z < (smallest if q < 1 else 0.05) for q, z, _ in parts):
        return _renyi(key, delta, "rdp")  # a looser upper bound
    grids = shared_grids(parts)
    epsilon = math.inf
    for interval in grids:
        coarser, epsilon = epsilon, _pld_on_grid(parts, delta, interval, large=len(grids) > 1)
        if epsilon == 0 or epsilon > (1 - accounting._SETTLED) * coarser:
            return min(coarser, epsilon)
    return epsilon


def shared_grids(parts: Key) -> tuple[float, ...]:
    """The grids for steps of several kinds, from coarse to fine.

    The finest follows `accounting._pld_interval`, with the mean variance of a step's loss in place
    of the variance. It is rounded down to a power of two: counts that differ little then share a
    grid, on which more steps never get a smaller epsilon.
    """
    variance = sum(steps * accounting.step_loss_std(q, z) ** 2 for q, z, steps in parts)
    each = math.sqrt(variance / sum(steps for _, _, steps in parts))
    widest = max(accounting._largest_loss(q, z) for q, z, _ in parts)
    wanted = 2.0 ** math.floor(math.log2(min(0.12 * each, 0.03 * math.sqrt(variance), 0.05)))
    return accounting.refinements(max(wanted, widest / accounting._FINE_GRID), widest)


def _pld_on_grid(parts: Key, delta: float, interval: float, *, large: bool) -> float:
    total_steps = sum(steps for _, _, steps in parts)
    with np.errstate(over="ignore"):
        whole = [
            compose_steps(
                accounting._one_step(q, z, interval),
                steps,
                large=large or steps > accounting._MANY_STEPS,
            )
            for q, z, steps in parts
        ]
        total = functools.reduce(lambda one, other: one.compose(other), whole)
        return float(total.get_epsilon_for_delta(accounting._tail(total_steps, delta)))
