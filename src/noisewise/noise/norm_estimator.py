"""`Norm`: the simplest noise estimate, the squared norms of the updates."""

from __future__ import annotations

from dataclasses import dataclass

from noisewise.noise.blocks import Updates
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.gram import column_energy
from noisewise.noise.sampling import SampledEstimator, draw_rows

__all__ = ["Norm"]

_BUDGET = 10**10  # p n^2 above which only a sample of the coordinates is read


@dataclass(frozen=True)
class Norm(SampledEstimator):
    """sigma_i^2 = ||delta_i||^2: accurate if the noise is much larger than the signal.

    This holds in most rounds with differential privacy.

    Attributes:
        sample: see `SampledEstimator`.
        seed: see `SampledEstimator`.

    Example:
        >>> import numpy as np
        >>> Norm().estimate(np.array([[3.0, 0.0], [4.0, 2.0]])).variance.tolist()
        [25.0, 4.0]
    """

    @property
    def name(self) -> str:
        """``norm``."""
        return "norm"

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Compute the squared norm of each column.

        Args:
            updates: [p, n], or a source or iterator of row blocks.

        Returns:
            The estimate; its details hold the number of ``rows`` that were read.

        Raises:
            UpdateError: the updates are malformed, or have NaN or infinite values.
        """
        drawn = draw_rows(updates, self.sample, self.seed, _BUDGET, one_pass=True)
        energy, rows = column_energy(drawn.values)
        variance = energy * drawn.scale(rows)
        return NoiseEstimate(variance=variance, method=self.name, details={"rows": rows})
