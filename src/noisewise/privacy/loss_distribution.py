"""dp-accounting's privacy loss distributions, built and composed faster.

dp-accounting inverts the privacy loss point by point in Python, and before it composes a small
distribution with itself it computes (number of points) ** steps as an exact integer. Here the
same operations run on whole arrays, and the power is not computed. The distributions are the same,
bit for bit (tests/privacy/test_loss_distribution.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.fft
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from noisewise.privacy.renyi_estimates import Array

__all__ = ["PrivacyLossDistribution", "compose_steps", "one_step_distribution"]

_TAIL = 1e-15
"""Probability that a composition may cut off and count as infinite loss; as in dp-accounting."""

_MOST_POINTS = 1 << 24
"""A composed distribution with more points than this would need gigabytes and is rejected."""

_FEW_STEPS = 64
"""Above this number of steps dp-accounting composes arrays, whatever the number of points."""


class _GaussianLoss(GaussianPrivacyLoss):  # type: ignore[misc]
    """Privacy loss of the Poisson-subsampled Gaussian, evaluated for whole arrays."""

    def get_delta_for_epsilon(self, epsilon: float | Sequence[float] | Array) -> Any:
        """The hockey-stick divergence at each epsilon, as in `GaussianPrivacyLoss`.

        Raises:
            ValueError: float64 cannot resolve the loss at this sampling rate.
        """
        q = self.sampling_prob
        if not isinstance(epsilon, np.ndarray) or q == 1.0:
            return super().get_delta_for_epsilon(epsilon)
        adds = self.adjacency_type == AdjacencyType.ADD
        deltas: Array = np.zeros_like(epsilon, dtype=float)
        if adds:
            inverted = epsilon < -math.log1p(-q)
        else:
            inverted = epsilon > math.log1p(-q)
            deltas[~inverted] = -np.expm1(epsilon[~inverted])
        x = self._inverses(epsilon[inverted], adds)
        exponents = epsilon[inverted] + self.mu_lower_log_cdf(x)
        deltas[inverted] = self.mu_upper_cdf(x) - np.exp(exponents)
        return np.clip(deltas, 0, 1)

    def _inverses(self, losses: Array, adds: bool) -> Array:
        """`inverse_privacy_loss` of each loss."""
        q = self.sampling_prob
        signed = -losses if adds else losses
        end = math.log(1 - q)
        at_end = np.abs(signed - end) <= 1e-9 * np.maximum(np.abs(signed), abs(end))
        if np.any(signed[~at_end] <= end):
            raise ValueError("a privacy loss is out of range for the sampling rate")
        # log(1 + (exp(loss) - 1) / q), as `common.log_a_times_exp_b_plus_c` computes it
        scaled, rest = signed + np.log(1 / q), np.log(1 / q - 1)
        plain: Array = np.full_like(signed, -math.inf)
        if np.any(rest >= scaled[~at_end]):
            raise ValueError("float64 cannot resolve the privacy loss at this sampling rate")
        plain[~at_end] = scaled[~at_end] + np.log1p(-np.exp(rest - scaled[~at_end]))
        plain[(signed == 0) & ~at_end] = np.log(1 / q + (1 - 1 / q))
        invert = (
            self._inverse_privacy_loss_without_subsampling_add
            if adds
            else self._inverse_privacy_loss_without_subsampling_remove
        )
        inverses: Array = invert(-plain if adds else plain)
        return inverses


@functools.lru_cache(maxsize=32)  # the client's next round needs the same distribution
def one_step_distribution(
    sample_rate: float, noise_multiplier: float, interval: float
) -> PrivacyLossDistribution:
    """Pessimistic loss distribution of one step of the Poisson-subsampled Gaussian mechanism.

    The same as dp-accounting's `from_gaussian_mechanism`: connect-the-dots (Doroshenko et al.,
    2022), for adding and for removing one record. The latest results are cached.

    Args:
        sample_rate: q.
        noise_multiplier: z.
        interval: width of the grid of losses.

    Raises:
        ValueError: float64 cannot resolve the loss at this sampling rate.
    """
    kinds = [AdjacencyType.REMOVE] + ([AdjacencyType.ADD] if sample_rate < 1 else [])
    return PrivacyLossDistribution(
        *(_one_sided(sample_rate, noise_multiplier, interval, kind) for kind in kinds)
    )


def _one_sided(
    sample_rate: float, noise_multiplier: float, interval: float, kind: AdjacencyType
) -> pld_pmf.PLDPmf:
    loss = _GaussianLoss(noise_multiplier, sampling_prob=sample_rate, adjacency_type=kind)
    bounds = loss.connect_dots_bounds()
    upper = math.ceil(bounds.epsilon_upper / interval)
    lower = math.floor(bounds.epsilon_lower / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, deltas)


def compose_steps(
    one: PrivacyLossDistribution, steps: int, *, large: bool = False
) -> PrivacyLossDistribution:
    """Compose the loss distribution of one step with itself.

    Args:
        one: loss distribution of one step.
        steps: number of steps.
        large: whether to compose with a shorter Fourier transform, see `_self_convolve`.
    """
    parts = [one._pmf_remove] if one._symmetric else [one._pmf_remove, one._pmf_add]
    if large and steps > 1:
        return PrivacyLossDistribution(*(_self_convolve(part, steps) for part in parts))
    if steps > _FEW_STEPS:
        one = PrivacyLossDistribution(*(part.to_dense_pmf() for part in parts))
    return one.self_compose(steps)


def _self_convolve(part: pld_pmf.PLDPmf, steps: int) -> pld_pmf.PLDPmf:
    """`DensePLDPmf.self_compose` with a smaller support.

    dp-accounting bounds the support by Chernoff's bound at 40 orders of the scale 1 / size, which
    is far from the best order if there are many steps or if rare losses are much larger than usual
    ones. Orders around the best one of a Gaussian sum keep a tenth of that support. Every order
    gives a valid bound. As in dp-accounting, the mass outside of the support, at most `_TAIL`,
    counts as infinite loss.
    """
    dense = part.to_dense_pmf()
    probabilities: Array = dense._probs
    low, high = _support(probabilities, steps)
    length = high - low + 1
    if length > _MOST_POINTS:
        raise ValueError(f"{length} points after {steps} steps: must be at most {_MOST_POINTS}")
    fast = scipy.fft.next_fast_len(max(length, len(probabilities)), real=True)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        transformed = np.exp(steps * np.log(scipy.fft.rfft(probabilities, fast)))
    composed = np.roll(scipy.fft.irfft(transformed, fast), -low)[:length]
    infinite = _TAIL - math.expm1(steps * math.log1p(-dense._infinity_mass))
    lower = dense._lower_loss * steps + low
    return pld_pmf.DensePLDPmf(dense._discretization, lower, composed, infinite, True)


def _support(probabilities: Array, steps: int) -> tuple[int, int]:
    """First and last index of the composed support; the mass outside of it is at most `_TAIL`.

    Chernoff's bound at orders around the best ones of a Gaussian sum and of a sum with rare jumps.
    """
    indices = np.arange(len(probabilities), dtype=np.float64)
    mean = float(np.dot(indices, probabilities))
    variance = max(float(np.dot((indices - mean) ** 2, probabilities)), 1e-9)
    gaussian = math.sqrt(2 * math.log(2 / _TAIL) / (steps * variance))
    orders = {gaussian * 2.0**k for k in range(-3, 3)}
    orders |= {2.5 * 2.0**k / len(probabilities) for k in range(10)}
    low, high = 0, (len(probabilities) - 1) * steps
    with np.errstate(divide="ignore", under="ignore"):
        logs = np.log(probabilities)
        for order in [sign * order for order in sorted(orders) for sign in (-1, 1)]:
            exponents = logs + order * indices
            largest = float(exponents.max())
            moment = largest + math.log(float(np.exp(exponents - largest).sum()))
            bound = (steps * moment + math.log(2 / _TAIL)) / order
            if order > 0 and bound < high:
                high = math.ceil(bound)
            if order < 0 and bound > low:
                low = math.floor(bound)
    return low, max(low, high)
