"""Aggregation weights: inverse variance with bounds, noise against bias, and proportional."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import non_negative_number
from noisewise.errors import InvalidValueError

__all__ = [
    "capped_weights",
    "inverse_variance_weights",
    "noise_and_bias_weights",
    "proportional_weights",
    "without_empty",
]


def inverse_variance_weights(
    variance: ArrayLike, floor: float = 0.0, cap: float = 1.0
) -> NDArray[np.float64]:
    """Compute the weights with the least aggregated noise, each between ``floor`` and ``cap``.

    They solve the paper's eq. w_opt with bounds: min sum_i w_i^2 sigma_i^2, sum_i w_i = 1,
    floor <= w_i <= cap. The optimum is w_i = clip(tau / sigma_i^2, floor, cap) with the tau for
    which the sum is 1; without bounds it is the paper's w_i ~ 1/sigma_i^2. (Clipping the weights
    without bounds and renormalising them is not optimal, and can exceed the bounds again.)

    Clients with variance 0 get the weights of the limit sigma_i^2 -> 0: the others get the floor,
    and the clients with variance 0 share the rest equally, each up to the cap. If weight remains,
    the others share it. A client with infinite variance gets the floor, or more if the caps of the
    others require it.

    Args:
        variance: [n], sigma_i^2 >= 0, at least one of them finite.
        floor: smallest weight of a client, 0 <= floor <= 1/n.
        cap: largest weight of a client, at least 1/n.

    Returns:
        [n] float64, summing to 1.

    Raises:
        InvalidValueError: all variances are infinite, one is negative or NaN, or a bound is
            impossible.

    Examples:
        >>> inverse_variance_weights([1.0, 4.0]).tolist()
        [0.8, 0.2]
        >>> inverse_variance_weights([1.0, 4.0, 4.0], cap=0.5).tolist()
        [0.5, 0.25, 0.25]
    """
    v = _vector("variance", variance)
    n = v.size
    if np.all(np.isinf(v)):
        raise InvalidValueError("variance", variance, "must have at least one finite value")
    if not 0 <= floor <= (1 + _ROUNDING) / n:
        raise InvalidValueError("floor", floor, f"must be in [0, 1/n] = [0, {1 / n:g}]")
    cap = _checked_cap(cap, n)
    weights = np.full(n, float(floor))
    # Clients without noise come first, then those with finite and with infinite variance.
    for group in (v == 0, (v > 0) & np.isfinite(v), np.isinf(v)):
        members = int(np.count_nonzero(group))
        if not members:
            continue
        mass = 1.0 - float(np.sum(weights[~group]))
        if mass >= members * cap:
            weights[group] = cap
            continue
        noisy = group & (v > 0) & np.isfinite(v)
        precision = np.min(v[noisy]) / v[noisy] if np.any(noisy) else np.ones(members)
        weights[group] = _share(mass, np.maximum(precision, _TINY), floor, cap)
        break
    return weights


def noise_and_bias_weights(
    variance: ArrayLike,
    spread: float,
    target: ArrayLike | None = None,
    cap: float = 1.0,
) -> NDArray[np.float64]:
    """Compute weights that balance noise against bias towards clients with little noise.

    They minimise sum_i w_i^2 v_i + zeta^2 sum_i (w_i - lambda_i)^2 with sum_i w_i = 1 and
    0 <= w_i <= cap. The solution is w_i = min(cap, (tau + zeta^2 lambda_i) / (v_i + zeta^2)) with
    the tau >= 0 for which the sum is 1. zeta -> 0 gives inverse-variance weights, and
    zeta -> infinity gives lambda.

    Args:
        variance: v_i, [n], >= 0, noise energies; at least one finite.
        spread: zeta^2 >= 0, the energy of the signal that only one client has.
        target: lambda, [n], >= 0, summing to 1; uniform by default.
        cap: largest weight of a client, at least 1/n.

    Returns:
        [n] float64, summing to 1.

    Raises:
        InvalidValueError: an argument has a wrong shape or range; the message names it.

    Examples:
        >>> noise_and_bias_weights([1.0, 4.0], 0.0).tolist()
        [0.8, 0.2]
        >>> noise_and_bias_weights([1.0, 4.0], 1e9).round(6).tolist()
        [0.5, 0.5]
    """
    v = _vector("variance", variance)
    spread = non_negative_number("spread", spread)
    cap = _checked_cap(cap, v.size)
    lam = np.full(v.size, 1 / v.size) if target is None else _vector("target", target)
    if lam.shape != v.shape or abs(float(lam.sum()) - 1) > 1e-6:
        raise InvalidValueError("target", target, f"must be {v.size} numbers with sum 1")
    if spread == 0 or np.any(v + spread == 0):
        return inverse_variance_weights(v, cap=cap)
    finite = np.isfinite(v)
    if not np.any(finite) or np.count_nonzero(finite) * cap < 1 - _ROUNDING:
        return inverse_variance_weights(v, cap=cap)
    weights = np.zeros(v.size)
    share = lam[finite] / lam[finite].sum() if lam[finite].any() else np.ones(finite.sum())
    share = share / share.sum()
    # In units of the smallest v + zeta^2, to prevent overflow.
    unit = float(np.min(v[finite] + spread))
    precision = unit / (v[finite] + spread)
    offset = (spread / unit) * share * precision
    free = np.ones(share.size, dtype=bool)
    candidates = np.zeros(share.size)
    for _ in range(share.size + 1):  # tau only grows, so weights that reach the cap stay there
        mass = 1.0 - cap * np.count_nonzero(~free)
        tau = (mass - offset[free].sum()) / precision[free].sum()
        candidates = np.where(free, tau * precision + offset, cap)
        over = free & (candidates > cap)
        free &= ~over
        if not over.any() or not free.any():
            break
    weights[finite] = np.clip(candidates, 0.0, cap)
    return weights / weights.sum() if cap >= 1 else weights


def capped_weights(values: ArrayLike, cap: float) -> NDArray[np.float64]:
    """Compute weights proportional to ``values``, with an upper limit.

    Weight above the limit goes to the other clients in proportion, as in
    `inverse_variance_weights`.

    Args:
        values: [n], >= 0, finite, at least one > 0.
        cap: largest weight of a client, at least 1/n.

    Returns:
        [n] float64, summing to 1.

    Raises:
        InvalidValueError: a value or the cap is out of range.

    Examples:
        >>> capped_weights([8.0, 1.0, 1.0], 0.5).tolist()
        [0.5, 0.25, 0.25]
    """
    weights = proportional_weights(values)
    with np.errstate(divide="ignore"):
        return inverse_variance_weights(1 / weights, cap=cap)


def without_empty(variance: ArrayLike, empty: ArrayLike) -> NDArray[np.float64]:
    """Return the variances with those of all-zero updates set to infinity.

    A client that adds noise cannot send an all-zero update, so this is a fault or an attack. Its
    estimated variance is 0, and with weights of 1/variance it would get the whole weight. If all
    updates are zero, the weights do not matter, and the variances are returned unchanged.

    Args:
        variance: [n].
        empty: [n] bool, True for all-zero updates.

    Returns:
        [n] float64.
    """
    v, is_empty = np.asarray(variance, dtype=np.float64), np.asarray(empty, dtype=bool)
    return v if is_empty.all() else np.where(is_empty, np.inf, v)


def proportional_weights(values: ArrayLike) -> NDArray[np.float64]:
    """Compute weights proportional to ``values``: w ~ N (DPFedAvg), w ~ epsilon (WeiAvg).

    Args:
        values: [n], >= 0, finite, at least one > 0.

    Returns:
        [n] float64, summing to 1.

    Raises:
        InvalidValueError: a value is out of range, or all are 0.

    Examples:
        >>> proportional_weights([1, 3]).tolist()
        [0.25, 0.75]
    """
    v = _vector("values", values)
    largest = float(np.max(v))
    if not 0 < largest < np.inf:
        raise InvalidValueError("values", values, "must be finite, and at least one must be > 0")
    v = v / largest  # the sum cannot overflow
    return np.asarray(v / np.sum(v))


_TINY = 1e-200  # keeps cap / precision finite
_ROUNDING = 1e-12  # tolerance for n * cap >= 1, because 1/n is not exact in binary


def _share(
    mass: float, precision: NDArray[np.float64], floor: float, cap: float
) -> NDArray[np.float64]:
    """Return clip(tau * precision, floor, cap) with the tau > 0 for which the sum is ``mass``.

    The sum is non-decreasing and piecewise linear in tau, with kinks where a weight leaves its
    floor or reaches its cap. The function finds the piece and solves the linear equation on it.
    """
    kinks = np.unique(np.concatenate([floor / precision, cap / precision]))
    sums = np.clip(np.outer(kinks, precision), floor, cap).sum(axis=1)
    i = int(np.searchsorted(sums, mass))  # sums[i-1] < mass <= sums[i]
    if i == 0:
        return np.full(precision.size, floor)
    middle = 0.5 * (kinks[i - 1] + kinks[min(i, kinks.size - 1)])
    low, high = middle * precision <= floor, middle * precision >= cap
    free = ~(low | high)
    rest = mass - floor * np.count_nonzero(low) - cap * np.count_nonzero(high)
    weights = np.where(low, floor, cap)
    if np.any(free):
        weights[free] = precision[free] * (rest / np.sum(precision[free]))
    return np.clip(weights, floor, cap)


def _checked_cap(cap: float, n: int) -> float:
    """Return ``cap``, at most 1; raise if it is NaN or too small for n weights."""
    if not cap * n >= 1 - _ROUNDING:  # true for NaN
        raise InvalidValueError(
            "cap", cap, f"must be at least 1/n = {1 / n:g}, so that n weights can sum to 1"
        )
    return min(float(cap), 1.0)


def _vector(field: str, value: ArrayLike) -> NDArray[np.float64]:
    try:
        v = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValueError(field, value, "must be numbers, one for each client") from None
    if v.ndim != 1 or v.size == 0:
        raise InvalidValueError(field, v.shape, "must have shape [n], n >= 1")
    if not np.all(v >= 0):
        bad = int(np.flatnonzero(~(v >= 0))[0])
        raise InvalidValueError(f"{field}[{bad}]", float(v[bad]), "must be a number >= 0")
    return v
