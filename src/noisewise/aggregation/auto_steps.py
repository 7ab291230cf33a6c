"""`AutoSteps`: server steps of one length, so that no learning rate has to be chosen.

In a private round, most of the aggregated update D is noise: ||D|| is about s sqrt(p), where s is
the standard deviation of the noise of each of the p parameters. A step of the length
k sqrt(p / T) in each of T rounds therefore multiplies D by k / (s sqrt(T)). After T rounds, the
noise of each parameter has a standard deviation of about k, and so has the noise of each output of
a linear head for a record of norm 1, whatever the clients' budgets and the number of parameters
are. The server needs no estimate of s, and no client can change the length of the step.

The last quarter of the models is averaged, which removes most of the noise of the last rounds; of
few rounds, at least `AVERAGED` models or half of them.

In a short run, such steps are too long: an update has less noise, because the budget is spent in
few rounds, and one step can saturate the softmax of most records, whose later gradients then say
little. For a record of norm 1, the length bounds by how much an output can change, whatever p is.
It is therefore at most `LONGEST` (T + 1) up to `GROWING` rounds, and from there on T / `GROWING`
times as much, so that long runs of large heads have no limit in practice.

All of this is post-processing: it discloses nothing and costs no privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Final

import torch
from torch import Tensor

from noisewise.checks import positive_int, positive_number
from noisewise.privacy.plan import LocalPlan

__all__ = ["AUTO", "AutoSteps", "auto_local_rate"]

AUTO: Final = "auto"
"""The learning rate in configs that selects `AutoSteps`."""

STRENGTH = 1.2
"""k: chosen on MNIST with the populations Dist1 to Dist3 (docs/utility.md)."""

LONGEST = 2.0
"""The largest length of a step, for each round of the run and one more (docs/utility.md)."""

GROWING = 20
"""The number of rounds from which the largest length grows with the square of the rounds."""

AVERAGED = 5
"""The number of models that are averaged at least, or half of them if there are fewer."""


@dataclass(frozen=True)
class AutoSteps:
    """The server's steps and the average that it releases, for features of norm 1.

    Attributes:
        rounds: T, number of rounds of the run.
        strength: k, standard deviation of an output's noise after all rounds.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> step = AutoSteps(rounds=100, strength=1.2)
        >>> round(float(torch.linalg.vector_norm(step.scaled(torch.ones(400)))), 6)
        2.4
    """

    rounds: int
    strength: float = STRENGTH

    def __post_init__(self) -> None:
        positive_int("rounds", self.rounds)
        positive_number("strength", self.strength)

    @property
    def longest(self) -> float:
        """The largest length of a step, whatever the number of parameters is."""
        return LONGEST * (self.rounds + 1) * max(1.0, self.rounds / GROWING)

    def scaled(self, delta: Tensor) -> Tensor:
        """The aggregated update [p], scaled to the length of a step; zeros stay zeros."""
        # Divided by its largest value first, otherwise the norm of large values would overflow.
        largest = delta.abs().max()
        if not bool(largest > 0):
            return torch.zeros_like(delta)
        direction = delta.double() / largest.double()
        length = min(self.strength * (len(delta) / self.rounds) ** 0.5, self.longest)
        return direction.mul_(length / torch.linalg.vector_norm(direction)).to(delta)

    def newest_share(self, round_number: int) -> float:
        """The weight of the newest model in the released average; 1 releases the newest alone."""
        averaged = max(self.rounds // 4, min((self.rounds + 1) // 2, AVERAGED))
        first = self.rounds - averaged
        return 1.0 / max(1, round_number - first)


def auto_local_rate(plans: Sequence[LocalPlan]) -> float:
    """The clients' learning rate under `AutoSteps`: all steps of a round together count as one.

    The server sets the length of its step whatever this rate is. A small rate keeps the clients'
    local models close to the global model.

    Args:
        plans: the plans that the federation permits, or those of all clients.
    """
    return 1.0 / median_high(plan.steps_per_round for plan in plans)
