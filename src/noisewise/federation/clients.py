"""`Client`: one client of a simulated federation, with its settings and its records."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.checks import positive_number
from noisewise.data.examples import Arrays, Examples, count_units
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.text import short_repr
from noisewise.training.inputs import Inputs
from noisewise.training.local import TensorData
from noisewise.training.persons import Persons

__all__ = ["Client", "make_clients", "to_tensors"]


@dataclass(frozen=True, repr=False)
class Client:
    """One client of a simulation.

    Attributes:
        spec: settings that its plan is made from.
        data: its training and held-out records.
        reported_epsilon: what it reports to a server whose method needs epsilons; None reports
            the true value. Training and accounting never read it.

    Raises:
        InvalidValueError: the number of training records (or persons) is not that of the spec, or
            the reported epsilon is not positive.

    Example:
        >>> from noisewise.data import load_dataset, make_specs, split_dataset
        >>> records = split_dataset(load_dataset("digits"), 2, seed=0)
        >>> specs = make_specs(records, epsilons=[1.0, 4.0], batch_sizes=32, delta=1e-3)
        >>> Client(specs[1], records[1]).disclosed_epsilon
        4.0
    """

    spec: ClientSpec
    data: ClientData
    reported_epsilon: float | None = None

    def __repr__(self) -> str:
        """Its settings and the numbers of its records."""
        spec = self.spec
        return short_repr(
            self, id=spec.id, epsilon=spec.epsilon, delta=spec.delta, batch_size=spec.batch_size,
            train=len(self.data.train), test=len(self.data.test),
            reported_epsilon=self.reported_epsilon,
        )  # fmt: skip

    def __post_init__(self) -> None:
        units = count_units(self.data.train, self.spec.unit)
        if units != self.spec.n_examples:
            raise InvalidValueError(
                f"client {self.spec.id}: n_examples",
                self.spec.n_examples,
                f"must be the number of its training {self.spec.unit}s, {units}",
            )
        if self.reported_epsilon is not None:
            positive_number(f"client {self.spec.id}: reported_epsilon", self.reported_epsilon)

    @property
    def disclosed_epsilon(self) -> float:
        """The epsilon that a server receives if its method needs it."""
        return self.spec.epsilon if self.reported_epsilon is None else self.reported_epsilon


def make_clients(
    specs: Sequence[ClientSpec],
    data: Sequence[ClientData],
    reported_epsilons: Mapping[str, float] | None = None,
) -> tuple[Client, ...]:
    """Make clients from settings and records, in order.

    Args:
        specs: settings of the clients.
        data: their records, in the same order.
        reported_epsilons: by id, for clients that report another epsilon than their own.

    Raises:
        InvalidValueError: the numbers of specs and records differ, an id occurs twice or is
            unknown.

    Example:
        >>> from noisewise.data import ClientSpec, load_dataset, split_dataset
        >>> data = split_dataset(load_dataset("digits"), 2)
        >>> specs = [ClientSpec(f"site-{k}", len(part.train), 64, 2.0, 1e-5)
        ...          for k, part in enumerate(data)]
        >>> [client.spec.id for client in make_clients(specs, data)]
        ['site-0', 'site-1']
    """
    if len(specs) != len(data):
        raise InvalidValueError(
            "data", f"{len(data)} clients", f"must be {len(specs)}, as many as specs"
        )
    ids = [spec.id for spec in specs]
    if len(set(ids)) != len(ids):
        raise InvalidValueError("specs", ids, "must have a different id for each client")
    reported = dict(reported_epsilons or {})
    unknown = sorted(set(reported) - set(ids))
    if unknown:
        raise InvalidValueError("reported_epsilons", unknown, f"must be among {', '.join(ids)}")
    return tuple(Client(s, d, reported.get(s.id)) for s, d in zip(specs, data, strict=True))


def to_tensors(examples: Examples, device: torch.device | str = "cpu") -> TensorData:
    """Scaled records as tensors on a device.

    On the CPU, float32 inputs that need no scaling are not copied: the tensor shares their memory,
    possibly a read-only file, and must not be written.
    """
    inputs, targets = examples.inputs, examples.targets
    shared = isinstance(inputs, np.ndarray) and inputs.dtype == np.float32
    if examples.scaling is not None or not shared or not inputs.flags.c_contiguous:  # type: ignore[union-attr]
        inputs, targets = examples.arrays()
    persons = None if examples.persons is None else Persons.of(examples.persons)
    return TensorData(_tensors(inputs, device), _tensor(targets).to(device), persons)


def _tensors(inputs: Arrays, device: torch.device | str) -> Inputs:
    if isinstance(inputs, np.ndarray):
        return _tensor(inputs).to(device)
    if isinstance(inputs, Mapping):
        return {name: _tensor(array).to(device) for name, array in inputs.items()}
    return tuple(_tensor(array).to(device) for array in inputs)


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor view of an array, also of one in a file that is mapped read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)
