"""`PCP`: the paper's estimator. The noise is the sparse part of principal component pursuit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource, Updates, as_matrix
from noisewise.noise.estimate import Matrix, NoiseEstimate
from noisewise.noise.pursuit import PCPResult, principal_component_pursuit
from noisewise.noise.sampling import SampledEstimator, draw_rows, submatrices

__all__ = ["PCP", "PCPResult", "principal_component_pursuit"]

_BUDGET = 10**8  # p n^2 above which only a sample of the coordinates is read
_MOST = 500_000  # most rows of a sample: relative error 0.2% (11 million rows took 90 s)


@dataclass(frozen=True)
class PCP(SampledEstimator):
    """The paper's estimator (Algorithm 1): sigma_i^2 = ||S_i||^2 of principal component pursuit.

    Attributes:
        sample: see `SampledEstimator`.
        seed: see `SampledEstimator`.
        submatrix_rows: p', number of rows of each sub-matrix: the paper's alternative to a sample
            (its section on scalability). Energies are averaged over the sub-matrices and scaled by
            p / p'. None reads a sample.
        submatrices: how many of the floor(p / p') sub-matrices to use; None for all, 1 for the
            first.
        tolerance: see `principal_component_pursuit`.
        max_iterations: see `principal_component_pursuit`.
    """

    submatrix_rows: int | None = None
    submatrices: int | None = None
    tolerance: float = 1e-6
    max_iterations: int = 3000

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_number("tolerance", self.tolerance)
        positive_int("max_iterations", self.max_iterations)
        if self.submatrix_rows is not None:
            positive_int("submatrix_rows", self.submatrix_rows)
        elif self.submatrices is not None:
            raise InvalidValueError(
                "submatrices", self.submatrices, "requires submatrix_rows: set both or neither"
            )
        if self.submatrices is not None:
            positive_int("submatrices", self.submatrices)

    @property
    def name(self) -> str:
        """``pcp``."""
        return "pcp"

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.reseeding.Reseedable`.

        Raises:
            InvalidValueError: ``submatrix_rows`` is set and ``seed`` is None. Sub-matrices always
                consist of the same rows, so clients can predict which rows are read.
        """
        if self.submatrix_rows is not None and seed is None:
            raise InvalidValueError(
                "submatrix_rows",
                self.submatrix_rows,
                "must not be set for a deployed server, because clients can predict which rows "
                "are read; set sample instead",
            )
        return super().reseeded(seed)

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Compute the energy of each column of the sparse part.

        Args:
            updates: [p, n], or a source or iterator of row blocks, which are read into memory.

        Returns:
            The estimate. Its details hold the number of ``rows`` read, and ``iterations``,
            ``residual``, ``gap``, ``objective``, ``rank`` and ``singular_values`` of `PCPResult`.

        Raises:
            UpdateError: the updates are malformed, or have NaN or infinite values.
        """
        if self.submatrix_rows is not None:
            p, parts = _cut(updates, self.submatrix_rows, self.submatrices)
        else:
            drawn = draw_rows(updates, self.sample, self.seed, _BUDGET, one_pass=False, most=_MOST)
            whole = as_matrix(drawn.values)
            p, parts = drawn.total or whole.shape[0], [whole]
        results = [
            principal_component_pursuit(
                part, tolerance=self.tolerance, max_iterations=self.max_iterations
            )
            for part in parts
        ]
        scales = [p / part.shape[0] for part in parts]
        energies = [scale * result.energy for scale, result in zip(scales, results, strict=True)]
        return NoiseEstimate(
            variance=np.mean(energies, axis=0),
            method=self.name,
            converged=all(result.converged for result in results),
            details=self._details(results, sum(part.shape[0] for part in parts)),
        )

    def _details(self, results: Sequence[PCPResult], rows: int) -> dict[str, Any]:
        worst = max(results, key=lambda result: result.residual)
        details: dict[str, Any] = {
            "rows": rows,
            "iterations": max(result.iterations for result in results),
            "residual": worst.residual,
            "gap": max(result.gap for result in results),
            "objective": float(np.mean([result.objective for result in results])),
            "rank": max(result.rank for result in results),
            "singular_values": results[0].singular_values,
        }
        if not all(result.converged for result in results):
            details["reason"] = (
                f"not converged after max_iterations = {self.max_iterations}: residual "
                f"{details['residual']:.1e}, gap {details['gap']:.1e}; increase max_iterations"
            )
        return details


def _cut(updates: Updates, rows: int, number: int | None) -> tuple[int, list[torch.Tensor]]:
    """Return p and the paper's sub-matrices; only their rows are read from a `RowSource`."""
    if isinstance(updates, RowSource) and not isinstance(updates, torch.Tensor | np.ndarray):
        p = updates.shape[0]
        read: list[Matrix] = [
            updates.take(np.arange(part.start, part.stop)) for part in submatrices(p, rows, number)
        ]
        return p, [as_matrix(part) for part in read]
    whole = as_matrix(updates)
    return whole.shape[0], [whole[part] for part in submatrices(whole.shape[0], rows, number)]
