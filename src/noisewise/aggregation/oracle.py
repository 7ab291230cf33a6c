"""The oracle: inverse-variance weights from the true noise, which no real server knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, weighted_sum
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.noise.estimate import NoiseEstimate

__all__ = ["Oracle"]


@dataclass(frozen=True)
class Oracle:
    """w_i ~ 1 / sigma_i^2 with the closed-form sigma_i^2, the solution of the paper's eq. w_opt.

    For comparison in simulations: it has the least noise that any weights can reach.
    """

    reads_all_coordinates: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The true noise energy of each update."""
        return frozenset({Disclosure.TRUE_VARIANCE})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        variance = view.disclosure(Disclosure.TRUE_VARIANCE)
        weights = inverse_variance_weights(variance)
        delta = weighted_sum(view.updates.values, weights)
        return Aggregation(delta, weights, NoiseEstimate(variance, "oracle"), state)
