"""The server's types: update matrix, view, disclosures, and the `Aggregator` protocol."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.errors import UpdateError
from noisewise.noise.estimate import NoiseEstimate

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
"""What an aggregator carries from round to round: named arrays, which a checkpoint can hold."""


class Disclosure(enum.Enum):
    """What a server has to be told about the clients, beyond their updates."""

    EPSILON = "epsilon"
    """The clients' privacy budgets, as they report them."""
    N_EXAMPLES = "n_examples"
    """The clients' numbers of training records."""
    TRUE_VARIANCE = "true_variance"
    """The closed-form noise of each update: more than any client should tell. Simulation only."""


@dataclass(frozen=True)
class UpdateMatrix:
    """What the server receives: one column for each client.

    Attributes:
        values: [p, n], finite.
        ids: the n clients, in the order of the columns.
    """

    values: Tensor
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(self.ids):
            shape = tuple(self.values.shape)
            raise UpdateError(f"updates of shape {shape} do not fit {len(self.ids)} client ids")
        if not self.ids:
            raise UpdateError("no update to aggregate: every client dropped out of the round")

    @property
    def n_clients(self) -> int:
        """Number of columns."""
        return len(self.ids)


@dataclass(frozen=True)
class ServerView:
    """Everything an aggregator may see in one round."""

    updates: UpdateMatrix
    round: int
    disclosed: Mapping[Disclosure, NDArray[np.float64]] = field(default_factory=dict)

    def told(self, what: Disclosure) -> NDArray[np.float64]:
        """The disclosed values [n], in the order of the columns.

        Raises:
            UpdateError: if the aggregator did not declare this need, or nobody can meet it.
        """
        if what not in self.disclosed:
            raise UpdateError(
                f"the server was not told {what.value}: an aggregator gets only what it declares "
                "in `needs`"
            )
        return self.disclosed[what]


@dataclass(frozen=True)
class Aggregation:
    """Result of one round at the server.

    Attributes:
        delta: [p] change of the global model.
        weights: [n] each >= 0, with sum 1, in the order of the columns.
        noise: the estimate that the weights rest on, where there is one; of the clients that were
            not refused, in order.
        state: for the next round.
        is_weighted_sum: whether delta is just sum_i w_i delta_i, so that the weights tell its
            noise; PFA's projection is more.
        refused: clients whose updates no honest client could have sent, and why; their weights
            are 0.
    """

    delta: Tensor
    weights: NDArray[np.float64]
    noise: NoiseEstimate | None = None
    state: State = field(default_factory=dict)
    is_weighted_sum: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Aggregator(Protocol):
    """What the server does. An own aggregator needs just these two members."""

    @property
    def needs(self) -> frozenset[Disclosure]:
        """What the server must be told; the view holds nothing else."""
        ...

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """Combine the round's updates. Must not change its arguments."""
        ...


def weighted_sum(
    values: Tensor, weights: NDArray[np.float64], *, block_rows: int = 1 << 18
) -> Tensor:
    """Compute sum_i w_i values[:, i] in float64, returned in the dtype of ``values``: [p].

    Row blocks bound the extra memory, whatever the model's size.
    """
    w = torch.from_numpy(np.asarray(weights, dtype=np.float64)).to(values.device)
    result = torch.empty(values.shape[0], dtype=values.dtype, device=values.device)
    for start in range(0, values.shape[0], block_rows):
        block = values[start : start + block_rows].double()
        result[start : start + block_rows] = (block * w).sum(dim=1).to(values.dtype)
    return result
