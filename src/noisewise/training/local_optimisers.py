"""`LocalOptimiser`: how a client moves its parameters by the noised gradients of a round.

All are post-processing of the noised sums, so accounting does not change. The state starts anew in
every round: a client keeps nothing between rounds.

With the noised mean gradient g, whose noise has the energy e = (c z / b)^2 p:

sgd: theta - eta g. Noise energy of an update: steps * eta^2 e.
momentum: m <- beta m + g, theta - eta m. sum over s of ((1 - beta^s) / (1 - beta))^2 * eta^2 e.
adam: Kingma and Ba 2015, on g. There is no closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.checks import positive_number
from noisewise.errors import InvalidValueError

__all__ = ["LOCAL_OPTIMISERS", "SGD", "LocalOptimiser", "LocalSteps"]

LOCAL_OPTIMISERS = ("sgd", "momentum", "adam")


@dataclass(frozen=True)
class LocalOptimiser:
    """A client's optimiser.

    Attributes:
        name: "sgd", "momentum" or "adam".
        beta1: of "momentum" and "adam", in [0, 1).
        beta2: of "adam", in [0, 1).
        tau: of "adam", added to the denominator.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> LocalOptimiser("momentum", beta1=0.5).noise_steps(2)
        3.25
    """

    name: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    tau: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in LOCAL_OPTIMISERS:
            allowed = "must be one of " + ", ".join(LOCAL_OPTIMISERS)
            raise InvalidValueError("local_optimiser.name", self.name, allowed)
        positive_number("local_optimiser.tau", self.tau)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise InvalidValueError(f"local_optimiser.{name}", value, "must be in [0, 1)")

    @property
    def is_sgd(self) -> bool:
        """Whether it is plain SGD, which the closed form of heads covers."""
        return self.name == "sgd"

    def noise_steps(self, steps: int) -> float | None:
        """Noise energy of an update in units of one SGD step's; None without a closed form.

        With momentum, the gradient of the s-th last step enters the update (1 - beta^s) / (1 -
        beta) times. The noises of the steps are independent, so their energies add up.
        """
        if self.name == "adam":
            return None
        if self.is_sgd:
            return float(steps)
        beta = self.beta1
        return sum(((1 - beta**s) / (1 - beta)) ** 2 for s in range(1, steps + 1))


SGD = LocalOptimiser()


class LocalSteps:
    """The optimiser's state in one round.

    Args:
        optimiser: which one.
        size: p.
        device: of the vectors.
    """

    def __init__(self, optimiser: LocalOptimiser, size: int, device: torch.device) -> None:
        self._optimiser, self._number = optimiser, 0
        self._first = torch.zeros(size, dtype=torch.float64, device=device)
        self._second = torch.zeros_like(self._first) if optimiser.name == "adam" else None

    def step(self, point: Tensor, gradient: Tensor, rate: float) -> None:
        """Move ``point`` [p] in place by the noised mean gradient [p] (both in float64)."""
        optimiser, first, second = self._optimiser, self._first, self._second
        self._number += 1
        if second is None:
            first.mul_(optimiser.beta1).add_(gradient)
            point.add_(first, alpha=-rate)
            return
        first.mul_(optimiser.beta1).add_(gradient, alpha=1 - optimiser.beta1)
        second.mul_(optimiser.beta2).addcmul_(gradient, gradient, value=1 - optimiser.beta2)
        mean = first / (1 - optimiser.beta1**self._number)
        scale = (second / (1 - optimiser.beta2**self._number)).sqrt_().add_(optimiser.tau)
        point.addcdiv_(mean, scale, value=-rate)
