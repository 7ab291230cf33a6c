"""`ServerOptimiser`: how the server applies the aggregated update D to the model.

momentum (FedAvgM, Hsu et al. 2019):
    m <- b1 m + D; the model moves by r m.
fedadam (Reddi et al. 2021):
    m <- b1 m + (1 - b1) D, v <- b2 v + (1 - b2) D^2; the model moves by r m / (sqrt(v) + tau).
fedyogi (Reddi et al. 2021):
    as fedadam, with v <- v - (1 - b2) D^2 sign(v - D^2).

All are post-processing of noised updates: they disclose nothing and cost no privacy. v starts at
tau^2. The vectors m and v are part of the run's state, so a resumed run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import positive_number
from noisewise.errors import InvalidValueError

__all__ = ["SERVER_OPTIMISERS", "STATE_PREFIX", "ServerOptimiser"]

STATE_PREFIX = "optimiser."
"""Start of the names of m and v in a run's state."""

Vectors = Mapping[str, NDArray[Any]]

SecondMoment = Callable[[NDArray[Any], NDArray[Any], float], NDArray[Any]]
"""(v, D^2, b2) -> the next v."""


def _adam(v: NDArray[Any], square: NDArray[Any], beta2: float) -> NDArray[Any]:
    return beta2 * v + (1 - beta2) * square


def _yogi(v: NDArray[Any], square: NDArray[Any], beta2: float) -> NDArray[Any]:
    after: NDArray[Any] = v - (1 - beta2) * square * np.sign(v - square)
    return after


_SECOND_MOMENTS: Mapping[str, SecondMoment | None] = {
    "momentum": None,
    "fedadam": _adam,
    "fedyogi": _yogi,
}
SERVER_OPTIMISERS = tuple(_SECOND_MOMENTS)


@dataclass(frozen=True)
class ServerOptimiser:
    """The server's optimiser; see the module for the formulas.

    Attributes:
        name: "momentum", "fedadam" or "fedyogi".
        rate: r, the server's learning rate.
        beta1: b1, in [0, 1).
        beta2: b2, in [0, 1).
        tau: least denominator of "fedadam" and "fedyogi"; the larger, the less adaptive.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> moved, state = ServerOptimiser("momentum", beta1=0.5).step(np.ones(2), {})
        >>> ServerOptimiser("momentum", beta1=0.5).step(np.ones(2), state)[0]
        array([1.5, 1.5])
    """

    name: str
    rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in SERVER_OPTIMISERS:
            allowed = "must be one of " + ", ".join(SERVER_OPTIMISERS)
            raise InvalidValueError("server_optimiser.name", self.name, allowed)
        positive_number("server_optimiser.rate", self.rate)
        positive_number("server_optimiser.tau", self.tau)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise InvalidValueError(f"server_optimiser.{name}", value, "must be in [0, 1)")

    def step(
        self, delta: NDArray[np.float64], state: Vectors
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[Any]]]:
        """The change of the model, and the state for the next round.

        Args:
            delta: D [p].
            state: m and v [p] under `STATE_PREFIX`; empty in the first round.
        """
        m = state.get(f"{STATE_PREFIX}m", np.zeros_like(delta))
        second = _SECOND_MOMENTS[self.name]
        if second is None:
            m = self.beta1 * m + delta
            return self.rate * m, {f"{STATE_PREFIX}m": m}
        v = state.get(f"{STATE_PREFIX}v", np.full_like(delta, self.tau**2))
        m, square = self.beta1 * m + (1 - self.beta1) * delta, delta**2
        v = second(v, square, self.beta2)
        change = self.rate * m / (np.sqrt(v) + self.tau)
        return change, {f"{STATE_PREFIX}m": m, f"{STATE_PREFIX}v": v}
