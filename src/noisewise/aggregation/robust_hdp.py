"""Robust-HDP: weights from the noise that the server estimates (the paper's Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State
from noisewise.aggregation.guard import Guard, Weighed, guarded_sum
from noisewise.aggregation.weights import inverse_variance_weights, without_empty
from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator
from noisewise.noise.pcp_estimator import PCP
from noisewise.noise.reseeding import reseeded
from noisewise.noise.smoothing import NoiseTracker

__all__ = ["RobustHDP"]


@dataclass(frozen=True)
class RobustHDP:
    """w_i ~ 1 / sigma_i^2, where sigma_i^2 is estimated from the updates only.

    Args:
        estimator: any `Estimator`; the paper uses `PCP`.
        estimate: when to estimate: in ``"every"`` round, as in Algorithm 1; in every k-th round,
            given k; or in the ``"first"`` round in which a client takes part, as in the authors'
            code.
        smooth: number of rounds over which a client's estimates are averaged (see `NoiseTracker`);
            1, as in the paper, for no averaging.
        guard: screening and bounds against hostile clients; None for the paper's method.
    """

    estimator: Estimator = field(default_factory=PCP)
    estimate: int | Literal["every", "first"] = "every"
    smooth: int = 1
    guard: Guard | None = None

    def __post_init__(self) -> None:
        if self.estimate not in ("every", "first"):
            try:
                positive_int("estimate", self.estimate)
            except InvalidValueError:
                allowed = 'must be "every", "first" or a whole number >= 1'
                raise InvalidValueError("estimate", self.estimate, allowed) from None
        positive_int("smooth", self.smooth)
        if not isinstance(self.estimator, Estimator):
            raise InvalidValueError(
                "estimator", self.estimator, "must have a name and estimate(updates)"
            )

    @property
    def needs(self) -> frozenset[Disclosure]:
        """Nothing: the paper's central claim."""
        return frozenset()

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.reseeding.Reseedable`."""
        return replace(self, estimator=reseeded(self.estimator, seed, "estimator"))

    def with_guard(self, guard: Guard) -> Self:
        """See `Guardable`."""
        return replace(self, guard=guard)

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        every = 1 if self.estimate == "every" else self.estimate
        tracker = NoiseTracker(self.estimator, every=every, memory=self.smooth)

        def weigh(values: Tensor, ids: tuple[str, ...], cap: float) -> Weighed:
            noise, next_state = tracker.estimate(values, ids, state)
            empty = ~(values != 0).any(dim=0).cpu().numpy()
            variance = noise.variance if self.guard is None else self.guard.variance(noise.variance)
            weights = inverse_variance_weights(without_empty(variance, empty), cap=cap)
            return Weighed(weights, noise, next_state)

        return guarded_sum(view, self.guard, weigh, state)
