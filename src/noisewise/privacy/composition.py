"""Epsilon of steps with different sampling rates and noise, as in a ledger after plans changed.

Counts are whole numbers of steps by (q, z). Every epsilon here is an upper bound that depends on
these counts alone, so it can be recomputed from a ledger's entries at any time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from noisewise.checks import fraction, positive_number
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, MOST_STEPS, check_bounds, epsilon_of
from noisewise.privacy.pld_accountant import StepKinds, fits_in_memory, pld_epsilon
from noisewise.privacy.renyi_accountant import renyi_epsilon_of_kinds

__all__ = [
    "MOST_KINDS",
    "Counts",
    "add_steps",
    "check_counts",
    "composed_epsilon",
    "epsilon_or_zero",
    "kinds_of",
    "merge_unsampled",
    "multiplied",
    "within_bounds",
]

Counts = Mapping[tuple[float, float], int]
"""Steps by (sample_rate q, noise_multiplier z)."""

MOST_KINDS = 64
"""Largest number of kinds of steps, (q, z), that ``pld`` composes: each needs a convolution."""

_MOST_DOUBLINGS = 24


def add_steps(counts: Counts, sample_rate: float, noise_multiplier: float, steps: int) -> Counts:
    """A copy of ``counts`` with more steps of one kind."""
    key = (sample_rate, noise_multiplier)
    return {**counts, key: counts.get(key, 0) + steps}


def composed_epsilon(counts: Counts, delta: float, accountant: str = DEFAULT_ACCOUNTANT) -> float:
    """Epsilon of all steps together at ``delta``, an upper bound; 0 if there are no steps.

    For steps of one kind this is `epsilon_of`. Where the steps are so private that an accountant
    returns 0, which is never accepted, the result is the epsilon of the smallest multiple of the
    counts for which it returns more: more steps never have a smaller epsilon.

    Args:
        counts: number of steps by (sample_rate, noise_multiplier).
        delta: at which delta.
        accountant: one of `noisewise.privacy.accounting.ACCOUNTANTS`.

    Raises:
        InvalidValueError: a count is invalid or outside of the accountants' bounds
            (`noisewise.privacy.accounting`), or ``pld`` gets more than 64 kinds of steps.
        AccountingError: no multiple of the counts has a valid epsilon.

    Example:
        >>> half = composed_epsilon({(0.01, 1.0): 500}, 1e-5)
        >>> both = composed_epsilon({(0.01, 1.0): 500, (0.02, 2.0): 500}, 1e-5)
        >>> half < both < 2 * half
        True
    """
    check_counts(counts, delta, accountant)
    if not counts:
        return 0.0
    return _valid_epsilon(kinds_of(counts), delta, accountant)


def check_counts(counts: Counts, delta: float, accountant: str) -> None:
    """Reject counts for which an accountant cannot compute epsilon in bounded time.

    Raises:
        InvalidValueError: a count, a sampling rate, a noise multiplier or delta is out of bounds.
    """
    for (rate, noise), steps in counts.items():
        check_bounds(rate, steps, delta, accountant)
        positive_number("noise_multiplier", noise)
    fraction("delta", delta, one_allowed=False)
    if accountant == "pld" and len(counts) > MOST_KINDS:
        raise InvalidValueError(
            "kinds of steps",
            len(counts),
            f"must be at most {MOST_KINDS} different (sample_rate, noise_multiplier) with "
            "accountant 'pld'; use a pair that the ledger has already, or accountant 'rdp'",
        )
    total = sum(steps for (rate, _), steps in counts.items() if rate < 1)
    if total:
        check_bounds(0.5, total, delta, accountant)


def kinds_of(counts: Counts) -> StepKinds:
    """Counts as a sorted tuple, which can be a cache's key."""
    return tuple(sorted((q, z, steps) for (q, z), steps in counts.items()))


def within_bounds(counts: Counts, delta: float, accountant: str) -> bool:
    """Whether `check_counts` accepts the counts."""
    try:
        check_counts(counts, delta, accountant)
    except InvalidValueError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _valid_epsilon(kinds: StepKinds, delta: float, accountant: str) -> float:
    epsilon = epsilon_or_zero(kinds, delta, accountant)
    return epsilon if epsilon > 0 else _smallest_valid(kinds, delta, accountant)


def _smallest_valid(kinds: StepKinds, delta: float, accountant: str) -> float:
    """Epsilon of the smallest multiple of the counts (to 1%) for which it is above 0."""
    too_small, factor, epsilon = 1, 2, 0.0
    for _ in range(_MOST_DOUBLINGS):
        epsilon = epsilon_or_zero(multiplied(kinds, factor), delta, accountant)
        if epsilon > 0:
            break
        too_small, factor = factor, 2 * factor
        if factor * max(steps for _, _, steps in kinds) > MOST_STEPS:
            break
    if not epsilon > 0:
        raise AccountingError(
            f"accountant '{accountant}' returns no epsilon above 0 at delta = {delta:g} for "
            f"(q, z, steps) = {list(kinds)}: not a valid upper bound; choose a smaller delta"
        )
    while factor - too_small > max(1, factor // 100):
        middle = (too_small + factor) // 2
        middle_epsilon = epsilon_or_zero(multiplied(kinds, middle), delta, accountant)
        if middle_epsilon > 0:
            factor, epsilon = middle, min(epsilon, middle_epsilon)
        else:
            too_small = middle
    return epsilon


def multiplied(kinds: StepKinds, factor: int) -> StepKinds:
    """``factor`` times the counts."""
    return tuple((q, z, factor * steps) for q, z, steps in kinds)


@functools.lru_cache(maxsize=4096)
def epsilon_or_zero(kinds: StepKinds, delta: float, accountant: str) -> float:
    """Epsilon by the accountant; 0 if it raises an error or returns no number above 0."""
    counts = {(q, z): steps for q, z, steps in kinds}
    if not within_bounds(counts, delta, accountant):
        return 0.0
    try:
        if len(kinds) == 1:
            epsilon = epsilon_of(*kinds[0], delta, accountant)
        elif accountant == "pld":
            epsilon = _pld(kinds, delta)
        else:
            epsilon = renyi_epsilon_of_kinds(accountant, kinds, delta)
    except (AccountingError, ArithmeticError, ValueError, MemoryError):
        return 0.0  # out of range for float64, or for this machine
    return epsilon if math.isfinite(epsilon) and epsilon > 0 else 0.0


def merge_unsampled(kinds: StepKinds) -> StepKinds:
    """The same with all steps without sampling merged into one, exactly: 1 / z^2 adds up."""
    precision = sum(steps / z**2 for q, z, steps in kinds if q == 1)
    sampled = tuple(kind for kind in kinds if kind[0] < 1)
    # Rounded towards a larger epsilon, by more than the sum's rounding error.
    return (*sampled, (1.0, precision**-0.5 * (1 - 1e-13), 1)) if precision else sampled


def _pld(kinds: StepKinds, delta: float) -> float:
    """Epsilon by privacy loss distributions on one grid for all kinds of steps."""
    distinct = merge_unsampled(kinds)
    if len(distinct) == 1:
        return epsilon_of(*distinct[0], delta, "pld")
    if not fits_in_memory(distinct):
        return renyi_epsilon_of_kinds("rdp", kinds, delta)  # a looser upper bound
    return pld_epsilon(distinct, delta)
