"""`Norm`: the column norms of the updates, the simplest estimate of their noise."""

from __future__ import annotations

from dataclasses import dataclass

from noisewise.noise.estimate import Matrix, NoiseEstimate
from noisewise.noise.matrix import as_array, check_finite, column_energy

__all__ = ["Norm"]


@dataclass(frozen=True)
class Norm:
    """sigma_i^2 = ||delta_i||^2: right when noise dwarfs the signal, as in most rounds with DP."""

    @property
    def name(self) -> str:
        """``norm``."""
        return "norm"

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        """Squared norm of each column of ``updates`` ([p, n])."""
        energy = column_energy(as_array(updates))
        check_finite(energy)
        return NoiseEstimate(variance=energy, method=self.name)
