"""`Factor`: estimates noise with a maximum-likelihood factor model in one pass over the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import non_negative_int
from noisewise.noise.blas import one_blas_thread
from noisewise.noise.blocks import Updates
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.factor_model import FactorFit, choose_rank, signal_loadings
from noisewise.noise.quiet_rows import ChunkGrams, chunk_grams
from noisewise.noise.sampling import SampledEstimator, draw_rows

__all__ = ["Factor"]

Vector = NDArray[np.float64]

_BUDGET = 8 * 10**7  # p n^2 above which only a sample of the coordinates is read
_SHARES = (0.125, 0.25, 0.5, 1.0)  # candidate shares of the rows, quietest first
_FIRST_SHARE = 0.125  # share that is used to find the quiet rows and the noise levels ...
_ROUNDS = 3  # ... alternately, this many times
_LEAST_ROWS = 8  # times n: fewest rows of the smallest share
_SAME = 1e-6  # two columns are parallel if their correlation is within this of 1 or -1


@dataclass(frozen=True)
class Factor(SampledEstimator):
    """Factor model M^T M / p ~ B B^T + diag(psi): common signal B, noise psi_i of each client.

    The model is fitted to the quietest rows: those in which the common signal is weakest (see
    `noisewise.noise.quiet_rows`). BIC chooses its rank among the ranks that are identifiable and
    that determine all psi_i (see `choose_rank`). The number of rows is chosen to minimise the
    expected excess noise of the resulting weights. Few rows give a larger sampling error. Many rows
    contain signal that the model counts as noise; this shows as a difference from the fit to few
    rows.

    Attributes:
        sample: see `SampledEstimator`.
        seed: see `SampledEstimator`.
        max_rank: largest number of factors; None for the largest identifiable rank.
        quiet: False fits the model to all rows, as in textbooks.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(20_000, 4)) * [1.0, 1.0, 2.0, 2.0]
        >>> (Factor().estimate(noise).variance / 20_000).round(0).tolist()
        [1.0, 1.0, 4.0, 4.0]
    """

    max_rank: int | None = None
    quiet: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rank is not None:
            non_negative_int("max_rank", self.max_rank)

    @property
    def name(self) -> str:
        """``factor``."""
        return "factor"

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Estimate the noise energy p psi_i of each column; see `estimate_from`.

        Args:
            updates: [p, n], or a source or iterator of row blocks.

        Returns:
            The estimate, as in `estimate_from`.

        Raises:
            UpdateError: the updates are malformed, or have NaN or infinite values.
        """
        return self.estimate_from(updates, None)

    def estimate_from(self, updates: Updates, start: Vector | None) -> NoiseEstimate:
        """Estimate the noise energy p psi_i of each column, starting from earlier energies.

        Args:
            updates: [p, n], or a source or iterator of row blocks.
            start: [n] noise energies of an earlier round, which save time; None for no start.

        Returns:
            The estimate. Its details hold:

            - ``rank``: number of factors of the model;
            - ``share``: share of the rows that the model was fitted to;
            - ``rows``: number of rows that were read;
            - ``relative_error``: [n] standard errors of log psi_i;
            - ``loadings``: [n, r] signal of each client in each factor, over all rows. Column i of
              M has the signal energy sum_k loadings[i, k]^2; loadings[:, 0] is the signal that the
              clients have in common;
            - ``criterion``: the model's BIC.

        Raises:
            UpdateError: the updates are malformed, or have NaN or infinite values.
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
            fitted = signal_loadings(distinct.total / grams.rows, fit.noise, grams.rows)
            loadings = np.zeros((n, fitted.shape[1]))
            loadings[keep] = fitted
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
            details["reason"] = (
                "the maximum of the likelihood was not found: the updates are nearly linearly "
                "dependent, that is, nearly without noise"
            )
        return NoiseEstimate(psi * p, self.name, fit.converged, details)

    def _fit(self, grams: ChunkGrams, start: Vector | None) -> tuple[FactorFit, float]:
        """Return the fit with the least expected excess noise, and the share of rows it used."""
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
        if np.any(np.diagonal(gram) <= 0):  # a column is zero in all quiet rows
            gram, rows = grams.total, grams.rows
        return choose_rank(gram / rows, rows, self.max_rank, start)


def _risk(fit: FactorFit, quietest: FactorFit) -> float:
    """Return the expected excess noise, minus 1, of weights from ``fit``.

    To second order, weights w ~ 1/psi' have the excess sum_i w_i d_i^2, where d is the centred
    error of log psi'. The sampling part of the error is known. The bias is estimated from the
    difference between ``fit`` and the fit to the quietest rows, which is taken as unbiased, after
    the sampling part of that difference is subtracted.
    """
    w = (1 / quietest.noise) / np.sum(1 / quietest.noise)
    difference = np.log(fit.noise / quietest.noise)
    difference = difference - np.sum(w * difference)
    sampling = fit.relative_error**2
    expected = np.maximum(quietest.relative_error**2 - sampling, 0.0)
    bias = float(np.sum(w * difference**2) - np.sum(w * (1 - w) * expected))
    return float(np.sum(w * (1 - w) * sampling)) + max(0.0, bias)


def _distinct(gram: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find columns that are zero or a multiple of an earlier column.

    Two parallel columns would get a factor of their own, and no noise at all.

    Args:
        gram: [n, n].

    Returns:
        The numbers of the other columns, and for each column the number of the kept column that it
        is parallel to ([n]; its own number where it is kept).
    """
    energy = np.diagonal(gram)
    keep, n_kept = np.empty(energy.size, dtype=np.int64), 0
    twin = np.arange(energy.size)
    for i in np.flatnonzero(energy > 0):
        kept_columns = keep[:n_kept]
        parallel = np.abs(gram[i, kept_columns]) >= (1 - _SAME) * np.sqrt(
            energy[i] * energy[kept_columns]
        )
        if parallel.any():
            twin[i] = kept_columns[int(np.argmax(parallel))]
        else:
            keep[n_kept] = i
            n_kept += 1
    return keep[:n_kept], twin
