"""`Factor`: noise by a maximum-likelihood factor model of the Gram matrix, in one pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import non_negative_int
from noisewise.noise.blas import one_blas_thread
from noisewise.noise.blocks import Updates
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.factor_model import FactorFit, choose_rank, signal_loadings
from noisewise.noise.quiet import ChunkGrams, chunk_grams
from noisewise.noise.sampling import SampleSize, check_sample, draw_rows

__all__ = ["Factor"]

Vector = NDArray[np.float64]

_BUDGET = 8 * 10**7  # p n^2 above which a sample of the coordinates is read
_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the rows, from the quietest on
_FIRST_SHARE = 0.125  # by which quietness and noise level are found together ...
_ROUNDS = 3  # ... in so many rounds
_LEAST_ROWS = 8  # times n: what the smallest share must keep
_SAME = 1e-6  # columns whose correlation is 1 to this are one column twice


@dataclass(frozen=True)
class Factor:
    """M^T M / p ~ B B^T + diag(psi): signal common to clients, noise of each client's own.

    The model is fitted to the quietest rows (see `noisewise.noise.quiet`), its rank chosen by BIC
    within what is identifiable and determined (see `choose_rank`). How many rows count as quiet is
    chosen by the excess noise that the weights would have: few rows have a larger sampling error,
    many rows carry signal that the model takes for noise, which shows as a difference from the few.

    Attributes:
        sample: number of coordinates to read, None for all, or ``auto`` (see `draw_rows`).
        seed: of the sample; None draws another one, which nobody can foresee, at each estimate.
        max_rank: largest number of factors; None for the bound of identifiability.
        quiet: False fits all rows at once, as the textbook has it.
    """

    sample: SampleSize = "auto"
    seed: int | None = 0
    max_rank: int | None = None
    quiet: bool = True

    def __post_init__(self) -> None:
        check_sample(self.sample, self.seed)
        if self.max_rank is not None:
            non_negative_int("max_rank", self.max_rank)

    @property
    def name(self) -> str:
        """``factor``."""
        return "factor"

    @property
    def takes_blocks(self) -> Literal[True]:
        """See `StreamingEstimator`."""
        return True

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.unforeseen.Reseedable`."""
        return replace(self, seed=seed)

    def estimate(self, updates: Updates, start: Vector | None = None) -> NoiseEstimate:
        """Noise energy p psi_i of each column of ``updates`` ([p, n]).

        Args:
            updates: [p, n], or a source or iterator of row blocks.
            start: [n] variances of an earlier round, to begin with; they save time only.

        Returns:
            The estimate. Its details hold the ``rank`` of the model, the ``share`` of the rows it
            was fitted to, ``relative_error`` ([n]), ``loadings`` ([n, r], of all rows: column i of
            M has the signal energy sum_k loadings[i, k]^2; the first column is each client's share
            of the common signal) and the number of ``rows`` read.
        """
        drawn = draw_rows(updates, self.sample, self.seed, _BUDGET, one_pass=True)
        grams = chunk_grams(drawn.values)
        p = drawn.total or grams.rows
        energy = np.diagonal(grams.total)
        keep, copies = _distinct(grams.total)
        n = energy.size
        if not keep.size:
            return NoiseEstimate(np.zeros(n), self.name, details={"rank": 0, "rows": grams.rows})
        first = None if start is None else np.asarray(start, dtype=np.float64)[keep] / p
        distinct = grams.columns(keep) if keep.size < n else grams
        with one_blas_thread():
            fit, share = self._fit(distinct, first)
        psi, error = np.zeros(n), np.zeros(n)
        present = energy > 0
        twin = copies[present]
        psi[keep], error[keep] = fit.noise, fit.relative_error
        psi[present] = psi[twin] * energy[present] / energy[twin]
        error[present] = error[twin]
        loadings = np.zeros((n, 0))
        if np.all(fit.noise > 0):
            found = signal_loadings(distinct.total / grams.rows, fit.noise, grams.rows)
            loadings = np.zeros((n, found.shape[1]))
            loadings[keep] = found
            loadings[present] = loadings[twin] * np.sqrt(energy[present] / energy[twin])[:, None]
        details: dict[str, Any] = {
            "rank": fit.rank,
            "share": share,
            "rows": grams.rows,
            "relative_error": error,
            "loadings": loadings * np.sqrt(p),
            "criterion": fit.criterion,
        }
        if not fit.converged:
            details["reason"] = "the likelihood was not maximised: the matrix is close to singular"
        return NoiseEstimate(psi * p, self.name, fit.converged, details)

    def _fit(self, grams: ChunkGrams, start: Vector | None) -> tuple[FactorFit, float]:
        """The fit with the least expected excess noise, and the share of the rows it used."""
        n = grams.total.shape[0]
        shares = [share for share in _SHARES if share * grams.rows >= _LEAST_ROWS * n]
        psi = np.diagonal(grams.total) / grams.rows
        if not self.quiet or len(shares) < 2 or not grams.differ(psi):
            return self._fit_share(grams, psi, 1.0, start), 1.0
        if start is not None:
            psi = np.where(start > 0, start, psi)
        for _ in range(_ROUNDS):
            gram, rows = grams.quiet(psi, max(_FIRST_SHARE, shares[0]))
            level = np.diagonal(gram) / rows
            psi = np.where(level > 0, level, psi)
        fits = [self._fit_share(grams, psi, share, start) for share in shares]
        risks = [_risk(fit, fits[0]) for fit in fits]
        best = int(np.argmin(risks))
        return fits[best], shares[best]

    def _fit_share(
        self, grams: ChunkGrams, psi: Vector, share: float, start: Vector | None
    ) -> FactorFit:
        gram, rows = grams.quiet(psi, share)
        if np.any(np.diagonal(gram) <= 0):  # a column that is zero in all quiet rows
            gram, rows = grams.total, grams.rows
        return choose_rank(gram / rows, rows, self.max_rank, start)


def _risk(fit: FactorFit, quietest: FactorFit) -> float:
    """Expected excess noise - 1 of weights from ``fit``, with the quietest rows as unbiased guide.

    To second order the excess of weights w ~ 1/psi' is sum_i w_i d_i^2, d the centred error of
    log psi'. Its sampling part is known; its bias is what ``fit`` differs from the quietest rows
    beyond the sampling part of the difference.
    """
    w = (1 / quietest.noise) / np.sum(1 / quietest.noise)
    difference = np.log(fit.noise / quietest.noise)
    difference = difference - np.sum(w * difference)
    sampling = fit.relative_error**2
    expected = np.maximum(quietest.relative_error**2 - sampling, 0.0)
    bias = float(np.sum(w * difference**2) - np.sum(w * (1 - w) * expected))
    return float(np.sum(w * (1 - w) * sampling)) + max(0.0, bias)


def _distinct(gram: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Columns that are neither zero nor a multiple of an earlier one, and each column's twin.

    Twins would be fitted by a factor of their own with no noise at all.
    """
    energy = np.diagonal(gram)
    keep: list[int] = []
    twin = np.arange(energy.size)
    for i in np.flatnonzero(energy > 0):
        for j in keep:
            if abs(gram[i, j]) >= (1 - _SAME) * np.sqrt(energy[i] * energy[j]):
                twin[i] = j
                break
        else:
            keep.append(int(i))
    return np.array(keep, dtype=np.int64), twin
