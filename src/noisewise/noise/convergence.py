"""The paper's convergence bound, and a variant whose noise term depends on the weights.

In the printed theorem, the noise term beta eta sum_i E_i^2 sigma_i^2 contains no aggregation
weight: the proof applies the Cauchy-Schwarz inequality and then drops the factor ||w||^2 because it
is at most 1. The weights that minimise the printed bound therefore do not depend on the noise. For
uniform lambda they equal lambda; otherwise Psi_p also moves sum_j w_j E_j towards the mean of the
E_i. The printed bound thus gives no reason to weight by noise. The variant keeps the weights: the
noise of the aggregated update is sum_i w_i^2 E_i sigma_i^2 (eq. sigma_i^2 without eta^2), and this
term enters the smoothness inequality of f.
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
    """Bound on min_e E||grad f(theta^e)||^2 (theorem Robust-HDP), and its terms.

    Attributes:
        value: 12 / (11 E_min - 7) * (optimisation + psi_sigma + psi_p).
        optimisation: (f(theta^0) - f*) / (E eta).
        psi_sigma: the part that is due to noise and to differences between the clients' data.
        noise: the last term of psi_sigma, beta eta sum E_i^2 sigma_ig^2 as printed, or its variant
            with weights. The rest of psi_sigma is the drift of the local steps.
        psi_p: the part that is due to weights different from lambda and to unequal local steps.
        rate_conditions: whether eta satisfies each of the theorem's two conditions; if one is
            False, ``value`` is not a bound.
        largest_rate: the largest eta that satisfies both conditions.
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
    """Compute the theorem's bound for weights that are the same in all rounds.

    Psi_sigma = 6 beta^2 eta^2 (1 + sum E_i) (2 sum E_i^4 sigma^2 + 1/3 sum E_i^3 sigma_ig^2)
                + beta eta sum E_i^2 sigma_ig^2,
    Psi_p = 8/3 L0^2 (n sum E_i^2 (w_i - lambda_i)^2 + ||lambda||^2 sum (E_i - sum_j w_j E_j)^2),
    as printed in the appendix (eq. psi_ineq); valid for eta <= 1 / (6 beta E_i) for all i and
    eta <= 1 / (12 beta sqrt((1 + sum E_i) sum E_i^4)).

    Args:
        weights: w, [n], summing to 1.
        steps: E_i, local steps of a round, [n], each >= 1. (The proof's lemma on local drift is
            written for E_i >= 2; with one step there is no drift, and the lemma holds trivially.)
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
            the same smoothness inequality, because the noise of different clients and steps is
            independent and unbiased; the drift term stays as printed.

    Returns:
        The bound and its terms.

    Raises:
        InvalidValueError: an argument has a wrong shape or range; the message names it.

    Example:
        >>> setting = dict(steps=[10, 10], gradient_variance=[1, 100], learning_rate=1e-4, rounds=9,
        ...                smoothness=1, lipschitz=1, heterogeneity=0, gap=1)
        >>> equal, noise_aware = [.5, .5], [100 / 101, 1 / 101]
        >>> printed = [convergence_bound(weights=w, **setting) for w in (equal, noise_aware)]
        >>> printed[0].psi_sigma == printed[1].psi_sigma
        True
        >>> variant = [convergence_bound(weights=w, weighted_noise=True, **setting)
        ...            for w in (equal, noise_aware)]
        >>> variant[1].psi_sigma < variant[0].psi_sigma
        True
    """
    w = _shares("weights", weights)
    n = w.size
    lam = np.full(n, 1 / n) if target is None else _shares("target", target)
    if lam.shape != (n,):
        raise InvalidValueError("target", target, f"must be {n} numbers, like weights")
    allowed_steps = f"must be {n} finite numbers >= 1, like weights"
    e = _numbers("steps", steps, allowed_steps)
    if e.shape != (n,) or not np.all(np.isfinite(e) & (e >= 1)):
        raise InvalidValueError("steps", steps, allowed_steps)
    allowed_variance = f"must be one number or {n} numbers, finite and >= 0"
    variance = _numbers("gradient_variance", gradient_variance, allowed_variance)
    if variance.shape not in ((), (n,)) or not np.all(np.isfinite(variance) & (variance >= 0)):
        raise InvalidValueError("gradient_variance", gradient_variance, allowed_variance)
    eta = positive_number("learning_rate", learning_rate)
    beta = positive_number("smoothness", smoothness)
    l0 = non_negative_number("lipschitz", lipschitz)
    sigma_squared = non_negative_number("heterogeneity", heterogeneity)
    initial_gap = non_negative_number("gap", gap)
    first_limit = 1 / (6 * beta * float(e.max()))
    second_limit = 1 / (12 * beta * float(np.sqrt((1 + e.sum()) * np.sum(e**4))))
    drift = 2 * np.sum(e**4) * sigma_squared + np.sum(e**3 * variance) / 3
    noise = np.sum(w**2 * e * variance) if weighted_noise else np.sum(e**2 * variance)
    psi_sigma = 6 * beta**2 * eta**2 * (1 + e.sum()) * drift + beta * eta * noise
    imbalance = n * np.sum(e**2 * (w - lam) ** 2)
    imbalance += np.sum(lam**2) * np.sum((e - np.sum(w * e)) ** 2)
    psi_p = 8 / 3 * l0**2 * imbalance
    optimisation = initial_gap / (positive_int("rounds", rounds) * eta)
    value = 12 / (11 * float(e.min()) - 7) * (optimisation + psi_sigma + psi_p)
    return ConvergenceBound(
        float(value),
        float(optimisation),
        float(psi_sigma),
        float(beta * eta * noise),
        float(psi_p),
        (eta <= first_limit, eta <= second_limit),
        min(first_limit, second_limit),
    )


def _numbers(field: str, value: ArrayLike, allowed: str) -> NDArray[np.float64]:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValueError(field, value, allowed) from None


def _shares(field: str, value: ArrayLike) -> NDArray[np.float64]:
    allowed = "must be n numbers >= 0 with sum 1, one for each client"
    shares = _numbers(field, value, allowed)
    if shares.ndim != 1 or not np.all(shares >= 0) or abs(float(shares.sum()) - 1) > 1e-6:
        raise InvalidValueError(field, value, allowed)
    return shares
