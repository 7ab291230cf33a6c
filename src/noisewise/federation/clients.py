"""`Client`: one member of a simulated federation, its settings and its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from noisewise.checks import positive_number
from noisewise.data.datasets import Examples
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.training.local import TensorData

__all__ = ["Client", "make_clients", "to_tensors"]


@dataclass(frozen=True)
class Client:
    """One client of a simulation.

    Attributes:
        spec: what it plans with.
        data: its training and held-out records.
        reported_epsilon: what it tells a server that asks; None is the truth. Training and
            accounting never read it.
    """

    spec: ClientSpec
    data: ClientData
    reported_epsilon: float | None = None

    def __post_init__(self) -> None:
        if len(self.data.train) != self.spec.n_examples:
            raise InvalidValueError(
                f"client {self.spec.id}: n_examples",
                self.spec.n_examples,
                f"must be the number of its training records, {len(self.data.train)}",
            )
        if self.reported_epsilon is not None:
            positive_number(f"client {self.spec.id}: reported_epsilon", self.reported_epsilon)

    @property
    def told_epsilon(self) -> float:
        """The epsilon that a server hears of."""
        return self.spec.epsilon if self.reported_epsilon is None else self.reported_epsilon


def make_clients(
    specs: Sequence[ClientSpec],
    data: Sequence[ClientData],
    reported_epsilons: Mapping[str, float] | None = None,
) -> tuple[Client, ...]:
    """Join settings and records, in order; ``reported_epsilons`` by id for clients that lie."""
    if len(specs) != len(data):
        raise InvalidValueError("data", f"{len(data)} clients", f"must fit {len(specs)} specs")
    ids = [spec.id for spec in specs]
    if len(set(ids)) != len(ids):
        raise InvalidValueError("specs", ids, "must have an id of its own for each client")
    reported = dict(reported_epsilons or {})
    unknown = sorted(set(reported) - set(ids))
    if unknown:
        raise InvalidValueError("reported_epsilons", unknown, f"must be among {', '.join(ids)}")
    return tuple(Client(s, d, reported.get(s.id)) for s, d in zip(specs, data, strict=True))


def to_tensors(examples: Examples, device: torch.device | str = "cpu") -> TensorData:
    """Scaled records as tensors on a device."""
    inputs, targets = examples.arrays()
    return TensorData(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
