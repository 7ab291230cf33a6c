"""Robust-HDP: weights from the noise that the server estimates itself (the paper's Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, weighted_sum
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator, NoiseEstimate
from noisewise.noise.pcp import PCP

__all__ = ["RobustHDP"]


@dataclass(frozen=True)
class RobustHDP:
    """w_i ~ 1 / sigma_i^2 with sigma_i^2 estimated from the updates alone.

    Args:
        estimator: anything with `estimate(updates) -> NoiseEstimate`; the paper's is `PCP`.
        estimate: ``"every"`` round as in Algorithm 1, or the ``"first"`` round in which a client
            takes part, as the authors' code does.
    """

    estimator: Estimator = field(default_factory=PCP)
    estimate: Literal["every", "first"] = "every"

    def __post_init__(self) -> None:
        if self.estimate not in ("every", "first"):
            raise InvalidValueError("estimate", self.estimate, 'must be "every" or "first"')
        if not isinstance(self.estimator, Estimator):
            raise InvalidValueError(
                "estimator", self.estimator, "must have a name and estimate(updates)"
            )

    @property
    def needs(self) -> frozenset[Disclosure]:
        """Nothing: the paper's central claim."""
        return frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        noise, state = self._noise(view, state)
        weights = inverse_variance_weights(_usable(view, noise.variance))
        return Aggregation(weighted_sum(view.updates.values, weights), weights, noise, state)

    def _noise(self, view: ServerView, state: State) -> tuple[NoiseEstimate, State]:
        """The round's estimate, or the remembered one where every client has one already."""
        ids = view.updates.ids
        known = dict(zip(state.get("ids", ()), state.get("variance", ()), strict=True))
        if self.estimate == "first" and all(client in known for client in ids):
            variance = np.array([known[client] for client in ids], dtype=np.float64)
            return NoiseEstimate(variance, self.estimator.name, True, {"remembered": True}), state
        noise = self.estimator.estimate(view.updates.values)
        if self.estimate == "every":
            return noise, state
        merged = dict(zip(ids, noise.variance, strict=True)) | known  # the first estimate stays
        remembered = NoiseEstimate(
            np.array([merged[client] for client in ids], dtype=np.float64),
            noise.method,
            noise.converged,
            noise.details,
        )
        return remembered, {
            "ids": np.array(list(merged), dtype=np.str_),
            "variance": np.array(list(merged.values()), dtype=np.float64),
        }


def _usable(view: ServerView, variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Variances to weight by: an all-zero update carries nothing and gets no weight.

    A client that adds noise cannot send zeros, so this is a fault or an attack, and the inverse of
    its estimated variance 0 would take the whole round.
    """
    empty = ~(view.updates.values != 0).any(dim=0).cpu().numpy()
    return variance if empty.all() else np.where(empty, np.inf, variance)
