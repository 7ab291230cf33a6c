"""Types of the server: update matrix, the server's view, the `Aggregator` protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.disclosure import Disclosure
from noisewise.errors import UpdateError
from noisewise.noise.estimate import NoiseEstimate
from noisewise.text import array_text, short_repr

__all__ = [
    "Aggregation",
    "Aggregator",
    "Disclosure",
    "ServerView",
    "State",
    "UpdateMatrix",
    "weighted_sum",
]

State = Mapping[str, NDArray[np.float64] | NDArray[np.str_]]
"""What an aggregator keeps from round to round: named arrays, which checkpoints store."""


@dataclass(frozen=True, repr=False)
class UpdateMatrix:
    """The updates that the server received in a round, one column for each client.

    Attributes:
        values: [p, n], finite.
        ids: the n client ids, in the order of the columns.

    Raises:
        UpdateError: the shape does not match the ids, or there is no update.
    """

    values: Tensor
    ids: tuple[str, ...]

    def __repr__(self) -> str:
        """Its shape and the clients, not the numbers."""
        return short_repr(self, values=array_text(self.values), ids=self.ids)

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(self.ids):
            shape = tuple(self.values.shape)
            raise UpdateError(
                f"updates has shape {shape} and there are {len(self.ids)} client ids: must be "
                "[p, n] with one id for each column"
            )
        if not self.ids:
            raise UpdateError("no update to aggregate: every client dropped out of the round")

    @property
    def n_clients(self) -> int:
        """n, the number of columns."""
        return len(self.ids)


@dataclass(frozen=True, repr=False)
class ServerView:
    """Everything that an aggregator sees in one round.

    Attributes:
        updates: the round's updates.
        round: number of the round, from 1.
        disclosed: [n] values of each disclosure in the aggregator's `needs`, in the order of the
            columns.
    """

    updates: UpdateMatrix
    round: int
    disclosed: Mapping[Disclosure, NDArray[np.float64]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The round, the updates' shape and what was disclosed."""
        disclosed = [what.value for what in self.disclosed]
        return short_repr(
            self, round=self.round, updates=array_text(self.updates.values), disclosed=disclosed
        )

    def disclosure(self, what: Disclosure) -> NDArray[np.float64]:
        """Return the disclosed values [n], in the order of the columns.

        Raises:
            UpdateError: the view does not have them, because the aggregator does not declare them
                in `needs`.
        """
        if what not in self.disclosed:
            raise UpdateError(
                f"the server does not know {what.value}: an aggregator receives only the "
                "disclosures that it declares in `needs`"
            )
        return self.disclosed[what]


@dataclass(frozen=True, repr=False)
class Aggregation:
    """The result of one round at the server.

    Attributes:
        delta: [p] change of the global model.
        weights: [n] each >= 0, with sum 1, in the order of the columns.
        noise: the noise estimate that the weights were computed from, or None; for the clients that
            were not refused, in order.
        state: the aggregator's state for the next round.
        is_weighted_sum: whether delta is sum_i w_i delta_i, so that its noise follows from the
            weights. False for PFA, which also projects updates.
        refused: the reason for each client whose update cannot come from an honest client; their
            weights are 0.
    """

    delta: Tensor
    weights: NDArray[np.float64]
    noise: NoiseEstimate | None = None
    state: State = field(default_factory=dict)
    is_weighted_sum: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Shapes and the largest weight."""
        largest = float(self.weights.max()) if len(self.weights) else None
        return short_repr(
            self, delta=array_text(self.delta), weights=array_text(self.weights),
            largest_weight=largest, refused=len(self.refused) or None,
        )  # fmt: skip


@runtime_checkable
class Aggregator(Protocol):
    """Combines the updates of a round. Your own aggregator needs only these two members."""

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The disclosures that the aggregator needs; the view holds no others."""
        ...

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """Combine the updates of a round. The arguments must not be modified.

        Args:
            view: the updates, and the disclosures of `needs`.
            state: the state that the previous round returned; empty in the first round.

        Returns:
            The change of the model, the weights, and the state for the next round.
        """
        ...


def weighted_sum(
    values: Tensor, weights: NDArray[np.float64], *, block_rows: int = 1 << 18
) -> Tensor:
    """Compute sum_i w_i values[:, i] in float64.

    The sum is computed in row blocks, so the extra memory does not grow with the model.

    Args:
        values: [p, n].
        weights: [n].
        block_rows: number of rows of a block.

    Returns:
        [p], in the dtype of ``values``.
    """
    w = torch.from_numpy(np.asarray(weights, dtype=np.float64)).to(values.device)
    result = torch.empty(values.shape[0], dtype=values.dtype, device=values.device)
    for start in range(0, values.shape[0], block_rows):
        block = values[start : start + block_rows].double()
        result[start : start + block_rows] = (block * w).sum(dim=1).to(values.dtype)
    return result
