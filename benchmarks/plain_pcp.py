"""Principal component pursuit in its usual form, with a full SVD in every iteration."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlainRun:
    """Result and time of a plain run."""

    iterations: int
    residual: float
    objective: float
    energy: NDArray[np.float64]
    seconds_per_iteration: float


def plain_pcp(
    M: NDArray[np.floating],
    *,
    tolerance: float = 1e-6,
    objective: float | None = None,
    iterations: int = 5000,
    svd: bool = True,
    step: float = 1.0,
) -> PlainRun:
    """Run alternating directions with mu = p n / (4 sum |M|) (Candes et al. 2011).

    The run stops when the residual ||M - L - S|| / ||M|| is at most ``tolerance`` and the objective
    is within 1e-4 of ``objective``.

    Args:
        M: [p, n].
        tolerance: largest residual.
        objective: optimal objective; None to check the residual only.
        iterations: largest number of iterations.
        svd: False computes the singular vectors from the n x n Gram matrix. The iterates are the
            same, so the iterations can be counted without waiting for the SVDs.
        step: factor of mu. Our solver uses 11 to 20 lambda; a plain solver could do so as well.

    Returns:
        The last iterate's measures, and the processor time of an iteration.
    """
    p, n = M.shape
    lam = 1 / math.sqrt(max(p, n))
    mu = step * p * n / (4 * float(np.abs(M).sum(dtype=np.float64)))
    norm = float(np.linalg.norm(M))
    S, Y = np.zeros_like(M), np.zeros_like(M)
    seconds, done, residual, value = 0.0, 0, math.inf, math.inf
    while done < iterations:
        start = time.process_time()
        L, nuclear = _threshold(M - S + Y / mu, 1 / mu, svd)
        X = M - L + Y / mu
        S = np.sign(X) * np.maximum(np.abs(X) - lam / mu, 0)
        rest = M - L - S
        Y = Y + mu * rest
        residual = float(np.linalg.norm(rest)) / norm
        seconds += time.process_time() - start
        done += 1
        if residual <= tolerance or done % 50 == 0:
            value = nuclear + lam * float(np.abs(M - L).sum(dtype=np.float64))
            close = objective is None or abs(value / objective - 1) <= 1e-4
            if residual <= tolerance and close:
                break
    energy = np.sum(S.astype(np.float64) ** 2, axis=0)
    return PlainRun(done, residual, value, energy, seconds / done)


def _threshold(
    A: NDArray[np.floating], level: float, svd: bool
) -> tuple[NDArray[np.floating], float]:
    if svd:
        u, s, vt = np.linalg.svd(A, full_matrices=False)
        shrunk = np.maximum(s - level, 0)
        return (u * shrunk) @ vt, float(shrunk.sum())
    eigenvalues, V = np.linalg.eigh((A.T @ A).astype(np.float64))
    s = np.sqrt(np.maximum(eigenvalues, 1e-300))
    shrunk = np.maximum(s - level, 0)
    return A @ ((V * (shrunk / s)) @ V.T).astype(A.dtype), float(shrunk.sum())
