"""`NoiseEstimate` and the `Estimator` protocol: what every noise estimator returns and offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Estimator", "Matrix", "NoiseEstimate"]

Matrix = torch.Tensor | NDArray[np.floating[Any]]


@dataclass(frozen=True)
class NoiseEstimate:
    """How noisy each client's update is.

    Attributes:
        variance: [n] float64, the total energy E||noise_i||^2 of each update, summed over its
            coordinates (the paper's sigma_i^2, eq. sigma_i^2).
        method: name of the estimator.
        converged: whether the numbers may be trusted; False comes with a reason in ``details``.
        details: residuals, iterations, rank and the like, for reports.
    """

    variance: NDArray[np.float64]
    method: str
    converged: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Estimator(Protocol):
    """Turns an update matrix into a noise estimate. An own one needs just these two members."""

    @property
    def name(self) -> str:
        """Short name, as in configs and tables."""
        ...

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        """Estimate the noise energy of each column of ``updates`` ([p, n])."""
        ...
