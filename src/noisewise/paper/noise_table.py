"""The paper's table of aggregated noise (table:fmnist_noise), from closed forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from noisewise.aggregation.weights import proportional_weights
from noisewise.checks import positive_int, positive_number
from noisewise.data.populations import DISTRIBUTIONS, AuthorsDraw, authors_population
from noisewise.errors import AccountingError
from noisewise.noise.variance import aggregate_noise, oracle_noise, update_noise_variance
from noisewise.privacy.accounting import epsilon_of
from noisewise.privacy.renyi_accountant import moments_floor

__all__ = ["client_variance", "noise_multiplier", "noise_table"]


def noise_table(
    distributions: Sequence[str] = tuple(DISTRIBUTIONS),
    *,
    n_clients: int = 20,
    n_examples: int = 2400,
    rounds: int = 200,
    clip_norm: float = 3.0,
    accountant: str = "moments",
    decimals: int | None = 2,
) -> dict[str, dict[str, float]]:
    """Compute the noise of the aggregate in one round, sum_i w_i^2 sigma_i^2 / (p eta^2).

    The defaults follow the authors' convention and serve only for comparison with their table:
    accountant ``moments``, z for E N/b steps and rounded to 2 decimals, sigma_i^2 with ceil(N/b)
    steps. Training never uses a rounded z.

    Args:
        distributions: the authors' draws of epsilons, ``"Dist1"`` to ``"Dist9"``.
        n_clients: 20, 40 or 60.
        n_examples: N, the same for every client.
        rounds: E.
        clip_norm: c.
        accountant: ``moments``, ``rdp`` or ``pld``.
        decimals: number of decimals of z; None does not round.

    Returns:
        Values by method (WeiAvg, DPFedAvg, MinEpsilon, Oracle) and distribution.

    Raises:
        AccountingError: if an epsilon is below the floor of ``moments``.

    Example:
        >>> round(noise_table(["Dist9"])["DPFedAvg"]["Dist9"], 1)
        43.2
    """
    positive_int("n_examples", n_examples)
    positive_int("rounds", rounds)
    positive_number("clip_norm", clip_norm)
    table: dict[str, dict[str, float]] = {
        method: {} for method in ("WeiAvg", "DPFedAvg", "MinEpsilon", "Oracle")
    }
    for name in distributions:
        draw = authors_population(name, n_clients)
        smallest = AuthorsDraw((min(draw.epsilons),) * n_clients, draw.batch_sizes, draw.delta)
        equal = np.full(n_clients, 1 / n_clients)  # w ~ N with equal N
        variance, smallest_variance = (
            client_variance(
                population, n_examples, rounds, clip_norm, accountant=accountant, decimals=decimals
            )
            for population in (draw, smallest)
        )
        table["WeiAvg"][name] = aggregate_noise(proportional_weights(draw.epsilons), variance)
        table["DPFedAvg"][name] = aggregate_noise(equal, variance)
        table["MinEpsilon"][name] = aggregate_noise(equal, smallest_variance)
        table["Oracle"][name] = oracle_noise(variance)
    return table


def client_variance(
    draw: AuthorsDraw,
    n_examples: int = 2400,
    rounds: int = 200,
    clip_norm: float = 3.0,
    *,
    accountant: str = "moments",
    decimals: int | None = 2,
) -> NDArray[np.float64]:
    """Return sigma_i^2 / (p eta^2) of every client of a draw, [n]; see `noise_table`."""
    z = [
        noise_multiplier(epsilon, n_examples, batch, rounds, draw.delta, accountant, decimals)
        for epsilon, batch in zip(draw.epsilons, draw.batch_sizes, strict=True)
    ]
    steps = [-(-n_examples // batch) for batch in draw.batch_sizes]
    return update_noise_variance(1, steps, 1.0, clip_norm, z, draw.batch_sizes)


def noise_multiplier(
    epsilon: float,
    n_examples: int,
    batch_size: int,
    rounds: int,
    delta: float,
    accountant: str = "moments",
    decimals: int | None = 2,
) -> float:
    """Return z of an epsilon by interpolation, for tables and figures; plans use `calibrate`.

    Raises:
        AccountingError: if the accountant cannot reach the epsilon.
    """
    steps = round(rounds * n_examples / batch_size)
    z = _noise_multiplier_curve(batch_size / n_examples, steps, delta, accountant)(epsilon)
    if not np.isfinite(z):
        floor = moments_floor(delta) if accountant == "moments" else 0.0
        raise AccountingError(
            f"epsilon = {epsilon:g}: accountant '{accountant}' reaches no epsilon below its floor "
            f"{floor:.4g} at delta = {delta:g}"
        )
    return z if decimals is None else round(z, decimals)


@functools.cache
def _noise_multiplier_curve(
    sample_rate: float, steps: int, delta: float, accountant: str = "moments"
) -> Callable[[float], float]:
    """Return a function from epsilon to z, NaN if the accountant cannot reach the epsilon.

    One curve serves all clients with the same batch size. log z against log(epsilon - floor) is
    almost a straight line, so 48 points determine epsilon(z) to 1e-3; 24 for ``pld``, which is
    slower and smoother.
    """
    floor = moments_floor(delta) if accountant == "moments" else 0.0
    grid = np.geomspace(400.0, 0.4, 24 if accountant == "pld" else 48)
    points: list[tuple[float, float]] = []
    for z in grid:
        epsilon = epsilon_of(sample_rate, float(z), steps, delta, accountant)
        if not points or np.log(epsilon - floor) > points[-1][0]:
            points.append((np.log(epsilon - floor), np.log(z)))
    excess, logs = np.transpose(points)
    curve = PchipInterpolator(excess, logs, extrapolate=False)

    def interpolated(epsilon: float) -> float:
        return float(np.exp(curve(np.log(epsilon - floor)))) if epsilon > floor else math.nan

    return interpolated
