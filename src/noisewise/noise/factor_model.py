"""Maximum-likelihood factor model of an n x n second-moment matrix: S ~ B B^T + diag(psi)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FactorFit", "choose_rank", "fit_factors", "identifiable_rank", "signal_loadings"]

Vector = NDArray[np.float64]
Square = NDArray[np.float64]

_LEAST_SHARE = 1e-8  # lower bound of psi_i / S_ii, for improper solutions (psi -> 0)
_STATIONARY = 1e-7  # largest gradient of the deviance per row in log psi at a solution
_ROUNDING = 1e-13
_NEWTON_STEPS = 100
_LARGEST_ERROR = 0.25  # a psi with a larger relative error counts as not determined
_SKIPPED = 4  # number of unusable ranks to skip before the first usable one
_ROWS_PER_COLUMN = 4  # with fewer rows than this times n, no factor is fitted


@dataclass(frozen=True)
class FactorFit:
    """A factor model with ``rank`` factors.

    Attributes:
        rank: r.
        noise: psi, [n], in the units of S.
        relative_error: [n], standard error of log psi_i (from the expected information).
        deviance: twice the difference between the log-likelihoods of the saturated model and this
            one.
        criterion: Bayesian information criterion: deviance + parameters * log(rows).
        converged: whether the gradient is zero up to rounding.
    """

    rank: int
    noise: Vector
    relative_error: Vector
    deviance: float
    criterion: float
    converged: bool

    @property
    def determined(self) -> bool:
        """Whether the data determine every psi_i: all standard errors are small.

        In an improper solution (psi -> 0, a Heywood case), one factor coincides with one client.
        The data then do not determine psi_i, and its standard error is large.
        """
        return bool(np.all(self.relative_error <= _LARGEST_ERROR))


def identifiable_rank(n: int) -> int:
    """Return the largest r with (n - r)^2 >= n + r, or 0 (Ledermann's bound).

    With more factors the model has more parameters than S determines.
    """
    return max((r for r in range(n) if (n - r) ** 2 >= n + r), default=0)


def choose_rank(
    S: Square, rows: int, max_rank: int | None = None, start: Vector | None = None
) -> FactorFit:
    """Fit factor models of increasing rank; return the one with the least information criterion.

    The search starts at rank 0, and each fit starts from the one before. It stops when the
    criterion has risen twice, when a rank is unusable, or at the largest identifiable rank. A rank
    is unusable if a psi is not determined (see `FactorFit.determined`) or the maximum of the
    likelihood was not found, as for matrices without noise. Too few factors can make a rank
    unusable as well, so up to 4 unusable ranks are skipped before the first usable one. Rank 0,
    where psi is the diagonal of S, is always usable.

    Args:
        S: [n, n] second moments, M^T M / rows, with a positive diagonal.
        rows: number of rows of M in the sum.
        max_rank: largest rank to try; None for the largest identifiable rank.
        start: [n] psi to start from, for example of an earlier round.

    Returns:
        The best fit.
    """
    n = S.shape[0]
    limit = identifiable_rank(n) if rows >= _ROWS_PER_COLUMN * n else 0
    if max_rank is not None:
        limit = min(limit, max_rank)
    best = fit_factors(S, rows, 0)
    psi = start
    rises = skipped = 0
    for rank in range(1, limit + 1):
        fit = fit_factors(S, rows, rank, psi)
        if not (fit.determined and fit.converged):
            psi, skipped = None, skipped + 1
            if best.rank or rises or skipped > _SKIPPED:
                break
            continue
        psi = fit.noise
        if fit.criterion < best.criterion:
            best, rises = fit, 0
        else:
            rises += 1
            if rises == 2:
                break
    return best


def fit_factors(S: Square, rows: int, rank: int, start: Vector | None = None) -> FactorFit:
    """Fit a factor model of a given rank by maximum likelihood (Lawley 1940; Joreskog 1967).

    Let D = diag(psi), and let theta_1 >= ... >= theta_n be the eigenvalues of D^-1/2 S D^-1/2. With
    the best B, the deviance per row is sum_{m > r} (theta_m - log theta_m - 1). Newton steps in
    log psi, with the expected second derivatives, minimise it. Columns are scaled to S_ii = 1
    first, so scaling or permuting the columns scales or permutes the result.

    Args:
        S: [n, n], see `choose_rank`.
        rows: see `choose_rank`.
        rank: r < n.
        start: [n] psi to start from.

    Returns:
        The fit; its ``converged`` is False if the maximum was not found.
    """
    n = S.shape[0]
    diagonal = np.diagonal(S).copy()
    R = S / np.sqrt(np.outer(diagonal, diagonal))
    np.fill_diagonal(R, 1.0)
    log_psi = np.zeros(n)
    if rank and start is not None:
        log_psi = np.log(np.clip(start / diagonal, 10 * _LEAST_SHARE, 1.0))
    elif rank:  # Joreskog's start: the variance that the other columns do not explain
        unexplained = 1 / np.diagonal(np.linalg.inv(R + 1e-8 * np.eye(n)))
        log_psi = np.log(np.clip((1 - 0.5 * rank / n) * unexplained, 10 * _LEAST_SHARE, 1.0))
    log_psi, stationary = _newton(R, rank, log_psi)
    point = _Point.at(R, rank, log_psi)
    parameters = n * (rank + 1) - rank * (rank - 1) // 2
    deviance = rows * point.value
    return FactorFit(
        rank=rank,
        noise=np.exp(log_psi) * diagonal,
        relative_error=np.sqrt(2 / rows * np.diagonal(np.linalg.inv(point.curvature))),
        deviance=deviance,
        criterion=deviance + parameters * math.log(rows),
        converged=stationary,
    )


def signal_loadings(S: Square, psi: Vector, rows: int) -> NDArray[np.float64]:
    """Compute the loadings B ([n, r]) of S ~ B B^T + diag(psi) for a known psi.

    With D = diag(psi), a factor is an eigenvector of D^-1/2 S D^-1/2 whose eigenvalue is above the
    largest that noise alone gives, (1 + sqrt(n / rows))^2 (Marchenko and Pastur 1967). Each factor
    has the sign for which its sum is positive. The first is the clients' common signal.

    Args:
        S: [n, n], see `choose_rank`.
        psi: [n] noise variances > 0, in the units of S.
        rows: see `choose_rank`.

    Returns:
        [n, r], largest eigenvalue first; r is 0 if no eigenvalue is large enough.
    """
    n = S.shape[0]
    root = np.sqrt(psi)
    eigenvalues, V = np.linalg.eigh(S / np.outer(root, root))
    edge = (1 + math.sqrt(n / rows)) ** 2
    keep = np.flatnonzero(eigenvalues > edge)[::-1][: identifiable_rank(n)]
    B = root[:, None] * V[:, keep] * np.sqrt(eigenvalues[keep] - 1)
    return np.asarray(B * np.where(B.sum(axis=0) < 0, -1.0, 1.0))


@dataclass(frozen=True)
class _Point:
    """Deviance per row, its gradient and its expected second derivatives in log psi."""

    value: float
    gradient: Vector
    curvature: Square

    @classmethod
    def at(cls, R: Square, rank: int, log_psi: Vector) -> _Point:
        root = np.exp(-0.5 * log_psi)
        theta, V = np.linalg.eigh(R * np.outer(root, root))
        theta = np.maximum(theta, np.finfo(np.float64).tiny)
        # Only eigenvalues above 1 can be factors. eigh returns eigenvalues in ascending order.
        factors = min(rank, int(np.count_nonzero(theta > 1)))
        theta, V = theta[: len(theta) - factors], V[:, : V.shape[1] - factors]
        squares = V**2
        return cls(
            value=float(np.sum(theta - np.log(theta) - 1)),
            gradient=squares @ (1 - theta),
            curvature=(V @ V.T) ** 2 + 1e-12 * np.eye(len(log_psi)),
        )


def _newton(R: Square, rank: int, log_psi: Vector) -> tuple[Vector, bool]:
    """Minimise the deviance over log psi >= log(_LEAST_SHARE).

    Returns log psi, and whether it is stationary.
    """
    least = math.log(_LEAST_SHARE)
    point = _Point.at(R, rank, log_psi)
    for _ in range(_NEWTON_STEPS):
        free = (log_psi > least) | (point.gradient < 0)
        if not np.any(free) or np.max(np.abs(point.gradient[free])) <= _STATIONARY:
            return log_psi, True
        step = np.zeros_like(log_psi)
        block = point.curvature[np.ix_(free, free)]
        step[free] = np.clip(-np.linalg.solve(block, point.gradient[free]), -2.0, 2.0)
        if -float(point.gradient @ step) <= _ROUNDING * (1 + abs(point.value)):
            return log_psi, True  # a further step would change the deviance by rounding only
        length = 1.0
        while length > 1e-6:
            candidate = np.maximum(log_psi + length * step, least)
            new_point = _Point.at(R, rank, candidate)
            decrease = float(point.gradient @ (candidate - log_psi))
            if new_point.value <= point.value + 1e-4 * decrease + 1e-15 * (1 + abs(point.value)):
                break
            length /= 2
        else:
            return log_psi, False
        log_psi, point = candidate, new_point
    return log_psi, False
