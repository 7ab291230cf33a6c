"""Principal component pursuit: a matrix as low rank (signal) plus sparse (noise)."""

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

_RELAXATION = 1.75  # of the alternating directions; the theory allows (0, 2)
_STEP = 11.0  # mu in units of lambda times the paper's mu (measured: 8 to 16 are as good) ...
_STEP_COARSE = 20.0  # ... and after a coarse start (15 to 30)
_LOOK_EVERY = 10  # iterations between two looks at residual and duality gap
_COARSE = 16  # the start is solved on every 16th row first ...
_COARSE_ROWS = 1000  # ... if that leaves so many of them
_COARSE_TOLERANCE = 1e-4
_ADAPT_EVERY = 250  # iterations between two looks at the step ...
_ADAPT = 3.0  # ... its change ...
_BALANCE = 5.0  # ... and the imbalance of residual and gap that calls for it
_HELD = 10  # iterations during which the spectrum of that start is held
_BLOCK = 1 << 16  # numbers of one row block, so that its working set stays in the cache of a CPU
_BLOCK_ELSEWHERE = 1 << 24
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
        residual: ||M - L - S||_F / ||M||_F; 0 only where the iteration stands still.
        iterations: passes over the matrix.
        converged: residual and gap are within their tolerances.
        low_rank: L, [p, n], if it was asked for: numpy for numpy, torch for torch.
        sparse: S, [p, n], likewise.
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

    The paper's algorithm RPCA (Candes et al. 2011, alternating directions), with the L-step as
    Candes et al. have it, D_{1/mu}(M - S + Y/mu): the paper's print has the sign of Y wrong. With
    U = Y/mu, A = M - S + U and the n x n matrix T = V diag(max(1 - 1/(mu s), 0)) V^T of the
    eigenvectors V and singular values s of A (from A^T A, never an SVD of p x n):

        L = A T,  X = M - L + U,  U' = clip(X, +-lambda/mu),  S' = X - U',  A' = M - X + 2 U'

    so an iteration is one pass over row blocks, in which the next A^T A is summed as well. What
    saves iterations leaves the optimum where it is, and the duality gap certifies that it does:

    - over-relaxation, L replaced by alpha L + (1 - alpha)(M - S) (Eckstein and Bertsekas 1992);
    - a smaller step: mu = 11 lambda (20 after a coarse start) times the paper's p n / (4 sum |M|).
      Singular values of noise grow with sqrt(p), so the threshold 1/mu has to grow with them.
      It is changed where residual and gap do not close together;
    - a start from every 16th row. The slow part is n x n, the spectrum of A, and rows are many
      draws of the same thing: T is found on few of them and held while S and Y of all rows adapt.

    Args:
        M: [p, n], numpy or torch on any device; not modified. p < n is fine.
        tolerance: of ||M - L - S|| / ||M||, with L the next iterate: 0 is a fixed point.
        gap_tolerance: of the relative duality gap.
        max_iterations: stop there, with ``converged`` False.
        keep_parts: return L and S too.

    Raises:
        UpdateError: M is not a matrix of finite numbers; names the column.
    """
    positive_number("tolerance", tolerance)
    positive_number("gap_tolerance", gap_tolerance)
    positive_int("max_iterations", max_iterations)
    tensor = as_tensor(M)
    column_energy(tensor)  # refuses NaN and infinities
    p, n = tensor.shape
    if tensor.numel() <= _SMALL and tensor.device.type != "mps":
        tensor = tensor.double()
    scale = float(tensor.abs().mean())
    if scale == 0:
        scale = 1.0  # all zero: the first look finds both parts zero
    goal = _Goal(tolerance, gap_tolerance, max_iterations)
    scaled = torch.div(tensor.contiguous(), scale)
    with one_blas_thread():
        state = _start(scaled, lam=1 / math.sqrt(max(p, n)), share=1.0, budget=max_iterations)
        measures = _solve(state, goal)
    result = _result(state, measures, goal, scale, keep_parts)
    if result.low_rank is None or result.sparse is None or isinstance(M, torch.Tensor):
        return result
    L, S = (np.asarray(part) for part in (result.low_rank, result.sparse))
    return replace(result, low_rank=L, sparse=S)


@dataclass(frozen=True)
class _Goal:
    tolerance: float
    gap: float
    iterations: int

    def reached(self, measures: _Measures) -> bool:
        return measures.residual <= self.tolerance and measures.gap <= self.gap


@dataclass
class _State:
    """Working arrays, on a matrix scaled to a mean |M| of 1: [p, n] each, and A^T A as [n, n].

    ``share`` is p over the number of rows here: above 1 for the coarse start, whose sums over rows
    stand for those of all rows.
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
    """Where the iteration stands, in the units of the scaled matrix."""

    residual: float
    gap: float
    objective: float
    shrunk: Vector
    threshold: Square
    norm: float


def _start(M: torch.Tensor, lam: float, share: float, budget: int) -> _State:
    """S = Y = 0, and for many rows the spectrum that a solution on few of them has."""
    usual = lam / 4  # p n / (4 sum |M|) is 1/4 on the scaled matrix
    held, mu = None, _STEP * usual
    if M.shape[0] // _COARSE >= max(_COARSE_ROWS, M.shape[1]):
        coarse = _start(M[::_COARSE].contiguous(), lam, share * _COARSE, budget)
        _solve(coarse, _Goal(_COARSE_TOLERANCE, math.inf, budget))
        # From here the solution's spectrum is known: L^T L is of the coarse one's A T.
        mu = _STEP_COARSE * usual
        held = _resolve(coarse.gram, coarse.mu, mu)
    gram = share * np.sum([_gram(part) for part in slices(M, _rows(M))], axis=0)
    return _State(M, M.clone(), torch.zeros_like(M), gram, lam, share, mu, held)


def _resolve(gram: Square, mu: float, new_mu: float) -> Square:
    """T of the solution for another step: L has the singular values s - 1/mu, A has s + 1/mu'."""
    eigenvalues, V = np.linalg.eigh(gram)
    values = np.maximum(np.sqrt(np.maximum(eigenvalues, 0.0)) - 1 / mu, 0.0)
    return np.asarray((V * (values / (values + 1 / new_mu))) @ V.T)


def _solve(state: _State, goal: _Goal) -> _Measures:
    """Iterate until the goal is reached or the iterations are spent."""
    measures = None
    while state.iterations < goal.iterations:
        _iterate(state)
        if state.iterations % _LOOK_EVERY == 0 and state.iterations > _HELD:
            measures = _measure(state)
            if goal.reached(measures):
                return measures
            if state.iterations % _ADAPT_EVERY == 0:
                _adapt(state, goal, measures)
    return measures if state.iterations % _LOOK_EVERY == 0 and measures else _measure(state)


def _adapt(state: _State, goal: _Goal, measures: _Measures) -> None:
    """Another step where the present one has lost its balance (Boyd et al. 2011, section 3.4.1).

    A gap that is closed while the residual is not calls for a larger mu, and the other way round.
    Most matrices converge before this is asked; nearly noise-free ones need it.
    """
    behind = (measures.residual / goal.tolerance) / max(measures.gap / goal.gap, 1e-12)
    factor = _ADAPT if behind > _BALANCE else 1 / _ADAPT if behind < 1 / _BALANCE else 1.0
    if factor == 1.0:
        return
    gram = np.zeros_like(state.gram)
    for _, A, U in state.blocks():  # Y and S stay, U = Y / mu changes
        A.sub_(U)
        A.add_(U.div_(factor))
        gram += _gram(A)
    state.gram = gram * state.share
    state.mu *= factor


def _rows(M: torch.Tensor) -> int:
    return max(1, (_BLOCK if M.device.type == "cpu" else _BLOCK_ELSEWHERE) // M.shape[1])


def _threshold(gram: Square, mu: float) -> tuple[Vector, Square]:
    """Shrunk singular values ([n], ascending) and T ([n, n]) with D_{1/mu}(A) = A T."""
    eigenvalues, V = np.linalg.eigh(gram)
    s = np.sqrt(np.maximum(eigenvalues, np.finfo(np.float64).tiny))
    shrunk = np.maximum(s - 1 / mu, 0.0)
    return shrunk, (V * (shrunk / s)) @ V.T


def _gram(block: torch.Tensor, out: torch.Tensor | None = None) -> Square:
    return torch.mm(block.T, block, out=out).cpu().double().numpy().copy()


def _like(M: torch.Tensor, square: Square) -> torch.Tensor:
    """An n x n matrix with the type and on the device of M (not every device has float64)."""
    return torch.from_numpy(square).to(M.dtype).to(M.device)


def _iterate(state: _State) -> None:
    """One pass over the row blocks: S, Y, and the Gram matrix of the next A."""
    n, alpha = state.M.shape[1], _RELAXATION
    if state.held is not None and state.iterations < _HELD:
        T = state.held
    else:
        _, T = _threshold(state.gram, state.mu)
    # With the relaxed L, M - L + U is M - A (alpha T + (1 - alpha) I) + (2 - alpha) U.
    relaxed = _like(state.M, alpha * T + (1 - alpha) * np.eye(n))
    bound = state.lam / state.mu
    X = torch.empty(0)
    product = torch.empty((n, n), dtype=state.M.dtype, device=state.M.device)
    gram = np.zeros((n, n))
    for M, A, U in state.blocks():
        if X.shape != M.shape:
            X = torch.empty_like(M)
        torch.addmm(M, A, relaxed, alpha=-1, out=X)
        X.add_(U, alpha=2 - alpha)
        torch.clamp(X, -bound, bound, out=U)
        torch.sub(M, X, out=A)
        A.add_(U, alpha=2)
        gram += _gram(A, product)
    state.gram = gram * state.share
    state.iterations += 1


def _measure(state: _State) -> _Measures:
    """Residual, objective and duality gap of the present iterate; changes nothing.

    The dual problem is max <M, Y> over ||Y||_2 <= 1, |Y| <= lambda. Y = mu U keeps the second
    bound by construction and is divided by its spectral norm where that exceeds 1.
    """
    shrunk, T = _threshold(state.gram, state.mu)
    threshold = _like(state.M, T)
    dual_gram = np.zeros_like(T)
    l1 = inner = residual = energy = 0.0
    for M, A, U in state.blocks():
        L = torch.mm(A, threshold)
        l1 += float(torch.sub(M, L).abs_().sum())
        L.sub_(A).add_(U)  # L - (M - S)
        residual += float(L.square_().sum())
        energy += float(torch.mul(M, M, out=L).sum())
        inner += float(torch.mul(M, U, out=L).sum())
        dual_gram += _gram(U)
    objective = float(shrunk.sum()) + state.lam * state.share * l1
    largest = float(np.linalg.eigvalsh(dual_gram)[-1])
    spectral = state.mu * math.sqrt(max(state.share * largest, 0.0))
    dual = state.mu * state.share * inner / max(1.0, spectral)
    return _Measures(
        residual=math.sqrt(residual / energy) if energy else 0.0,
        gap=max(0.0, 1 - dual / objective) if objective else 0.0,
        objective=objective,
        shrunk=shrunk,
        threshold=T,
        norm=math.sqrt(energy),
    )


def _result(
    state: _State, measures: _Measures, goal: _Goal, scale: float, keep_parts: bool
) -> PCPResult:
    """The last iterate in the units of the input."""
    p, n = state.M.shape
    low_rank = None
    if keep_parts:
        low_rank = state.A @ _like(state.M, measures.threshold) * scale
    sparse = torch.sub(state.M, state.A, out=state.A).add_(state.U)
    energy, _ = column_energy(sparse)
    # Below the solver's tolerance an energy is rounding; 1 / it would be a weight out of nothing.
    energy = np.where(energy <= (goal.tolerance * measures.norm) ** 2 / n, 0.0, energy)
    return PCPResult(
        energy=energy * scale**2,
        singular_values=measures.shrunk[::-1][: min(p, n)] * scale,
        rank=int(np.count_nonzero(measures.shrunk)),
        objective=measures.objective * scale,
        gap=measures.gap,
        residual=measures.residual,
        iterations=state.iterations,
        converged=goal.reached(measures),
        low_rank=low_rank,
        sparse=sparse.mul_(scale) if keep_parts else None,
    )
