"""Closed forms of the paper's section 'Noise level in clients' DP model updates', from scalars."""

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
    """Variance of one noisy batch gradient, summed over its p coordinates.

    The DP part is p c^2 z^2 / b^2. What is added to it depends on the clipping (the paper has two
    cases, and the approximation that drops the sampling part because p is large):

    - neither option: the approximation of eq. var_g_effective, the DP part alone;
    - ``mean_gradient_norm``: every sample is clipped, eq. var_g_effective,
      (c^2 - ||G||^2) / b + p c^2 z^2 / b^2;
    - ``gradient_variance``: no sample is clipped, eq. var_g_ineffective,
      sigma_g^2 + p c^2 z^2 / b^2.

    Args:
        p: number of model parameters.
        clip_norm: c, scalar or [n].
        noise_multiplier: z, scalar or [n]; 0 stands for no DP noise.
        batch_size: b, scalar or [n] (the expected batch: the divisor of the noisy sum).
        mean_gradient_norm: ||G||, at most c, scalar or [n].
        gradient_variance: sigma_g^2, the variance of the clean batch gradient, scalar or [n].

    Returns:
        sigma_g~^2, float64, of the broadcast shape of the arguments.

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
            "belongs to ineffective clipping and mean_gradient_norm to effective: give one",
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
            "mean_gradient_norm", mean_gradient_norm, f"cannot exceed clip_norm = {clip_norm!r}"
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
    """Variance of a client's update of one round: the paper's sigma_i^2, eq. sigma_i^2.

    sigma_i^2 = steps * lr^2 * sigma_g~^2 with steps = K_i ceil(N_i / b_i): the noise of every local
    step is independent. It is the quantity that `NoiseEstimate.variance` estimates.

    Args:
        p: number of model parameters.
        steps: local steps of one round, scalar or [n].
        learning_rate: local step size, scalar or [n].
        clip_norm: see `gradient_noise_variance`, as the remaining arguments.
        noise_multiplier: z.
        batch_size: b.
        mean_gradient_norm: ||G||, for effective clipping with its sampling part.
        gradient_variance: sigma_g^2, for ineffective clipping.

    Returns:
        sigma_i^2, float64, of the broadcast shape of the arguments.
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
    """Noise of the weighted sum of updates, sum_i w_i^2 sigma_i^2 (objective of eq. w_opt).

    Args:
        weights: [n], as used (they need not sum to 1).
        variance: [n], sigma_i^2; infinite where the weight is 0 is allowed.
    """
    v = _numbers("variance", variance, zero=True, infinite=True)
    w = _weights(weights, v)
    used = w != 0
    return float(np.sum(w[used] ** 2 * v[used]))


def oracle_noise(variance: ArrayLike) -> float:
    """The least noise that weights summing to 1 can reach, 1 / sum_i 1/sigma_i^2 (eq. w_opt).

    A client without noise makes it 0.
    """
    v = np.atleast_1d(_numbers("variance", variance, zero=True, infinite=True))
    if v.size == 0:
        raise InvalidValueError("variance", variance, "must be one number or more")
    if np.any(v == 0):
        return 0.0
    smallest = float(np.min(v))  # taken out, so that 1/v cannot overflow
    return smallest if np.isinf(smallest) else smallest / float(np.sum(smallest / v))


def excess_noise(weights: ArrayLike, variance: ArrayLike) -> float:
    """`aggregate_noise` relative to `oracle_noise`: 1 is perfect.

    With a noise-free client the oracle has no noise: 1 if the weights have none either, else inf.
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
    """Signal-to-noise ratio of a weighted sum over the best that any weights can reach, in [0, 1].

    A client's update carries signal in proportion to its local steps E_i, so the ratio is
    (sum w_i E_i)^2 / sum w_i^2 sigma_i^2, at most sum E_i^2 / sigma_i^2, which weights
    w_i ~ E_i / sigma_i^2 attain; for updates divided by their steps all E_i are 1 and 1/sigma_i^2
    is best.

    Args:
        weights: [n].
        variance: [n], sigma_i^2 > 0; infinite is allowed.
        steps: E_i, [n] or a scalar.
        reference: [n], the noise with which the best is attained, where it is another one: a method
            that makes clients add more noise than their budgets ask for stays behind.

    Example:
        >>> round(signal_share([0.8, 0.2], [1.0, 4.0]), 12)
        1.0
        >>> round(signal_share([0.8, 0.2], [1.0, 4.0], [1, 8]), 2)
        0.42
    """
    v = _numbers("variance", variance, infinite=True)
    w = _weights(weights, v)
    if w.size == 0:
        raise InvalidValueError("weights", weights, "must be one number or more")
    e = _numbers("steps", steps)
    if e.shape not in ((), w.shape):
        raise InvalidValueError("steps", e.shape, f"must be one number or [n] like {w.shape}")
    least = v if reference is None else _numbers("reference", reference, infinite=True)
    if least.shape != w.shape:
        raise InvalidValueError("reference", least.shape, f"must be [n] like weights, {w.shape}")
    smallest = float(np.min(least))
    if np.isinf(smallest):
        return 0.0  # nobody says anything
    noise = aggregate_noise(w, v / smallest)
    best = float(np.sum(e**2 / (least / smallest)))
    return float(np.sum(w * e) ** 2 / (noise * best)) if noise > 0 and best > 0 else 0.0


def common_factor(estimate: ArrayLike, variance: ArrayLike) -> float:
    """The factor by which an estimate is off for all clients alike: the median of the ratios.

    Weights do not depend on it (the paper's section on reliability, its r^2). NaN without a client
    whose true variance is above 0.
    """
    e = np.atleast_1d(_numbers("estimate", estimate, zero=True, infinite=True))
    v = np.atleast_1d(_numbers("variance", variance, zero=True))
    if e.shape != v.shape:
        raise InvalidValueError("estimate", e.shape, f"must be [n] like variance, {v.shape}")
    return float(np.median(e[v > 0] / v[v > 0])) if np.any(v > 0) else float("nan")


def _weights(value: ArrayLike, variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """``value`` as float64 if it is [n] like ``variance``."""
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
    """``value`` as float64 if all of it is > 0 (>= 0 with ``zero``) and finite."""
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
