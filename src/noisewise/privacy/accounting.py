"""Accountants: the epsilon of a number of steps of the Poisson-subsampled Gaussian mechanism.

Three by name, all on top of dp-accounting and all for adding or removing one record:

- ``pld`` (default): privacy loss distributions, discretised pessimistically;
- ``rdp``: Renyi DP with dp-accounting's own orders and conversion;
- ``moments``: the same Renyi DP with the paper's orders and the classic conversion. It needs far
  more noise for the same promise and exists to reproduce the paper.

A number that an accountant cannot stand behind is an error, never a small epsilon. Accountants
answer within stated bounds (`SMALLEST_RATE`, `MOST_STEPS`, `ROUNDING_PER_STEP`), each question in
seconds; outside of them they raise an error that names the field.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import dp_accounting
import numpy as np
from dp_accounting import rdp

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy.loss_distribution import (
    PrivacyLossDistribution,
    compose_steps,
    one_step_distribution,
)
from noisewise.privacy.renyi import Array, Conversion

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT_ACCOUNTANT",
    "MOST_STEPS",
    "RENYI",
    "ROUNDING_PER_STEP",
    "SMALLEST_PLD_NOISE",
    "SMALLEST_RATE",
    "check_bounds",
    "compose_rounds",
    "epsilon_of",
    "grid_widths",
    "moments_floor",
    "pld_epsilon_on_grid",
    "refinements",
    "step_loss_std",
]

DEFAULT_ACCOUNTANT = "pld"

SMALLEST_RATE = 1e-6
"""The smallest sampling rate for which accountants answer."""

MOST_STEPS = 100_000_000
"""The largest number of steps for which accountants answer."""

ROUNDING_PER_STEP = 2.3e-16
"""Bound on what rounding in the Fourier transform of ``pld`` adds to or takes from a tail
probability, for each step composed. Measured: at most 5.6e-17. It comes off delta where it is more
than 0.2% of it, and ``pld`` does not answer where it is more than half of delta."""

# The orders of the authors' accountant: 1.1 .. 10.9 and 12 .. 64.
MOMENTS_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(a) for a in range(12, 65))


def _improved(orders: Array, delta: float) -> Array:
    """dp-accounting's conversion (Canonne, Kamath and Steinke, 2020, proposition 12)."""
    penalties: Array = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return penalties


def _classic(orders: Array, delta: float) -> Array:
    """The paper's conversion (Mironov, 2017, proposition 3)."""
    return math.log(1 / delta) / (orders - 1)


RENYI: Mapping[str, Conversion] = MappingProxyType(
    {
        "rdp": Conversion(tuple(float(a) for a in rdp.RdpAccountant().orders), _improved),
        "moments": Conversion(MOMENTS_ORDERS, _classic),
    }
)
"""The accountants that go by Renyi DP, for searches and for finding the orders that decide."""

SMALLEST_PLD_NOISE = 0.15
"""Below this noise multiplier (epsilons of many hundreds) a loss distribution outgrows memory."""

_COARSE_GRID, _FINE_GRID = 20_000, 200_000
"""Points of one step's loss distribution on the first grid, and at most on the last."""

_MANY_STEPS = 100_000
"""From here on a distribution is composed with a shorter Fourier transform."""

_SETTLED = 0.002
"""A grid four times as fine that lowers epsilon by a smaller share ends the refinement."""


def step_loss_std(sample_rate: float, noise_multiplier: float) -> float:
    """Standard deviation of one step's privacy loss, q sqrt(exp(1/z^2) - 1), capped for tiny z.

    It is the per-step mu of the Gaussian limit of DP-SGD (Bu, Dong, Long and Su, 2020) and sets
    the scale on which a loss distribution must be resolved.
    """
    exponent = min(noise_multiplier**-2, 2.0)
    return (
        sample_rate * math.sqrt(math.expm1(exponent)) if sample_rate < 1 else 1 / noise_multiplier
    )


def _pld_interval(sample_rate: float, noise_multiplier: float, steps: int) -> float:
    """Grid width of the loss distribution: fine enough that its pessimism stays below 0.2%.

    Rounding losses up to a grid of width h adds about h^2/4 to the variance of each step's loss, so
    h must be small against one step's deviation s; with few steps it must be small against the
    total deviation s sqrt(T) too.
    """
    s = step_loss_std(sample_rate, noise_multiplier)
    return min(0.12 * s, 0.03 * s * math.sqrt(steps), 0.05)


def _largest_loss(sample_rate: float, noise_multiplier: float) -> float:
    """The largest loss of one step that the distribution holds: ten deviations out."""
    unsampled = 10 / noise_multiplier + 0.5 / noise_multiplier**2
    return float(
        np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + unsampled)
        if sample_rate < 1
        else unsampled
    )


def _grid(sample_rate: float, noise_multiplier: float, steps: int) -> float:
    """The width that is fine enough, or the finest that memory allows."""
    widest = _largest_loss(sample_rate, noise_multiplier)
    return max(_pld_interval(sample_rate, noise_multiplier, steps), widest / _FINE_GRID)


@functools.lru_cache(maxsize=32)
def _one_step(
    sample_rate: float, noise_multiplier: float, interval: float
) -> PrivacyLossDistribution:
    """Loss distribution of one step, kept for the next round of the same client."""
    return one_step_distribution(sample_rate, noise_multiplier, interval)


def _tail(steps: int, delta: float) -> float:
    """``delta`` less what rounding may hide, see `ROUNDING_PER_STEP`."""
    rounding = ROUNDING_PER_STEP * steps
    return delta if rounding < 0.002 * delta else delta - rounding


def _pld_epsilon(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Epsilon by privacy loss distributions (dp-accounting), an upper bound by construction.

    With tiny sampling rates and little noise the finest grid would need gigabytes. The grid then
    starts coarse and is refined until that changes little: every grid gives an upper bound.
    """
    if sample_rate == 1.0:
        # T Gaussian steps without sampling are one Gaussian step with z / sqrt(T), exactly.
        noise_multiplier, steps = noise_multiplier / math.sqrt(steps), 1
    if noise_multiplier < (SMALLEST_PLD_NOISE if sample_rate < 1 else 0.05):
        return _rdp_epsilon(sample_rate, noise_multiplier, steps, delta)  # a looser upper bound
    grids = grid_widths(sample_rate, noise_multiplier, steps)
    epsilon = math.inf
    for interval in grids:
        coarser = epsilon
        epsilon = pld_epsilon_on_grid(
            sample_rate, noise_multiplier, steps, delta, interval, large=len(grids) > 1
        )
        if epsilon == 0 or epsilon > (1 - _SETTLED) * coarser:
            return min(coarser, epsilon)
    return epsilon


def grid_widths(sample_rate: float, noise_multiplier: float, steps: int) -> tuple[float, ...]:
    """The grids on which ``pld`` computes, from coarse to fine; mostly a single one."""
    finest = _grid(sample_rate, noise_multiplier, steps)
    return refinements(finest, _largest_loss(sample_rate, noise_multiplier))


def refinements(finest: float, widest: float) -> tuple[float, ...]:
    """Widths from `_COARSE_GRID` points over ``widest`` down to ``finest``, each a quarter."""
    widths = [max(finest, widest / _COARSE_GRID)]
    while widths[-1] > finest:
        widths.append(max(finest, widths[-1] / 4))
    return tuple(widths)


def pld_epsilon_on_grid(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    interval: float,
    *,
    large: bool,
) -> float:
    """Epsilon by ``pld`` on one grid: an upper bound on any grid, and 0 where it cannot tell.

    Args:
        sample_rate: q.
        noise_multiplier: z.
        steps: number of steps composed.
        delta: at which delta.
        interval: width of the grid of losses.
        large: whether the grid is one of several, so that distributions have many points.
    """
    with np.errstate(over="ignore"):
        single = _one_step(sample_rate, noise_multiplier, interval)
        whole = compose_steps(single, steps, large=large or steps > _MANY_STEPS)
        return float(whole.get_epsilon_for_delta(_tail(steps, delta)))


@contextlib.contextmanager
def _quiet_about_dropped_orders() -> Iterator[None]:
    """Silence dp-accounting's line for each order that it leaves out.

    Leaving orders out is safe (the minimum over fewer orders is larger) and happens at every call.
    """

    def other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _renyi(
    orders: tuple[float, ...], sample_rate: float, noise_multiplier: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Orders and Renyi DP of the steps, without the orders that dp-accounting gave up on."""
    accountant = rdp.RdpAccountant(orders)
    event = dp_accounting.PoissonSampledDpEvent(
        sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    with _quiet_about_dropped_orders():
        accountant.compose(event, steps)
    used, values = np.asarray(accountant._orders), np.asarray(accountant._rdp)
    # A negative divergence is numerical failure, which dp-accounting would turn into epsilon 0.
    sound = np.isfinite(values) & (values > 0)
    return used[sound], values[sound]


def _decisive(
    accountant: str, sample_rate: float, noise_multiplier: float, steps: int, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    """dp-accounting's Renyi DP at the few orders that decide, or at all if those are unsound.

    Fewer orders can only make the minimum over them larger, so a wrong choice would still be safe.
    """
    conversion = RENYI[accountant]
    promising = conversion.promising(sample_rate, noise_multiplier, steps, delta)
    for orders in (promising, conversion.orders):
        if orders:
            used, values = _renyi(orders, sample_rate, noise_multiplier, steps)
            if len(used):
                return used, values
    raise AccountingError(
        f"no Renyi order is numerically sound at sample_rate = {sample_rate:g}, "
        f"noise_multiplier = {noise_multiplier:g}, {steps} steps; use accountant 'pld'"
    )


def _renyi_epsilon(accountant: str, orders: Array, values: Array, delta: float) -> float:
    """Epsilon of Renyi DP ``values`` at ``orders``, each an upper bound at any order."""
    if accountant == "moments":
        return float(np.min(values + _classic(orders, delta)))
    return float(rdp.compute_epsilon(orders, values, delta)[0])


def _rdp_epsilon(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Epsilon by Renyi DP with dp-accounting's default orders and conversion."""
    orders, values = _decisive("rdp", sample_rate, noise_multiplier, steps, delta)
    return _renyi_epsilon("rdp", orders, values, delta)


def _moments_epsilon(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Epsilon as the paper computes it: min over a of rdp(a) + log(1/delta) / (a - 1)."""
    orders, values = _decisive("moments", sample_rate, noise_multiplier, steps, delta)
    return _renyi_epsilon("moments", orders, values, delta)


def compose_rounds(
    sample_rate: float,
    noise_multiplier: float,
    steps_per_round: int,
    rounds: int,
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> Iterator[float]:
    """Epsilon after 1, 2, ..., ``rounds`` rounds, each an upper bound; 0 where one cannot tell.

    One round's loss distribution (or Renyi DP) is composed with itself round by round.
    """
    if rounds < 1:
        return
    if accountant == "pld" and noise_multiplier >= SMALLEST_PLD_NOISE and sample_rate < 1:
        interval = _grid(sample_rate, noise_multiplier, steps_per_round * rounds)
        with np.errstate(over="ignore"):
            one = compose_steps(_one_step(sample_rate, noise_multiplier, interval), steps_per_round)
            total = one
            for number in range(rounds):
                total = total if number == 0 else total.compose(one)
                yield float(total.get_epsilon_for_delta(delta))
        return
    if accountant in RENYI and sample_rate < 1:  # Renyi DP is linear in the steps
        orders, one = _renyi(RENYI[accountant].orders, sample_rate, noise_multiplier, 1)
        for number in range(1, rounds + 1):
            values = number * steps_per_round * one
            yield _renyi_epsilon(accountant, orders, values, delta) if len(orders) else 0.0
        return
    for number in range(1, rounds + 1):
        try:
            yield epsilon_of(
                sample_rate, noise_multiplier, number * steps_per_round, delta, accountant
            )
        except AccountingError:
            yield 0.0


def moments_floor(delta: float) -> float:
    """Below this epsilon ``moments`` has no answer, however large the noise: log(1/delta) / 63."""
    return math.log(1 / delta) / (max(MOMENTS_ORDERS) - 1)


Accountant = Callable[[float, float, int, float], float]

ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {"pld": _pld_epsilon, "rdp": _rdp_epsilon, "moments": _moments_epsilon}
)
"""Accountants by name: (sample_rate, noise_multiplier, steps, delta) -> epsilon."""


def check_bounds(sample_rate: float, steps: int, delta: float, accountant: str) -> None:
    """Refuse what would take an accountant minutes, or what floats do not resolve.

    Raises:
        InvalidValueError: a field is invalid, or outside of the bounds of this module.
    """
    if accountant not in ACCOUNTANTS:
        raise InvalidValueError(
            "accountant", accountant, f"must be one of {', '.join(ACCOUNTANTS)}"
        )
    if fraction("sample_rate", sample_rate) < SMALLEST_RATE:
        raise InvalidValueError(
            "sample_rate", sample_rate, f"accountants answer from {SMALLEST_RATE:g} to 1"
        )
    if positive_int("steps", steps) > MOST_STEPS:
        raise InvalidValueError("steps", steps, f"accountants answer for at most {MOST_STEPS:,}")
    fraction("delta", delta, one_allowed=False)
    least = 2 * ROUNDING_PER_STEP * steps
    if accountant == "pld" and sample_rate < 1 and delta < least:
        raise InvalidValueError(
            "delta",
            delta,
            f"must be at least {least:.2g} for {steps:,} steps with accountant 'pld' (rounding "
            "hides less); choose a larger delta, fewer steps or accountant 'rdp'",
        )


@functools.lru_cache(maxsize=65536, typed=True)  # typed: True must not pass for a cached 1
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
        InvalidValueError: a field is invalid or outside of these bounds.
        AccountingError: if the accountant answers 0 or no finite number. dp-accounting answers 0
            after numerical failure too, so we never take a 0 for an answer.

    Example:
        >>> round(epsilon_of(32 / 2400, 9.67, 15_000, 1e-4), 2)
        0.5
    """
    check_bounds(sample_rate, steps, delta, accountant)
    positive_number("noise_multiplier", noise_multiplier)
    try:
        epsilon = ACCOUNTANTS[accountant](sample_rate, noise_multiplier, steps, delta)
    except (ArithmeticError, ValueError, MemoryError):  # beyond floats, or beyond this machine
        epsilon = math.nan
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise AccountingError(
            f"accountant '{accountant}' answers epsilon = {epsilon:g} for {steps} steps at "
            f"sample_rate = {sample_rate:g}, noise_multiplier = {noise_multiplier:g}, "
            f"delta = {delta:g}: not a number to promise; lower delta or the noise multiplier"
        )
    return epsilon
