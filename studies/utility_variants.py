"""Variants of the automatic steps and of the aggregation, for the study only.

They show what the shipped rule is worth, and what did not help; see `utility.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from noisewise.aggregation.auto_steps import AutoSteps
from noisewise.aggregation.base import Aggregation, Aggregator, ServerView, State
from noisewise.aggregation.disclosure import Disclosure

MOMENTUM = 0.9


class NoLimit(AutoSteps):
    """The rule without its limit for few rounds: steps of k sqrt(p / T), the last quarter."""

    def scaled(self, delta: Tensor) -> Tensor:
        """The update, scaled to the length of a step."""
        length = self.strength * (len(delta) / self.rounds) ** 0.5
        return delta * (length / torch.linalg.vector_norm(delta))

    def newest_share(self, round_number: int) -> float:
        """The average of the last quarter of the models."""
        return 1.0 / max(1, round_number - (self.rounds - self.rounds // 4))


class NoAverage(AutoSteps):
    """The rule without an average: the last model is released."""

    def newest_share(self, round_number: int) -> float:
        """The newest model alone."""
        return 1.0


@dataclass(frozen=True)
class Momentum(AutoSteps):
    """The rule with momentum: the steps follow the sum of past directions, each 0.9 of the next."""

    past: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def scaled(self, delta: Tensor) -> Tensor:
        """The running direction, scaled to the length of a step; called once a round."""
        direction = delta / torch.linalg.vector_norm(delta)
        if self.past:
            direction = direction + MOMENTUM * self.past.pop()
        self.past.append(direction)
        return super().scaled(direction)


VARIANTS: dict[str, Callable[[int], AutoSteps]] = {
    "no limit": NoLimit, "no average": NoAverage, "momentum": Momentum,
}  # fmt: skip


@dataclass(frozen=True)
class Extrapolated:
    """An aggregator whose step is as long as the updates disagree, in the spirit of DP-FedEXP.

    With updates d_i, their noise energies s_i (estimated) and weights w_i, the aggregate D is
    multiplied by max(1, sum_i w_i (||d_i||^2 - s_i) / ||D||^2) (compare LDP-FedEXP, arXiv
    2504.09850, which has equal weights and known noise).
    """

    inner: Aggregator

    @property
    def needs(self) -> frozenset[Disclosure]:
        """Those of the aggregator itself."""
        return self.inner.needs

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """Combine the updates, then extend the step."""
        given = self.inner.aggregate(view, state)
        if given.noise is None:
            raise ValueError("extrapolation needs an aggregator that estimates the noise")
        energy = (view.updates.values.double() ** 2).sum(0).numpy() - given.noise.variance
        factor = float(given.weights @ energy) / float((given.delta.double() ** 2).sum())
        return replace(given, delta=given.delta * max(1.0, factor))
