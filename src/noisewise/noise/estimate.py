"""`NoiseEstimate`, and the protocols of noise estimators: `Estimator` and `WarmStart`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.text import short_repr

__all__ = ["Estimator", "Matrix", "NoiseEstimate", "WarmStart"]

Matrix = torch.Tensor | NDArray[np.floating[Any]]


@dataclass(frozen=True, repr=False)
class NoiseEstimate:
    """The estimated noise energy of each client's update.

    Attributes:
        variance: [n] float64, the noise energy E||noise_i||^2 of each update, summed over its
            coordinates (the paper's sigma_i^2, eq. sigma_i^2).
        method: name of the estimator.
        converged: whether the estimator converged; if not, ``details["reason"]`` says why.
        details: further results for reports, such as residual, iterations and rank. `NoiseWise`
            reads ``share``: below 1 it means that the variance does not include the signal that
            only one client has.

    Example:
        >>> NoiseEstimate(np.array([1.0, 4.0]), "own")
        NoiseEstimate(method='own', updates=2, converged=True, smallest=1, largest=4)
    """

    variance: NDArray[np.float64]
    method: str
    converged: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The method and the range of the estimates."""
        finite = len(self.variance) > 0
        return short_repr(
            self, method=self.method, updates=len(self.variance), converged=self.converged,
            smallest=float(self.variance.min()) if finite else None,
            largest=float(self.variance.max()) if finite else None,
        )  # fmt: skip


@runtime_checkable
class Estimator(Protocol):
    """Estimates the noise in an update matrix. Your own estimator needs only these two members."""

    @property
    def name(self) -> str:
        """Short name for configs and tables."""
        ...

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        """Estimate the noise energy of each column.

        Args:
            updates: [p, n], one column for each client.

        Returns:
            The estimate for the n clients.
        """
        ...


@runtime_checkable
class WarmStart(Estimator, Protocol):
    """An estimator that can start from the estimate of an earlier round.

    `NoiseTracker` calls ``estimate_from`` in every round in which it has an earlier estimate for
    each client, and ``estimate`` in the other rounds.
    """

    def estimate_from(self, updates: Matrix, start: NDArray[np.float64]) -> NoiseEstimate:
        """Estimate the noise energy of each column, starting from earlier energies.

        Args:
            updates: [p, n], one column for each client.
            start: [n] noise energies of an earlier round.

        Returns:
            The estimate for the n clients.
        """
        ...
