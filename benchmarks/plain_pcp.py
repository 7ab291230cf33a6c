"""Principal component pursuit as it is usually written: a full SVD in every iteration."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlainRun:
    """What a plain run reached, and what it cost."""

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
    """Alternating directions with mu = p n / (4 sum |M|) (Candes et al. 2011), nothing else.

    Args:
        M: [p, n].
        tolerance: stop when ||M - L - S|| / ||M|| is below ...
        objective: ... and the objective within 1e-4 of this one (looked at every 50 iterations).
        iterations: stop there.
        svd: False takes the singular vectors from the n x n Gram matrix. The iterates are the same;
            it is how the number of iterations is counted without waiting for the SVDs.
        step: multiplies mu. Ours is 11 to 20 lambda, which a plain solver could use as well.
    """
    p, n = M.shape
    lam = 1 / math.sqrt(max(p, n))
    mu = step * p * n / (4 * float(np.abs(M).sum(dtype=np.float64)))
    norm = float(np.linalg.norm(M))
    S, Y = np.zeros_like(M), np.zeros_like(M)
    spent, done, residual, reached = 0.0, 0, math.inf, math.inf
    while done < iterations:
        start = time.process_time()
        L, nuclear = _threshold(M - S + Y / mu, 1 / mu, svd)
        X = M - L + Y / mu
        S = np.sign(X) * np.maximum(np.abs(X) - lam / mu, 0)
        rest = M - L - S
        Y = Y + mu * rest
        residual = float(np.linalg.norm(rest)) / norm
        spent += time.process_time() - start
        done += 1
        if residual <= tolerance or done % 50 == 0:
            reached = nuclear + lam * float(np.abs(M - L).sum(dtype=np.float64))
            close = objective is None or abs(reached / objective - 1) <= 1e-4
            if residual <= tolerance and close:
                break
    energy = np.sum(S.astype(np.float64) ** 2, axis=0)
    return PlainRun(done, residual, reached, energy, spent / done)


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
