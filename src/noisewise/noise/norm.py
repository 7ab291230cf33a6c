"""`Norm`: the column norms of the updates, the simplest estimate of their noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from noisewise.noise.blocks import Updates
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.gram import column_energy
from noisewise.noise.sampling import SampleSize, check_sample, draw_rows

__all__ = ["Norm"]

_BUDGET = 10**10  # p n^2 above which a sample of the coordinates is read


@dataclass(frozen=True)
class Norm:
    """sigma_i^2 = ||delta_i||^2: right when noise dwarfs the signal, as in most rounds with DP.

    Attributes:
        sample: number of coordinates to read, None for all, or ``auto`` (see `draw_rows`).
        seed: of the sample; None draws another one, which nobody can foresee, at each estimate.
    """

    sample: SampleSize = "auto"
    seed: int | None = 0

    def __post_init__(self) -> None:
        check_sample(self.sample, self.seed)

    @property
    def name(self) -> str:
        """``norm``."""
        return "norm"

    @property
    def takes_blocks(self) -> Literal[True]:
        """See `StreamingEstimator`."""
        return True

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.unforeseen.Reseedable`."""
        return replace(self, seed=seed)

    def estimate(self, updates: Updates) -> NoiseEstimate:
        """Squared norm of each column of ``updates`` ([p, n])."""
        drawn = draw_rows(updates, self.sample, self.seed, _BUDGET, one_pass=True)
        energy, rows = column_energy(drawn.values)
        variance = energy * drawn.scale(rows)
        return NoiseEstimate(variance=variance, method=self.name, details={"rows": rows})
