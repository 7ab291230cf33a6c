"""Principal component pursuit: an update matrix as low rank (signal) plus sparse (noise)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import positive_int, positive_number
from noisewise.noise.estimate import Matrix, NoiseEstimate
from noisewise.noise.matrix import as_array, check_finite, column_energy

__all__ = ["PCP", "PCPResult", "principal_component_pursuit"]

Array = NDArray[np.floating[Any]]
Vector = NDArray[np.float64]

_RELAXATION = 1.75  # of the alternating directions; the theory allows (0, 2)
_STEP = 0.12  # times the paper's mu: the optimum does not depend on mu, the speed does
_LOOK_EVERY = 10  # iterations between two looks at the duality gap
_BLOCK = 1 << 15  # numbers of one row block, so that its working set stays in the cache
_SMALL = 1 << 17  # matrices up to this size are solved in float64 whatever their type


@dataclass(frozen=True)
class PCPResult:
    """The two parts of an update matrix M ([p, n]), and how far they can be trusted.

    Attributes:
        energy: [n] float64, ||S_i||^2 of each column; 0 where it is below the solver's tolerance.
        singular_values: [min(p, n)] of L, descending; zeros are exact.
        rank: number of singular values of L above 0.
        objective: ||L||_* + lambda ||M - L||_1, of the feasible pair (L, M - L).
        gap: (objective - dual objective) / objective. A certificate: no decomposition has an
            objective that is lower by more than this share.
        residual: ||M - L - S||_F / ||M||_F.
        iterations: passes over the matrix.
        converged: residual, last change and gap are all within their tolerances.
        low_rank: L, [p, n], if it was asked for.
        sparse: S, [p, n], if it was asked for.
    """

    energy: Vector
    singular_values: Vector
    rank: int
    objective: float
    gap: float
    residual: float
    iterations: int
    converged: bool
    low_rank: Array | None = None
    sparse: Array | None = None


def principal_component_pursuit(
    M: Matrix,
    *,
    tolerance: float = 1e-6,
    gap_tolerance: float = 1e-5,
    max_iterations: int = 3000,
    keep_parts: bool = False,
) -> PCPResult:
    """Solve min ||L||_* + lambda ||S||_1 subject to L + S = M, lambda = 1 / sqrt(max(p, n)).

    The paper's algorithm RPCA (Candes et al. 2011, alternating directions), with the L-step as
    Candes et al. have it, D_{1/mu}(M - S + Y/mu): the paper's print has the sign of Y wrong. With
    U = Y/mu, A = M - S + U and the n x n matrix T = V diag(max(1 - 1/(mu s), 0)) V^T of the
    eigenvectors V and singular values s of A (from A^T A, never an SVD of p x n):

        L = A T,  X = M - L + U,  U' = clip(X, +-lambda/mu),  S' = X - U',  A' = L - U + 2 U'

    so an iteration is one pass over row blocks, in which the next A^T A is summed as well.
    Over-relaxation (L replaced by alpha L + (1 - alpha)(M - S), Eckstein and Bertsekas 1992) and a
    step mu below the paper's p n / (4 sum |M|) save iterations and leave the optimum where it is.

    Args:
        M: [p, n], numpy or torch; not modified. p < n is fine.
        tolerance: of ||M - L - S|| / ||M|| and of the last change of S, relative to ||M||.
        gap_tolerance: of the relative duality gap.
        max_iterations: stop there, with ``converged`` False.
        keep_parts: return L and S too.

    Raises:
        UpdateError: M is not a matrix of finite numbers; names the column.
    """
    positive_number("tolerance", tolerance)
    positive_number("gap_tolerance", gap_tolerance)
    positive_int("max_iterations", max_iterations)
    array = as_array(M)
    check_finite(column_energy(array))
    scale = float(np.mean(np.abs(array), dtype=np.float64))
    if scale == 0:
        return _zero_result(array, keep_parts)
    scaled = np.empty(array.shape, np.float64 if array.size <= _SMALL else array.dtype)
    np.divide(array, scale, out=scaled, casting="same_kind")
    state = _start(scaled)
    residual = change = gap = math.inf
    while state.iterations < max_iterations:
        look = state.iterations % _LOOK_EVERY == _LOOK_EVERY - 1
        residual, change, fresh_gap = _iterate(state, look)
        gap = fresh_gap if look else gap
        if look and max(residual, change) <= tolerance and gap <= gap_tolerance:
            break
    converged = max(residual, change) <= tolerance and gap <= gap_tolerance
    return _finish(state, scale, tolerance, converged, keep_parts)


@dataclass
class _State:
    """Working arrays of the solver, on a matrix scaled to a mean |M| of 1. All [p, n] or [n, n]."""

    M: Array
    A: Array  # M - S + U
    U: Array  # Y / mu
    gram: Vector  # A^T A
    mu: float
    lam: float
    norm: float  # ||M||_F
    iterations: int = 0

    @property
    def blocks(self) -> Iterator[slice]:
        p, n = self.M.shape
        rows = max(1, _BLOCK // n)
        return (slice(start, start + rows) for start in range(0, p, rows))


def _start(M: Array) -> _State:
    p, n = M.shape
    gram = np.zeros((n, n))
    state = _State(
        M=M,
        A=M.copy(),
        U=np.zeros_like(M),
        gram=gram,
        mu=_STEP / 4,  # p n / (4 sum |M|) is 1/4 on the scaled matrix
        lam=1 / math.sqrt(max(p, n)),
        norm=0.0,
    )
    for rows in state.blocks:
        gram += M[rows].T @ M[rows]
    state.norm = math.sqrt(np.trace(gram))
    return state


def _threshold(gram: Vector, mu: float) -> tuple[Vector, Vector]:
    """Shrunk singular values ([n], ascending) and T ([n, n]) with D_{1/mu}(A) = A T."""
    eigenvalues, V = np.linalg.eigh(gram)
    s = np.sqrt(np.maximum(eigenvalues, np.finfo(np.float64).tiny))
    shrunk = np.maximum(s - 1 / mu, 0.0)
    return shrunk, (V * (shrunk / s)) @ V.T


def _iterate(state: _State, look: bool) -> tuple[float, float, float]:
    """One pass: L, S, Y and the next Gram matrix.

    Returns:
        ||M - L - S|| / ||M||, ||S' - S|| / ||M||, and with ``look`` the relative duality gap.
    """
    shrunk, T = _threshold(state.gram, state.mu)
    n, dtype = state.M.shape[1], state.M.dtype
    T = T.astype(dtype)
    bound = dtype.type(state.lam / state.mu)
    alpha = dtype.type(_RELAXATION)
    gram, dual_gram = np.zeros((n, n)), np.zeros((n, n))
    residual = change = l1 = inner = 0.0
    for rows in state.blocks:
        M, A, U = state.M[rows], state.A[rows], state.U[rows]
        L = A @ T
        A -= U  # M - S, of the last iteration
        if look:
            l1 += float(np.abs(M - L).sum(dtype=np.float64))
        H = alpha * (L - A)
        H += A  # relaxed L
        H -= U
        new_U = np.clip(M - H, -bound, bound)
        H += new_U  # M - S, of this iteration
        A -= H
        L -= H
        change += float(np.vdot(A, A))
        residual += float(np.vdot(L, L))
        np.add(H, new_U, out=A)
        U[...] = new_U
        gram += A.T @ A
        if look:
            dual_gram += U.T @ U
            inner += float(np.vdot(M, U))
    state.gram = gram
    state.iterations += 1
    gap = math.inf
    if look:
        objective = float(shrunk.sum()) + state.lam * l1
        spectral = state.mu * math.sqrt(max(float(np.linalg.eigvalsh(dual_gram)[-1]), 0.0))
        gap = max(0.0, 1 - state.mu * inner / max(1.0, spectral) / objective)
    return math.sqrt(residual) / state.norm, math.sqrt(change) / state.norm, gap


def _finish(
    state: _State, scale: float, tolerance: float, converged: bool, keep_parts: bool
) -> PCPResult:
    """Energies, objective and certificate of the last iterate, in the units of the input."""
    p, n = state.M.shape
    shrunk, T = _threshold(state.gram, state.mu)
    T = T.astype(state.M.dtype)
    energy = np.zeros(n)
    dual_gram = np.zeros((n, n))
    l1 = residual = inner = 0.0
    low_rank = np.empty_like(state.M) if keep_parts else None
    sparse = np.empty_like(state.M) if keep_parts else None
    for rows in state.blocks:
        M, A, U = state.M[rows], state.A[rows], state.U[rows]
        L = A @ T
        S = M - (A - U)
        energy += np.einsum("ij,ij->j", S, S, dtype=np.float64)
        l1 += float(np.abs(M - L).sum(dtype=np.float64))
        residual += float(np.sum((M - L - S) ** 2, dtype=np.float64))
        dual_gram += U.T @ U
        inner += float(np.vdot(M, U))
        if low_rank is not None and sparse is not None:
            low_rank[rows], sparse[rows] = L * scale, S * scale
    objective = float(shrunk.sum()) + state.lam * l1
    spectral = state.mu * math.sqrt(max(float(np.linalg.eigvalsh(dual_gram)[-1]), 0.0))
    # Below the solver's tolerance an energy is rounding; 1 / it would be a weight out of nothing.
    energy[energy <= (tolerance * state.norm) ** 2 / n] = 0.0
    return PCPResult(
        energy=energy * scale**2,
        singular_values=shrunk[::-1][: min(p, n)] * scale,
        rank=int(np.count_nonzero(shrunk)),
        objective=objective * scale,
        gap=max(0.0, 1 - state.mu * inner / max(1.0, spectral) / objective),
        residual=math.sqrt(residual) / state.norm,
        iterations=state.iterations,
        converged=converged,
        low_rank=low_rank,
        sparse=sparse,
    )


def _zero_result(M: Array, keep_parts: bool) -> PCPResult:
    """The decomposition of an all-zero matrix: both parts are zero."""
    p, n = M.shape
    return PCPResult(
        energy=np.zeros(n),
        singular_values=np.zeros(min(p, n)),
        rank=0,
        objective=0.0,
        gap=0.0,
        residual=0.0,
        iterations=0,
        converged=True,
        low_rank=np.zeros_like(M) if keep_parts else None,
        sparse=np.zeros_like(M) if keep_parts else None,
    )


@dataclass(frozen=True)
class PCP:
    """The paper's estimator (Algorithm 1): sigma_i^2 = ||S_i||^2 of principal component pursuit.

    Attributes:
        tolerance: see `principal_component_pursuit`.
        max_iterations: see `principal_component_pursuit`.
    """

    tolerance: float = 1e-6
    max_iterations: int = 3000

    @property
    def name(self) -> str:
        """``pcp``."""
        return "pcp"

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        """Energy of each column of the sparse part of ``updates`` ([p, n])."""
        result = principal_component_pursuit(
            updates, tolerance=self.tolerance, max_iterations=self.max_iterations
        )
        details: dict[str, Any] = {
            "iterations": result.iterations,
            "residual": result.residual,
            "gap": result.gap,
            "objective": result.objective,
            "rank": result.rank,
            "singular_values": result.singular_values,
        }
        if not result.converged:
            details["reason"] = (
                f"stopped at max_iterations = {self.max_iterations} with residual "
                f"{result.residual:.1e} and gap {result.gap:.1e}: raise max_iterations"
            )
        return NoiseEstimate(
            variance=result.energy, method=self.name, converged=result.converged, details=details
        )
