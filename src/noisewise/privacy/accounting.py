"""Accountants: the epsilon of a number of steps of the Poisson-subsampled Gaussian mechanism.

There are three accountants. All use dp-accounting, and all are for adding or removing one record:

- ``pld`` (default): privacy loss distributions, discretised pessimistically;
- ``rdp``: Renyi DP with dp-accounting's own orders and conversion;
- ``moments``: the same Renyi DP with the paper's orders and the classic conversion. It needs far
  more noise for the same budget and exists to reproduce the paper.

An accountant that cannot compute a valid upper bound raises an error; it never returns a small
epsilon instead. Accountants answer within seconds for values within stated bounds (`SMALLEST_RATE`,
`MOST_STEPS`, and `noisewise.privacy.pld_accountant.ROUNDING_PER_STEP`); other values raise an error
that names the field.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from noisewise.checks import fraction, positive_int, positive_number, with_suggestion
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy.pld_accountant import (
    ROUNDING_PER_STEP,
    fits_in_memory,
    pld_epsilon,
    pld_epsilons_by_round,
)
from noisewise.privacy.renyi_accountant import RENYI, renyi_epsilon, renyi_epsilons_by_round

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT_ACCOUNTANT",
    "MOST_STEPS",
    "SMALLEST_RATE",
    "check_accountant",
    "check_bounds",
    "compose_rounds",
    "epsilon_of",
]

DEFAULT_ACCOUNTANT = "pld"

SMALLEST_RATE = 1e-6
"""The smallest sampling rate for which accountants answer."""

MOST_STEPS = 100_000_000
"""The largest number of steps for which accountants answer."""


def _pld(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Epsilon by privacy loss distributions, an upper bound by construction."""
    if sample_rate == 1.0:
        # T Gaussian steps without sampling are one Gaussian step with z / sqrt(T), exactly.
        noise_multiplier, steps = noise_multiplier / math.sqrt(steps), 1
    kinds = ((sample_rate, noise_multiplier, steps),)
    if not fits_in_memory(kinds):
        return renyi_epsilon("rdp", *kinds[0], delta)  # a looser upper bound
    return pld_epsilon(kinds, delta)


Accountant = Callable[[float, float, int, float], float]

ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {"pld": _pld, **{name: functools.partial(renyi_epsilon, name) for name in RENYI}}
)
"""Accountants by name: (sample_rate, noise_multiplier, steps, delta) -> epsilon."""


def compose_rounds(
    sample_rate: float,
    noise_multiplier: float,
    steps_per_round: int,
    rounds: int,
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> Iterator[float]:
    """Epsilon after 1, 2, ..., ``rounds`` rounds: upper bounds, or 0 where there is no valid one.

    One round's loss distribution (or Renyi DP) is composed with itself round by round.

    Args:
        sample_rate: q.
        noise_multiplier: z.
        steps_per_round: number of steps in each round.
        rounds: number of rounds; 0 yields nothing.
        delta: at which delta.
        accountant: one of `ACCOUNTANTS`.
    """
    one_round = (sample_rate, noise_multiplier, steps_per_round)
    if rounds < 1:
        return
    if accountant == "pld" and sample_rate < 1 and fits_in_memory((one_round,)):
        yield from pld_epsilons_by_round(*one_round, rounds, delta)
    elif accountant in RENYI and sample_rate < 1:
        yield from renyi_epsilons_by_round(accountant, *one_round, rounds, delta)
    else:
        for number in range(1, rounds + 1):
            steps = number * steps_per_round
            try:
                yield epsilon_of(sample_rate, noise_multiplier, steps, delta, accountant)
            except AccountingError:
                yield 0.0


def check_accountant(name: str) -> None:
    """Reject a name that is not one of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: names the accountants.
    """
    if name not in ACCOUNTANTS:
        allowed = f"must be one of {', '.join(ACCOUNTANTS)}"
        raise InvalidValueError("accountant", name, with_suggestion(name, ACCOUNTANTS, allowed))


def check_bounds(sample_rate: float, steps: int, delta: float, accountant: str) -> None:
    """Reject values for which an accountant would need minutes or float64 is not precise enough.

    Args:
        sample_rate: q.
        steps: number of steps composed.
        delta: at which delta.
        accountant: one of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: a value is invalid or outside of the accountants' bounds.
    """
    check_accountant(accountant)
    if fraction("sample_rate", sample_rate) < SMALLEST_RATE:
        raise InvalidValueError("sample_rate", sample_rate, f"must be from {SMALLEST_RATE:g} to 1")
    if positive_int("steps", steps) > MOST_STEPS:
        raise InvalidValueError("steps", steps, f"must be at most {MOST_STEPS:,}")
    fraction("delta", delta, one_allowed=False)
    smallest = 2 * ROUNDING_PER_STEP * steps
    if accountant == "pld" and sample_rate < 1 and delta < smallest:
        raise InvalidValueError(
            "delta",
            delta,
            f"must be at least {smallest:.2g} for {steps:,} steps with accountant 'pld', whose "
            "rounding errors are larger than a smaller delta; choose a larger delta, fewer steps "
            "or accountant 'rdp'",
        )


@functools.lru_cache(maxsize=65536, typed=True)  # typed: True is not a cached 1
def epsilon_of(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> float:
    """Epsilon of ``steps`` steps of the Poisson-subsampled Gaussian mechanism.

    Args:
        sample_rate: q, the probability with which each record enters a batch; from 1e-6 to 1.
        noise_multiplier: z, standard deviation of the noise over the clipping norm.
        steps: number of steps composed; at most 10^8.
        delta: at which delta; for ``pld`` with sampling at least 4.6e-16 times the steps.
        accountant: one of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: a value is invalid or outside of these bounds.
        AccountingError: the accountant returns 0 or no finite number. dp-accounting also returns 0
            after a numerical failure, so 0 is never accepted.

    Example:
        >>> round(epsilon_of(32 / 2400, 9.67, 15_000, 1e-4), 2)
        0.5
    """
    check_bounds(sample_rate, steps, delta, accountant)
    positive_number("noise_multiplier", noise_multiplier)
    try:
        epsilon = ACCOUNTANTS[accountant](sample_rate, noise_multiplier, steps, delta)
    except (ArithmeticError, ValueError, MemoryError):
        epsilon = math.nan  # out of range for float64, or for this machine
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise AccountingError(
            f"accountant '{accountant}' returns epsilon = {epsilon:g} for {steps} steps at "
            f"sample_rate = {sample_rate:g}, noise_multiplier = {noise_multiplier:g}, "
            f"delta = {delta:g}: not a valid upper bound; choose a smaller delta or less noise"
        )
    return epsilon
