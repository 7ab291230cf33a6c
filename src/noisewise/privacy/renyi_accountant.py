"""Epsilon by Renyi DP (accountants ``rdp`` and ``moments``), for steps of one or several kinds.

Every Renyi divergence that epsilon is computed from comes from dp-accounting. The estimates of
`noisewise.privacy.renyi_estimates` only choose the orders.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import dp_accounting
import numpy as np
from dp_accounting import rdp

from noisewise.errors import AccountingError
from noisewise.privacy.pld_accountant import StepKinds
from noisewise.privacy.renyi_estimates import Array, Conversion

__all__ = [
    "MOMENTS_ORDERS",
    "RENYI",
    "moments_floor",
    "renyi_epsilon",
    "renyi_epsilon_of_kinds",
    "renyi_epsilons_by_round",
]

MOMENTS_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(a) for a in range(12, 65))
"""The orders of the authors' accountant: 1.1 to 10.9 and 12 to 64."""


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
"""Orders and conversion of each accountant by Renyi DP, by its name."""


def moments_floor(delta: float) -> float:
    """The smallest epsilon that ``moments`` can reach with any noise: log(1/delta) / 63."""
    return math.log(1 / delta) / (max(MOMENTS_ORDERS) - 1)


def renyi_epsilon(
    accountant: str, sample_rate: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Epsilon of steps of one kind: min over orders a of rdp(a) plus the conversion's penalty.

    dp-accounting computes only the best orders, or all orders if the best ones are numerically
    invalid. Fewer orders can only make the minimum larger, so a wrong choice would still be safe.

    Raises:
        AccountingError: no order gives a valid divergence.
    """
    conversion = RENYI[accountant]
    promising = conversion.promising(sample_rate, noise_multiplier, steps, delta)
    for orders in (promising, conversion.orders):
        if orders:
            used, values = _divergences(orders, sample_rate, noise_multiplier, steps)
            if len(used):
                return _converted(accountant, used, values, delta)
    raise AccountingError(
        f"no Renyi order is numerically valid at sample_rate = {sample_rate:g}, "
        f"noise_multiplier = {noise_multiplier:g}, {steps} steps; use accountant 'pld'"
    )


def renyi_epsilon_of_kinds(accountant: str, kinds: StepKinds, delta: float) -> float:
    """Epsilon of steps of several kinds, whose Renyi DP adds up; 0 if no order is valid."""
    total: Array = sum(
        (steps * _one_step_divergences(accountant, q, z) for q, z, steps in kinds),
        start=np.zeros(1),
    )
    valid = np.isfinite(total)
    if not valid.any():
        return 0.0
    orders = np.array(RENYI[accountant].orders)[valid]
    return _converted(accountant, orders, total[valid], delta)


def renyi_epsilons_by_round(
    accountant: str,
    sample_rate: float,
    noise_multiplier: float,
    steps_per_round: int,
    rounds: int,
    delta: float,
) -> Iterator[float]:
    """Epsilon after 1, 2, ..., ``rounds`` rounds; Renyi DP is linear in the steps."""
    orders, one_step = _divergences(RENYI[accountant].orders, sample_rate, noise_multiplier, 1)
    for number in range(1, rounds + 1):
        values = number * steps_per_round * one_step
        yield _converted(accountant, orders, values, delta) if len(orders) else 0.0


@contextlib.contextmanager
def _without_warnings_about_orders() -> Iterator[None]:
    """Silence dp-accounting's log line for each order that it leaves out.

    Leaving orders out is safe (the minimum over fewer orders is larger) and happens at every call.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _divergences(
    orders: tuple[float, ...], sample_rate: float, noise_multiplier: float, steps: int
) -> tuple[Array, Array]:
    """Orders and Renyi DP of the steps, without the orders for which dp-accounting failed."""
    accountant = rdp.RdpAccountant(orders)
    event = dp_accounting.PoissonSampledDpEvent(
        sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    with _without_warnings_about_orders():
        accountant.compose(event, steps)
    used, values = np.asarray(accountant._orders), np.asarray(accountant._rdp)
    # A negative divergence is numerical failure, which dp-accounting would turn into epsilon 0.
    valid = np.isfinite(values) & (values > 0)
    return used[valid], values[valid]


@functools.lru_cache(maxsize=256)
def _one_step_divergences(accountant: str, sample_rate: float, noise_multiplier: float) -> Array:
    """Renyi DP of one step at all orders; inf where dp-accounting failed."""
    orders = RENYI[accountant].orders
    used, values = _divergences(orders, sample_rate, noise_multiplier, 1)
    by_order = dict(zip(used.tolist(), values.tolist(), strict=True))
    return np.array([by_order.get(order, math.inf) for order in orders])


def _converted(accountant: str, orders: Array, values: Array, delta: float) -> float:
    """Epsilon of Renyi DP ``values`` at ``orders``."""
    if accountant == "moments":
        return float(np.min(values + _classic(orders, delta)))
    return float(rdp.compute_epsilon(orders, values, delta)[0])
