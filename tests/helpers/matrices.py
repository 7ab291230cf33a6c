"""Update matrices for tests: low-rank signal plus Gaussian noise of known energy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Planted:
    """M = signal + noise with E||noise_i||^2 = variance[i]."""

    updates: NDArray[np.float32]
    variance: NDArray[np.float64]


def planted(p: int, n: int, rank: int = 2, signal: float = 0.5, seed: int = 0) -> Planted:
    """Make a matrix [p, n] whose noise variances range over a factor of 100.

    The loadings of the signal are about ``signal`` times the median noise level.
    """
    rng = np.random.default_rng(seed)
    variance = np.geomspace(0.1, 10.0, n)[rng.permutation(n)]
    noise = rng.normal(size=(p, n)) * np.sqrt(variance / p)
    if rank == 0:
        return Planted(noise.astype(np.float32), variance)
    directions, _ = np.linalg.qr(rng.normal(size=(p, rank)))
    loadings = np.abs(rng.normal(size=(rank, n))) * signal
    return Planted((directions @ loadings + noise).astype(np.float32), variance)
