"""Maximum-likelihood factor model of an n x n second-moment matrix: S ~ B B^T + diag(psi)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FactorFit", "choose_rank", "fit_factors", "identifiable_rank", "signal_loadings"]

Vector = NDArray[np.float64]
Square = NDArray[np.float64]

_LEAST_SHARE = 1e-8  # of psi in S_ii: where an improper solution is stopped
_STATIONARY = 1e-7  # gradient of the deviance per row, in log psi
_ROUNDING = 1e-13
_NEWTON_STEPS = 100
_LARGEST_ERROR = 0.25  # relative error of a psi above which a rank does not determine it
_SKIPPED = 4  # ranks in a row that may be passed over at first
_ROWS_PER_COLUMN = 4  # fewer rows than that times n do not carry any factor


@dataclass(frozen=True)
class FactorFit:
    """A factor model with ``rank`` factors.

    Attributes:
        rank: r.
        noise: psi, [n], in the units of S.
        relative_error: [n], standard error of log psi_i (from the expected information).
        deviance: twice the log-likelihood that is missing to the saturated model.
        criterion: Bayesian information criterion: deviance + parameters * log(rows).
        converged: the gradient is zero to rounding.
    """

    rank: int
    noise: Vector
    relative_error: Vector
    deviance: float
    criterion: float
    converged: bool

    @property
    def determined(self) -> bool:
        """Whether the data say what every psi_i is.

        An improper solution (psi -> 0, a Heywood case) is a factor that coincides with one client:
        then psi_i does not follow from the data, and its standard error shows it.
        """
        return bool(np.all(self.relative_error <= _LARGEST_ERROR))


def identifiable_rank(n: int) -> int:
    """The largest r with (n - r)^2 >= n + r (Ledermann's bound): more factors fit anything."""
    return max((r for r in range(n) if (n - r) ** 2 >= n + r), default=0)


def choose_rank(
    S: Square, rows: int, max_rank: int | None = None, start: Vector | None = None
) -> FactorFit:
    """The factor model of the rank with the least information criterion.

    Ranks are tried from 0 upwards, each started from the last, until the criterion has risen twice,
    a psi is not determined any more (see `FactorFit.determined`), or the model is not identifiable.
    Too few factors can leave a psi undetermined as well, so a few such ranks are passed over as
    long as none has been accepted; so is one whose likelihood cannot be maximised, as happens to
    matrices without noise. Rank 0, the column norms, is always an answer.

    Args:
        S: [n, n] second moments, M^T M / rows, with a positive diagonal.
        rows: number of rows of M that S was summed over.
        max_rank: largest rank to try; None for the bound of identifiability.
        start: [n] psi to begin with, of an earlier round say.
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
    """Maximum likelihood for a given rank (Lawley 1940; Joreskog 1967).

    With D = diag(psi) and theta_1 >= ... >= theta_n the eigenvalues of D^-1/2 S D^-1/2, the
    likelihood maximised over B leaves sum_{m > r} (theta_m - log theta_m - 1), minimised here by
    Newton steps in log psi with the expected second derivatives. Columns are brought to S_ii = 1
    first, so the result follows any scaling and permutation of the columns.

    Args:
        S: [n, n], see `choose_rank`.
        rows: see `choose_rank`.
        rank: r < n.
        start: [n] psi to begin with.
    """
    n = S.shape[0]
    diagonal = np.diagonal(S).copy()
    R = S / np.sqrt(np.outer(diagonal, diagonal))
    np.fill_diagonal(R, 1.0)
    log_psi = np.zeros(n)
    if rank and start is not None:
        log_psi = np.log(np.clip(start / diagonal, 10 * _LEAST_SHARE, 1.0))
    elif rank:  # Joreskog's start: what the other columns do not explain
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
    """B ([n, r]) of S ~ B B^T + diag(psi) for a known psi, with as many factors as S shows.

    Factors are eigenvectors of D^-1/2 S D^-1/2 whose eigenvalue exceeds what noise alone can give,
    (1 + sqrt(n / rows))^2 (Marchenko and Pastur 1967). Each has the sign that makes its sum
    positive; the first is the clients' common signal.
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
        # Of the largest ``rank`` only those above 1 can be factors; eigh sorts upwards.
        factors = min(rank, int(np.count_nonzero(theta > 1)))
        theta, V = theta[: len(theta) - factors], V[:, : V.shape[1] - factors]
        squares = V**2
        return cls(
            value=float(np.sum(theta - np.log(theta) - 1)),
            gradient=squares @ (1 - theta),
            curvature=(V @ V.T) ** 2 + 1e-12 * np.eye(len(log_psi)),
        )


def _newton(R: Square, rank: int, log_psi: Vector) -> tuple[Vector, bool]:
    """Minimise over log psi >= log of the least share; returns it and whether it is stationary."""
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
            return log_psi, True  # the best that a further step promises is rounding
        length = 1.0
        while length > 1e-6:
            candidate = np.maximum(log_psi + length * step, least)
            there = _Point.at(R, rank, candidate)
            decrease = float(point.gradient @ (candidate - log_psi))
            if there.value <= point.value + 1e-4 * decrease + 1e-15 * (1 + abs(point.value)):
                break
            length /= 2
        else:
            return log_psi, False
        log_psi, point = candidate, there
    return log_psi, False
