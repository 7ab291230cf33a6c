"""`SpreadTracker`: estimates zeta^2, how much the clients' true updates differ.

The Gram matrix of one round cannot separate a client's noise from signal that only this client has.
But noise is independent between rounds, and a client's data stay the same. What an update has in
common with the same client's next update, beyond what it has in common with the other clients' next
updates, is therefore signal that only this client has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.checks import positive_int

__all__ = ["SpreadEstimate", "SpreadTracker", "precisions"]

State = Mapping[str, NDArray[Any]]

_LARGEST = 1e300  # upper limit of a variance: 0 times an infinite one would be NaN


@dataclass(frozen=True)
class SpreadEstimate:
    """The estimated spread after a round.

    Attributes:
        value: zeta^2 >= 0, on the scale of ``||update||^2``: the energy of the signal that only one
            client has.
        error: standard error of zeta^2 that is due to noise.
        rounds: number of pairs of consecutive rounds in the estimate; 0 if there is no estimate
            yet. A pair does not count if its noise is unknown, for example because all updates are
            zero.
    """

    value: float
    error: float
    rounds: float

    @property
    def certain(self) -> float:
        """zeta^2 minus two standard errors, at least 0: 0 if the clients may have equal signals."""
        return max(0.0, self.value - 2 * self.error)


@dataclass(frozen=True)
class SpreadTracker:
    """zeta^2 = mean_i <d_i^t, d_i^(t+1)> - mean_(i != j) <d_i^t, d_j^(t+1)>, smoothed over rounds.

    The means are weighted by precision: the noise of <d_i^t, d_j^(t+1)> has the variance
    v_i v_j / p. Only a sample of the coordinates is kept between rounds.

    Attributes:
        memory: number of rounds over which estimates are averaged.
        coordinates: number of coordinates that are kept, evenly spaced over the update.
    """

    memory: int = 20
    coordinates: int = 8192

    def __post_init__(self) -> None:
        positive_int("memory", self.memory)
        positive_int("coordinates", self.coordinates)

    def estimate(
        self,
        updates: Tensor,
        ids: Sequence[str],
        variance: NDArray[np.float64],
        state: State,
    ) -> tuple[SpreadEstimate, State]:
        """Update the estimate from this round's updates and the kept part of the last round's.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            variance: [n] noise energy of each update.
            state: the state that the previous call returned, or empty. It is not modified. A state
                without ``square`` (written by an old version) counts as empty.

        Returns:
            The estimate and the state for the next round.
        """
        p = updates.shape[0]
        coordinates = np.unique(np.linspace(0, p - 1, min(p, self.coordinates)).astype(np.int64))
        rows = updates[coordinates].double().cpu().numpy() * np.sqrt(p / len(coordinates))
        precision = precisions(variance)
        if "square" not in state:
            state = {}
        value, square, count = (
            float(state[name][0]) if state else 0.0 for name in ("value", "square", "count")
        )
        last_ids = [str(client) for client in state["ids"]] if state else []
        columns = [i for i, client in enumerate(ids) if client in last_ids]
        if state and len(columns) > 1 and state["rows"].shape[0] == len(coordinates):
            last_columns = [last_ids.index(ids[i]) for i in columns]
            products = state["rows"][:, last_columns].T @ rows[:, columns]
            observed = _own_part(products, state["precision"][last_columns], precision[columns])
            if observed is not None:
                difference, variance_times_p = observed
                count += 1
                share = 1 / min(count, self.memory)
                value += share * (difference - value)
                square = (1 - share) ** 2 * square + share**2 * variance_times_p / len(coordinates)
        next_state = {
            "ids": np.array(list(ids), dtype=np.str_),
            "rows": rows,
            "precision": precision,
            "value": np.array([value]),
            "square": np.array([square]),
            "count": np.array([count]),
        }
        return SpreadEstimate(max(value, 0.0), float(np.sqrt(square)), count), next_state


def precisions(variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / variance ([n]), and 0 where the variance is 0, which means unknown."""
    return np.where(variance > 0, 1 / np.maximum(variance, 1e-300), 0.0)


def _own_part(
    products: NDArray[np.float64], before: NDArray[np.float64], now: NDArray[np.float64]
) -> tuple[float, float] | None:
    """Compare each client's product with its own next update with its products with the others.

    The noise of a product has the variance 1 / (p times its precision), so the precision-weighted
    mean of several products has the variance 1 / (p times the sum of their precisions).

    Args:
        products: [n, n], last round's updates (rows) times this round's (columns).
        before: [n] precisions of the last round's updates; a product has the precision
            before_i now_j.
        now: [n] precisions of this round's updates.

    Returns:
        The weighted mean of the diagonal minus that of the other products, and its variance times
        p; None if the precisions of one of the two are all 0.
    """
    largest = float(before.max(initial=0.0)), float(now.max(initial=0.0))
    if min(largest) == 0:
        return None
    weights = np.outer(before / largest[0], now / largest[1])  # scaled: products cannot overflow
    same_client = np.eye(len(products), dtype=bool)
    if not (np.any(weights[same_client]) and np.any(weights[~same_client])):
        return None
    difference = np.average(products[same_client], weights=weights[same_client]) - np.average(
        products[~same_client], weights=weights[~same_client]
    )
    with np.errstate(over="ignore"):
        scaled_variance = (
            (1 / weights[same_client].sum() + 1 / weights[~same_client].sum())
            / largest[0]
            / largest[1]
        )
    return float(difference), min(float(scaled_variance), _LARGEST)
