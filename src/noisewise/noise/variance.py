"""Closed forms of the noise in updates (the paper's "Noise level in clients' DP model updates")."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.errors import InvalidValueError

__all__ = [
    "aggregate_noise",
    "common_factor",
    "excess_noise",
    "gradient_noise_variance",
    "oracle_noise",
    "signal_share",
    "update_noise_variance",
]


def gradient_noise_variance(
    p: int,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    batch_size: ArrayLike,
    *,
    mean_gradient_norm: ArrayLike | None = None,
    gradient_variance: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Compute the variance of one noisy batch gradient, summed over its p coordinates.

    The variance is p c^2 z^2 / b^2 for the DP noise, plus a sampling part that depends on the
    clipping. The paper has two cases, and an approximation for large p without the sampling part:

    - no option: the approximation of eq. var_g_effective, the DP noise only;
    - ``mean_gradient_norm``: every record is clipped, eq. var_g_effective,
      (c^2 - ||G||^2) / b + p c^2 z^2 / b^2;
    - ``gradient_variance``: no record is clipped, eq. var_g_ineffective,
      sigma_g^2 + p c^2 z^2 / b^2.

    Args:
        p: number of model parameters.
        clip_norm: c, scalar or [n].
        noise_multiplier: z, scalar or [n]; 0 means no DP noise.
        batch_size: b, scalar or [n]: the expected batch size, which divides the noisy sum.
        mean_gradient_norm: ||G||, at most c, scalar or [n].
        gradient_variance: sigma_g^2, the variance of the batch gradient without DP noise, scalar or
            [n].

    Returns:
        sigma_g~^2 in float64, with the broadcast shape of the arguments.

    Raises:
        InvalidValueError: an argument is out of range, or both options are given.

    Examples:
        >>> round(float(gradient_noise_variance(1000, 1.0, 2.0, 10)), 6)
        40.0
        >>> round(float(gradient_noise_variance(1000, 1.0, 2.0, 10, mean_gradient_norm=0.0)), 6)
        40.1
    """
    if mean_gradient_norm is not None and gradient_variance is not None:
        raise InvalidValueError(
            "gradient_variance",
            gradient_variance,
            "is for the case that no record is clipped, mean_gradient_norm for the case that all "
            "are: set only one of the two",
        )
    c = _numbers("clip_norm", clip_norm)
    z = _numbers("noise_multiplier", noise_multiplier, zero=True)
    b = _numbers("batch_size", batch_size)
    dp = _numbers("p", p) * (c * z / b) ** 2
    if gradient_variance is not None:
        return np.asarray(_numbers("gradient_variance", gradient_variance, zero=True) + dp)
    if mean_gradient_norm is None:
        return np.asarray(dp)
    g = _numbers("mean_gradient_norm", mean_gradient_norm, zero=True)
    if np.any(g > c):
        raise InvalidValueError(
            "mean_gradient_norm", mean_gradient_norm, f"must be at most clip_norm = {clip_norm!r}"
        )
    return np.asarray((c**2 - g**2) / b + dp)


def update_noise_variance(
    p: int,
    steps: ArrayLike,
    learning_rate: ArrayLike,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    batch_size: ArrayLike,
    *,
    mean_gradient_norm: ArrayLike | None = None,
    gradient_variance: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Compute the noise variance of a client's update in one round: the paper's eq. sigma_i^2.

    sigma_i^2 = steps * lr^2 * sigma_g~^2 with steps = K_i ceil(N_i / b_i), because the noise of the
    local steps is independent. `NoiseEstimate.variance` estimates this quantity.

    Args:
        p: number of model parameters.
        steps: local steps of one round, scalar or [n].
        learning_rate: local step size, scalar or [n].
        clip_norm: c; this and the following arguments are those of `gradient_noise_variance`.
        noise_multiplier: z.
        batch_size: b.
        mean_gradient_norm: ||G||, if every record is clipped.
        gradient_variance: sigma_g^2, if no record is clipped.

    Returns:
        sigma_i^2 in float64, with the broadcast shape of the arguments.

    Raises:
        InvalidValueError: an argument is out of range.

    Example:
        >>> update_noise_variance(1000, [1, 4], 0.5, 1.0, 2.0, 10).round(6).tolist()
        [10.0, 40.0]
    """
    gradient = gradient_noise_variance(
        p,
        clip_norm,
        noise_multiplier,
        batch_size,
        mean_gradient_norm=mean_gradient_norm,
        gradient_variance=gradient_variance,
    )
    rate = _numbers("learning_rate", learning_rate)
    return np.asarray(_numbers("steps", steps) * rate**2 * gradient)


def aggregate_noise(weights: ArrayLike, variance: ArrayLike) -> float:
    """Compute the noise energy of a weighted sum, sum_i w_i^2 sigma_i^2 (objective of eq. w_opt).

    Args:
        weights: [n]; they do not have to sum to 1.
        variance: [n], sigma_i^2 >= 0; may be infinite where the weight is 0.

    Returns:
        The noise energy.

    Raises:
        InvalidValueError: a variance is negative or NaN, or the shapes differ.

    Example:
        >>> aggregate_noise([0.5, 0.5], [1.0, 3.0])
        1.0
    """
    v = _numbers("variance", variance, zero=True, infinite=True)
    w = _weights(weights, v)
    used = w != 0
    return float(np.sum(w[used] ** 2 * v[used]))


def oracle_noise(variance: ArrayLike) -> float:
    """Compute the least noise energy of weights with sum 1: 1 / sum_i 1/sigma_i^2 (eq. w_opt).

    Args:
        variance: [n], sigma_i^2 >= 0; infinite values are allowed.

    Returns:
        The noise energy; 0 if a client has no noise.

    Raises:
        InvalidValueError: there is no variance, or one is negative or NaN.
    """
    v = np.atleast_1d(_numbers("variance", variance, zero=True, infinite=True))
    if v.size == 0:
        raise InvalidValueError("variance", variance, "must have at least one number")
    if np.any(v == 0):
        return 0.0
    smallest = float(np.min(v))  # factored out, so that 1/v cannot overflow
    return smallest if np.isinf(smallest) else smallest / float(np.sum(smallest / v))


def excess_noise(weights: ArrayLike, variance: ArrayLike) -> float:
    """Compute `aggregate_noise` divided by `oracle_noise`; 1 is the optimum.

    Args:
        weights: [n].
        variance: [n], sigma_i^2 >= 0.

    Returns:
        The ratio. If a client has no noise, the oracle has none either; the result is then 1 if
        the weighted sum has no noise, and inf otherwise.

    Raises:
        InvalidValueError: a variance is negative or NaN, or the shapes differ.
    """
    noise, least = aggregate_noise(weights, variance), oracle_noise(variance)
    if least == 0:
        return 1.0 if noise == 0 else float("inf")
    return noise / least


def signal_share(
    weights: ArrayLike,
    variance: ArrayLike,
    steps: ArrayLike = 1.0,
    reference: ArrayLike | None = None,
) -> float:
    """Compute the signal-to-noise ratio of a weighted sum, relative to the best weights.

    The signal in a client's update is proportional to its local steps E_i, so the ratio is
    (sum w_i E_i)^2 / sum w_i^2 sigma_i^2. Its maximum is sum E_i^2 / sigma_i^2, at
    w_i ~ E_i / sigma_i^2. For updates divided by their steps, all E_i are 1 and the best weights
    are w_i ~ 1/sigma_i^2.

    Args:
        weights: [n].
        variance: [n], sigma_i^2 > 0; infinite values are allowed.
        steps: E_i, [n] or a scalar.
        reference: [n], noise energies for the best weights; ``variance`` by default. With the noise
            that the clients' own budgets require, a method that makes clients add more noise gets
            a lower result.

    Returns:
        A number in [0, 1]; 0 if all reference variances are infinite.

    Raises:
        InvalidValueError: a value is out of range, or the shapes differ.

    Example:
        >>> round(signal_share([0.8, 0.2], [1.0, 4.0]), 12)
        1.0
        >>> round(signal_share([0.8, 0.2], [1.0, 4.0], [1, 8]), 2)
        0.42
    """
    v = _numbers("variance", variance, infinite=True)
    w = _weights(weights, v)
    if w.size == 0:
        raise InvalidValueError("weights", weights, "must have at least one number")
    e = _numbers("steps", steps)
    if e.shape not in ((), w.shape):
        raise InvalidValueError("steps", e.shape, f"must be one number or [n] like {w.shape}")
    best_v = v if reference is None else _numbers("reference", reference, infinite=True)
    if best_v.shape != w.shape:
        raise InvalidValueError("reference", best_v.shape, f"must be [n] like weights, {w.shape}")
    smallest = float(np.min(best_v))
    if np.isinf(smallest):
        return 0.0  # all variances are infinite
    noise = aggregate_noise(w, v / smallest)
    best = float(np.sum(e**2 / (best_v / smallest)))
    return float(np.sum(w * e) ** 2 / (noise * best)) if noise > 0 and best > 0 else 0.0


def common_factor(estimate: ArrayLike, variance: ArrayLike) -> float:
    """Compute the factor by which an estimate is wrong for all clients: the median of the ratios.

    Weights do not depend on this factor (the paper's section on reliability, its r^2).

    Args:
        estimate: [n], estimated noise energies.
        variance: [n], true noise energies >= 0.

    Returns:
        The median of estimate / variance over clients with variance > 0; NaN if there is none.

    Raises:
        InvalidValueError: a value is out of range, or the shapes differ.

    Example:
        >>> common_factor([2.0, 4.0, 8.2], [1.0, 2.0, 4.0])
        2.0
    """
    e = np.atleast_1d(_numbers("estimate", estimate, zero=True, infinite=True))
    v = np.atleast_1d(_numbers("variance", variance, zero=True))
    if e.shape != v.shape:
        raise InvalidValueError("estimate", e.shape, f"must be [n] like variance, {v.shape}")
    return float(np.median(e[v > 0] / v[v > 0])) if np.any(v > 0) else float("nan")


def _weights(value: ArrayLike, variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``value`` in float64 if it has the shape [n] of ``variance``; raise otherwise."""
    try:
        weights = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValueError("weights", value, "must be numbers, one for each client") from None
    if weights.shape != variance.shape or weights.ndim != 1:
        raise InvalidValueError(
            "weights", weights.shape, f"must be [n] like variance, {variance.shape}"
        )
    return weights


def _numbers(
    field: str, value: ArrayLike, *, zero: bool = False, infinite: bool = False
) -> NDArray[np.float64]:
    """Return ``value`` in float64 if all of it is > 0 (>= 0 with ``zero``) and finite."""
    allowed = f"must be {'' if infinite else 'finite and '}{'>= 0' if zero else '> 0'}"
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValueError(field, value, allowed) from None
    good = numbers >= 0 if zero else numbers > 0
    if not infinite:
        good = good & np.isfinite(numbers)
    if not np.all(good):
        raise InvalidValueError(field, value, allowed)
    return numbers
