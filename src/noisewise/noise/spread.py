"""How different the clients' true updates are: zeta^2, from two rounds in a row.

One round cannot tell: whatever a client's update has of its own, signal or noise, looks alike in a
Gram matrix. But noise is independent between rounds and data are not, so what a client's update has
in common with its own next update, beyond what it has in common with others' next updates, is
signal of its own.
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

_LARGEST = 1e300  # of a variance: an infinite one would become NaN where it is forgotten


@dataclass(frozen=True)
class SpreadEstimate:
    """What is known of the spread after a round.

    Attributes:
        value: zeta^2 >= 0, on the scale of ``||update||^2``: the energy of what a client's true
            update has of its own.
        error: its standard error, from noise alone.
        rounds: pairs of rounds that it rests on; 0 says that nothing is known yet. Pairs in which
            no noise is known (all updates zero, say) do not count.
    """

    value: float
    error: float
    rounds: float

    @property
    def certain(self) -> float:
        """What is left of zeta^2 two standard errors below: 0 where clients may well be alike."""
        return max(0.0, self.value - 2 * self.error)


@dataclass(frozen=True)
class SpreadTracker:
    """zeta^2 = mean_i <d_i^t, d_i^(t+1)> - mean_(i != j) <d_i^t, d_j^(t+1)>, smoothed over rounds.

    The products of noisy clients say little, so they are weighted by their precision: the noise of
    <d_i, d_j'> has variance v_i v_j / p. Only a sample of coordinates is kept between rounds.

    Attributes:
        memory: rounds over which estimates are averaged.
        coordinates: how many are kept, spread evenly over the update.
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
        """Learn from this round's updates and those of the round before.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            variance: [n] noise energy of each update.
            state: what the last call returned; empty at first. It is not modified.

        Returns:
            The estimate and the state for the next round.
        """
        p = updates.shape[0]
        kept = np.unique(np.linspace(0, p - 1, min(p, self.coordinates)).astype(np.int64))
        rows = updates[kept].double().cpu().numpy() * np.sqrt(p / len(kept))
        precision = precisions(variance)
        if "square" not in state:  # of an earlier version, or none
            state = {}
        value, square, count = (
            float(state[name][0]) if state else 0.0 for name in ("value", "square", "count")
        )
        before = [str(client) for client in state["ids"]] if state else []
        here = [i for i, client in enumerate(ids) if client in before]
        if state and len(here) > 1 and state["rows"].shape[0] == len(kept):
            there = [before.index(ids[i]) for i in here]
            products = state["rows"][:, there].T @ rows[:, here]
            learnt = _own_part(products, state["precision"][there], precision[here])
            if learnt is not None:
                fresh, uncertain = learnt
                count += 1
                share = 1 / min(count, self.memory)
                value += share * (fresh - value)
                square = (1 - share) ** 2 * square + share**2 * uncertain / len(kept)
        following = {
            "ids": np.array(list(ids), dtype=np.str_),
            "rows": rows,
            "precision": precision,
            "value": np.array([value]),
            "square": np.array([square]),
            "count": np.array([count]),
        }
        return SpreadEstimate(max(value, 0.0), float(np.sqrt(square)), count), following


def precisions(variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """1/v, and 0 for an update without noise, of which nothing is known."""
    return np.where(variance > 0, 1 / np.maximum(variance, 1e-300), 0.0)


def _own_part(
    products: NDArray[np.float64], before: NDArray[np.float64], now: NDArray[np.float64]
) -> tuple[float, float] | None:
    """Precision-weighted mean of the diagonal less that of the rest, and its variance times p.

    The noise of a product has the variance 1 / (p precision), so the weighted mean of some of them
    has 1 / (p sum of their precisions). ``before`` and ``now`` are the precisions [n] of the two
    rounds, a product has that of the one times that of the other. None where none is known.
    """
    tops = float(before.max(initial=0.0)), float(now.max(initial=0.0))
    if min(tops) == 0:
        return None
    weights = np.outer(before / tops[0], now / tops[1])  # so that no product overflows
    own = np.eye(len(products), dtype=bool)
    if not (np.any(weights[own]) and np.any(weights[~own])):
        return None
    difference = np.average(products[own], weights=weights[own]) - np.average(
        products[~own], weights=weights[~own]
    )
    with np.errstate(over="ignore"):
        uncertain = (1 / weights[own].sum() + 1 / weights[~own].sum()) / tops[0] / tops[1]
    return float(difference), min(float(uncertain), _LARGEST)
