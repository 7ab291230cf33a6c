"""Principal component pursuit: split a matrix into low rank (signal) plus sparse (noise)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.checks import positive_int, positive_number
from noisewise.noise.blas import one_blas_thread
from noisewise.noise.blocks import as_tensor, slices
from noisewise.noise.estimate import Matrix
from noisewise.noise.gram import column_energy

__all__ = ["PCPResult", "principal_component_pursuit"]

Vector = NDArray[np.float64]
Square = NDArray[np.float64]

_RELAXATION = 1.75  # alpha of the alternating directions; the theory allows (0, 2)
_STEP = 11.0  # mu in units of lambda times the paper's mu (measured: 8 to 16 are as good) ...
_STEP_COARSE = 20.0  # ... and after a coarse solution (15 to 30)
_MEASURE_EVERY = 10  # iterations between two computations of residual and duality gap
_COARSE = 16  # the problem is solved on every 16th row first ...
_COARSE_ROWS = 1000  # ... if there are at least this many of them
_COARSE_TOLERANCE = 1e-4
_ADAPT_EVERY = 250  # iterations after which the step mu may be changed ...
_ADAPT = 3.0  # ... by this factor ...
_BALANCE = 5.0  # ... if residual and gap differ by more than this factor in units of tolerances
_HELD = 10  # iterations that use the T of the coarse solution
_BLOCK = 1 << 16  # numbers in a row block: its working arrays fit into the cache of a CPU
_BLOCK_ELSEWHERE = 1 << 24
_SMALL = 1 << 17  # matrices up to this size are solved in float64, whatever their type


@dataclass(frozen=True)
class PCPResult:
    """The low-rank part L and the sparse part S of an update matrix M ([p, n]).

    Attributes:
        energy: [n] float64, ||S_i||^2 of each column; 0 if it is below the solver's tolerance.
        singular_values: [min(p, n)] of L, descending; zeros are exact.
        rank: number of singular values of L above 0.
        objective: ||L||_* + lambda ||M - L||_1, of the feasible pair (L, M - L).
        gap: (objective - dual objective) / objective. This is a certificate: no decomposition has
            an objective that is lower by more than this share.
        residual: ||M - L - S||_F / ||M||_F; 0 only at a fixed point of the iteration.
        iterations: passes over the matrix.
        converged: whether residual and gap are within their tolerances.
        low_rank: L, [p, n], with ``keep_parts``; numpy or torch, like the input. Otherwise None.
        sparse: S, [p, n], as ``low_rank``.
    """

    energy: Vector
    singular_values: Vector
    rank: int
    objective: float
    gap: float
    residual: float
    iterations: int
    converged: bool
    low_rank: Matrix | None = None
    sparse: Matrix | None = None


def principal_component_pursuit(
    M: Matrix,
    *,
    tolerance: float = 1e-6,
    gap_tolerance: float = 1e-5,
    max_iterations: int = 3000,
    keep_parts: bool = False,
) -> PCPResult:
    """Solve min ||L||_* + lambda ||S||_1 subject to L + S = M, lambda = 1 / sqrt(max(p, n)).

    This is the paper's algorithm RPCA (Candes et al. 2011, alternating directions). The L-step is
    D_{1/mu}(M - S + Y/mu), as in Candes et al.; the sign of Y is wrong in the paper's listing. Let
    U = Y/mu and A = M - S + U. Let T = V diag(max(1 - 1/(mu s), 0)) V^T, an n x n matrix, with the
    right singular vectors V and singular values s of A; both come from A^T A, without an SVD of a
    p x n matrix. One iteration computes

        L = A T,  X = M - L + U,  U' = clip(X, +-lambda/mu),  S' = X - U',  A' = M - X + 2 U'

    in one pass over row blocks, which also sums the next A^T A. Three changes save iterations. They
    do not change the optimum, and the duality gap certifies the result:

    - Over-relaxation: L is replaced by alpha L + (1 - alpha)(M - S) (Eckstein and Bertsekas 1992).
    - A smaller step: mu = 11 lambda (20 after a coarse solution) times the paper's
      p n / (4 sum |M|). Singular values of noise grow with sqrt(p), so the threshold 1/mu has to
      grow with them. mu is adapted if residual and gap do not decrease together.
    - A coarse solution on every 16th row. What converges slowly is the spectrum of A, which is
      n x n and nearly the same for a part of the rows. T is computed from these rows and kept for
      the first iterations while S and Y of all rows adapt to it.

    Args:
        M: [p, n], numpy or torch on any device; not modified. p < n is allowed.
        tolerance: of ||M - L - S|| / ||M||, where L is the next iterate.
        gap_tolerance: of the relative duality gap.
        max_iterations: the solver stops after this many, with ``converged`` False.
        keep_parts: whether to return L and S.

    Returns:
        The energies of the sparse part, and measures of convergence.

    Raises:
        UpdateError: M is not a matrix of finite numbers; the message names the columns.

    Example:
        >>> M = np.ones((200, 4))
        >>> M[7, 2] += 5.0
        >>> principal_component_pursuit(M).energy.round(3).tolist()
        [0.0, 0.0, 25.0, 0.0]
    """
    positive_number("tolerance", tolerance)
    positive_number("gap_tolerance", gap_tolerance)
    positive_int("max_iterations", max_iterations)
    tensor = as_tensor(M)
    column_energy(tensor)  # raises an error for NaN and infinite values
    p, n = tensor.shape
    if tensor.numel() <= _SMALL and tensor.device.type != "mps":
        tensor = tensor.double()
    scale = float(tensor.abs().mean())
    if scale == 0:
        scale = 1.0  # all zero: both parts are zero
    goal = _Goal(tolerance, gap_tolerance, max_iterations)
    scaled = torch.div(tensor.contiguous(), scale)
    with one_blas_thread():
        work = _start(
            scaled, lam=1 / math.sqrt(max(p, n)), share=1.0, max_iterations=max_iterations
        )
        measures = _solve(work, goal)
    result = _result(work, measures, goal, scale, keep_parts)
    if result.low_rank is None or result.sparse is None or isinstance(M, torch.Tensor):
        return result
    L, S = (np.asarray(part) for part in (result.low_rank, result.sparse))
    return replace(result, low_rank=L, sparse=S)


@dataclass(frozen=True)
class _Goal:
    """When to stop: residual and gap are within tolerance, or the iterations are used up."""

    tolerance: float
    gap: float
    iterations: int

    def reached(self, measures: _Measures) -> bool:
        return measures.residual <= self.tolerance and measures.gap <= self.gap


@dataclass
class _Work:
    """Working arrays for a matrix scaled to mean |M| = 1: [p, n] each, and A^T A [n, n].

    ``share`` is p divided by the number of rows in these arrays. It is above 1 for the coarse
    solution, where sums over rows are multiplied by it.
    """

    M: torch.Tensor
    A: torch.Tensor  # M - S + U
    U: torch.Tensor  # Y / mu
    gram: Square
    lam: float
    share: float
    mu: float
    held: Square | None = None  # T for the first iterations
    iterations: int = 0

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        rows = _rows(self.M)
        return zip(*(slices(part, rows) for part in (self.M, self.A, self.U)), strict=True)


@dataclass(frozen=True)
class _Measures:
    """Residual, gap and objective of an iterate, in the units of the scaled matrix."""

    residual: float
    gap: float
    objective: float
    shrunk: Vector
    threshold: Square
    norm: float


def _start(M: torch.Tensor, lam: float, share: float, max_iterations: int) -> _Work:
    """Return the initial arrays: S = Y = 0, and for many rows the T of a coarse solution."""
    unit = lam / 4  # lambda times the paper's mu: p n / (4 sum |M|) is 1/4 on the scaled matrix
    held, mu = None, _STEP * unit
    if M.shape[0] // _COARSE >= max(_COARSE_ROWS, M.shape[1]):
        coarse = _start(M[::_COARSE].contiguous(), lam, share * _COARSE, max_iterations)
        _solve(coarse, _Goal(_COARSE_TOLERANCE, math.inf, max_iterations))
        mu = _STEP_COARSE * unit
        held = _threshold_for(coarse.gram, coarse.mu, mu)
    gram = share * np.sum([_gram(part) for part in slices(M, _rows(M))], axis=0)
    return _Work(M, M.clone(), torch.zeros_like(M), gram, lam, share, mu, held)


def _threshold_for(gram: Square, mu: float, new_mu: float) -> Square:
    """Return T of the same solution for another step mu'.

    If A has the singular values s with mu, then L has s - 1/mu, and A has s - 1/mu + 1/mu' with
    mu'.
    """
    eigenvalues, V = np.linalg.eigh(gram)
    values = np.maximum(np.sqrt(np.maximum(eigenvalues, 0.0)) - 1 / mu, 0.0)
    return np.asarray((V * (values / (values + 1 / new_mu))) @ V.T)


def _solve(work: _Work, goal: _Goal) -> _Measures:
    """Iterate until the goal is reached or the iterations are used up."""
    measures = None
    while work.iterations < goal.iterations:
        _iterate(work)
        if work.iterations % _MEASURE_EVERY == 0 and work.iterations > _HELD:
            measures = _measure(work)
            if goal.reached(measures):
                return measures
            if work.iterations % _ADAPT_EVERY == 0:
                _adapt(work, goal, measures)
    return measures if work.iterations % _MEASURE_EVERY == 0 and measures else _measure(work)


def _adapt(work: _Work, goal: _Goal, measures: _Measures) -> None:
    """Change the step mu if residual and gap are out of balance (Boyd et al. 2011, section 3.4.1).

    mu is raised if the gap is closed and the residual is not, and lowered in the opposite case.
    Most matrices converge before the first change; matrices with little noise need it.
    """
    imbalance = (measures.residual / goal.tolerance) / max(measures.gap / goal.gap, 1e-12)
    factor = _ADAPT if imbalance > _BALANCE else 1 / _ADAPT if imbalance < 1 / _BALANCE else 1.0
    if factor == 1.0:
        return
    gram = np.zeros_like(work.gram)
    for _, A, U in work.blocks():  # Y and S stay the same, U = Y / mu changes
        A.sub_(U)
        A.add_(U.div_(factor))
        gram += _gram(A)
    work.gram = gram * work.share
    work.mu *= factor


def _rows(M: torch.Tensor) -> int:
    return max(1, (_BLOCK if M.device.type == "cpu" else _BLOCK_ELSEWHERE) // M.shape[1])


def _threshold(gram: Square, mu: float) -> tuple[Vector, Square]:
    """Return the shrunk singular values ([n], ascending) and T ([n, n]) with D_{1/mu}(A) = A T."""
    eigenvalues, V = np.linalg.eigh(gram)
    s = np.sqrt(np.maximum(eigenvalues, np.finfo(np.float64).tiny))
    shrunk = np.maximum(s - 1 / mu, 0.0)
    return shrunk, (V * (shrunk / s)) @ V.T


def _gram(block: torch.Tensor, out: torch.Tensor | None = None) -> Square:
    return torch.mm(block.T, block, out=out).cpu().double().numpy().copy()


def _like(M: torch.Tensor, square: Square) -> torch.Tensor:
    """Copy an n x n matrix to the type and device of M (not every device supports float64)."""
    return torch.from_numpy(square).to(M.dtype).to(M.device)


def _iterate(work: _Work) -> None:
    """Make one pass over the row blocks: update A and U, and sum the Gram matrix of the new A."""
    n, alpha = work.M.shape[1], _RELAXATION
    if work.held is not None and work.iterations < _HELD:
        T = work.held
    else:
        _, T = _threshold(work.gram, work.mu)
    # With the relaxed L, M - L + U is M - A (alpha T + (1 - alpha) I) + (2 - alpha) U.
    relaxed = _like(work.M, alpha * T + (1 - alpha) * np.eye(n))
    bound = work.lam / work.mu
    X = torch.empty(0)
    product = torch.empty((n, n), dtype=work.M.dtype, device=work.M.device)
    gram = np.zeros((n, n))
    for M, A, U in work.blocks():
        if X.shape != M.shape:
            X = torch.empty_like(M)
        torch.addmm(M, A, relaxed, alpha=-1, out=X)
        X.add_(U, alpha=2 - alpha)
        torch.clamp(X, -bound, bound, out=U)
        torch.sub(M, X, out=A)
        A.add_(U, alpha=2)
        gram += _gram(A, product)
    work.gram = gram * work.share
    work.iterations += 1


def _measure(work: _Work) -> _Measures:
    """Compute residual, objective and duality gap of the current iterate; ``work`` stays the same.

    The dual problem is max <M, Y> over ||Y||_2 <= 1, |Y| <= lambda. Y = mu U satisfies the second
    bound by construction, and is divided by its spectral norm if that exceeds 1.
    """
    shrunk, T = _threshold(work.gram, work.mu)
    threshold = _like(work.M, T)
    dual_gram = np.zeros_like(T)
    l1 = inner = residual = energy = 0.0
    for M, A, U in work.blocks():
        L = torch.mm(A, threshold)
        l1 += float(torch.sub(M, L).abs_().sum())
        L.sub_(A).add_(U)  # L - (M - S)
        residual += float(L.square_().sum())
        energy += float(torch.mul(M, M, out=L).sum())
        inner += float(torch.mul(M, U, out=L).sum())
        dual_gram += _gram(U)
    objective = float(shrunk.sum()) + work.lam * work.share * l1
    largest = float(np.linalg.eigvalsh(dual_gram)[-1])
    spectral = work.mu * math.sqrt(max(work.share * largest, 0.0))
    dual = work.mu * work.share * inner / max(1.0, spectral)
    return _Measures(
        residual=math.sqrt(residual / energy) if energy else 0.0,
        gap=max(0.0, 1 - dual / objective) if objective else 0.0,
        objective=objective,
        shrunk=shrunk,
        threshold=T,
        norm=math.sqrt(energy),
    )


def _result(
    work: _Work, measures: _Measures, goal: _Goal, scale: float, keep_parts: bool
) -> PCPResult:
    """Return the last iterate in the units of the input."""
    p, n = work.M.shape
    low_rank = None
    if keep_parts:
        low_rank = work.A @ _like(work.M, measures.threshold) * scale
    sparse = torch.sub(work.M, work.A, out=work.A).add_(work.U)
    energy, _ = column_energy(sparse)
    # Energies below the solver's tolerance are rounding errors, and weights use 1 / energy.
    energy = np.where(energy <= (goal.tolerance * measures.norm) ** 2 / n, 0.0, energy)
    return PCPResult(
        energy=energy * scale**2,
        singular_values=measures.shrunk[::-1][: min(p, n)] * scale,
        rank=int(np.count_nonzero(measures.shrunk)),
        objective=measures.objective * scale,
        gap=measures.gap,
        residual=measures.residual,
        iterations=work.iterations,
        converged=goal.reached(measures),
        low_rank=low_rank,
        sparse=sparse.mul_(scale) if keep_parts else None,
    )
