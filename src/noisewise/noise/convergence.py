"""The paper's convergence bound as a function, and the variant that can reward noise-aware weights.

As printed, the theorem's noise term beta eta sum_i E_i^2 sigma_i^2 contains no aggregation weight:
the proof takes ||w||^2 out by Cauchy and Schwarz and then drops it, since it is at most 1. So the
weights of the least printed bound do not depend on the noise (for uniform lambda they are lambda;
else Psi_p also draws sum_j w_j E_j to the plain mean of the E_i), and the bound cannot say why one
should weight by noise at all. The variant keeps the weights: the noise of the aggregated update is
sum_i w_i^2 E_i sigma_i^2 (eq. sigma_i^2 without eta^2), which is what enters f's smoothness
inequality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import non_negative_number, positive_int, positive_number
from noisewise.errors import InvalidValueError

__all__ = ["ConvergenceBound", "convergence_bound"]


@dataclass(frozen=True)
class ConvergenceBound:
    """Bound on min_e E||grad f(theta^e)||^2 (theorem Robust-HDP), and what it is made of.

    Attributes:
        value: 12 / (11 E_min - 7) * (optimisation + psi_sigma + psi_p).
        optimisation: (f(theta^0) - f*) / (E eta).
        psi_sigma: the part of noise and of different data.
        noise: of psi_sigma, the last term: beta eta sum E_i^2 sigma_ig^2 as printed, or with the
            weights kept. What else psi_sigma has is the drift of local steps.
        psi_p: the part of weights that differ from lambda and of unequal local steps.
        rate_conditions: whether eta satisfies the theorem's two conditions; where one is False the
            value is no bound.
        largest_rate: the largest eta that satisfies both.
    """

    value: float
    optimisation: float
    psi_sigma: float
    noise: float
    psi_p: float
    rate_conditions: tuple[bool, bool]
    largest_rate: float

    @property
    def valid(self) -> bool:
        """Whether the theorem's conditions on the learning rate hold."""
        return all(self.rate_conditions)


def convergence_bound(
    *,
    weights: ArrayLike,
    steps: ArrayLike,
    gradient_variance: ArrayLike,
    learning_rate: float,
    rounds: int,
    smoothness: float,
    lipschitz: float,
    heterogeneity: float,
    gap: float,
    target: ArrayLike | None = None,
    weighted_noise: bool = False,
) -> ConvergenceBound:
    """The theorem's bound for weights that stay the same over rounds.

    Psi_sigma = 6 beta^2 eta^2 (1 + sum E_i) (2 sum E_i^4 sigma^2 + 1/3 sum E_i^3 sigma_ig^2)
                + beta eta sum E_i^2 sigma_ig^2,
    Psi_p = 8/3 L0^2 (n sum E_i^2 (w_i - lambda_i)^2 + ||lambda||^2 sum (E_i - sum_j w_j E_j)^2),
    as printed in the appendix (eq. psi_ineq); valid for eta <= 1 / (6 beta E_i) for all i and
    eta <= 1 / (12 beta sqrt((1 + sum E_i) sum E_i^4)).

    Args:
        weights: w, [n], summing to 1.
        steps: E_i, local steps of a round, [n], each >= 1 (at 1 a client does not drift, so
            the proof's lemma on local drift, written for E_i >= 2, holds trivially).
        gradient_variance: sigma_ig^2 of one noisy batch gradient, [n] or scalar; see
            `noisewise.noise.variance.gradient_noise_variance`.
        learning_rate: eta.
        rounds: E.
        smoothness: beta.
        lipschitz: L0.
        heterogeneity: sigma^2, bound on ||grad f_i - grad f||^2.
        gap: f(theta^0) - f*.
        target: lambda, [n], summing to 1; uniform by default.
        weighted_noise: True replaces the term beta eta sum E_i^2 sigma_ig^2 by
            beta eta sum w_i^2 E_i sigma_ig^2, which the weights can lower. The variant follows from
            the same smoothness inequality, since the noises of clients and of steps are independent
            and unbiased; the drift term is left as printed.

    Example:
        >>> even = dict(steps=[10, 10], gradient_variance=[1, 100], learning_rate=1e-4, rounds=9,
        ...             smoothness=1, lipschitz=1, heterogeneity=0, gap=1)
        >>> aware = [100 / 101, 1 / 101]
        >>> printed = [convergence_bound(weights=w, **even).psi_sigma for w in ([.5, .5], aware)]
        >>> printed[0] == printed[1]
        True
        >>> ours = [convergence_bound(weights=w, weighted_noise=True, **even).psi_sigma
        ...         for w in ([.5, .5], aware)]
        >>> ours[1] < ours[0]
        True
    """
    w = _shares("weights", weights)
    n = w.size
    lam = np.full(n, 1 / n) if target is None else _shares("target", target)
    if lam.shape != (n,):
        raise InvalidValueError("target", target, f"must be {n} numbers, like weights")
    many = f"must be {n} finite numbers >= 1, like weights"
    e = _numbers("steps", steps, many)
    if e.shape != (n,) or not np.all(np.isfinite(e) & (e >= 1)):
        raise InvalidValueError("steps", steps, many)
    level = f"must be one or {n} finite numbers >= 0"
    variance = _numbers("gradient_variance", gradient_variance, level)
    if variance.shape not in ((), (n,)) or not np.all(np.isfinite(variance) & (variance >= 0)):
        raise InvalidValueError("gradient_variance", gradient_variance, level)
    eta = positive_number("learning_rate", learning_rate)
    beta = positive_number("smoothness", smoothness)
    l0 = non_negative_number("lipschitz", lipschitz)
    spread = non_negative_number("heterogeneity", heterogeneity)
    start = non_negative_number("gap", gap)
    first = 1 / (6 * beta * float(e.max()))
    second = 1 / (12 * beta * float(np.sqrt((1 + e.sum()) * np.sum(e**4))))
    drift = 2 * np.sum(e**4) * spread + np.sum(e**3 * variance) / 3
    noise = np.sum(w**2 * e * variance) if weighted_noise else np.sum(e**2 * variance)
    psi_sigma = 6 * beta**2 * eta**2 * (1 + e.sum()) * drift + beta * eta * noise
    uneven = n * np.sum(e**2 * (w - lam) ** 2)
    uneven += np.sum(lam**2) * np.sum((e - np.sum(w * e)) ** 2)
    psi_p = 8 / 3 * l0**2 * uneven
    optimisation = start / (positive_int("rounds", rounds) * eta)
    value = 12 / (11 * float(e.min()) - 7) * (optimisation + psi_sigma + psi_p)
    return ConvergenceBound(
        float(value),
        float(optimisation),
        float(psi_sigma),
        float(beta * eta * noise),
        float(psi_p),
        (eta <= first, eta <= second),
        min(first, second),
    )


def _numbers(field: str, value: ArrayLike, allowed: str) -> NDArray[np.float64]:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValueError(field, value, allowed) from None


def _shares(field: str, value: ArrayLike) -> NDArray[np.float64]:
    allowed = "must be [n], each >= 0, with sum 1"
    shares = _numbers(field, value, allowed)
    if shares.ndim != 1 or not np.all(shares >= 0) or abs(float(shares.sum()) - 1) > 1e-6:
        raise InvalidValueError(field, value, allowed)
    return shares
