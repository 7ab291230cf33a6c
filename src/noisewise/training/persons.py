"""`Persons`: which records belong to whom, for budgets that protect a person and not a record.

The contribution of a person to a step is the mean gradient of at most `max_records` of their
records, chosen at random in every step, and bounded to c as one vector. Persons are Poisson
sampled. So all records of one person together change a sum by at most c, and the accounting is that
of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.data.person_ids import by_first_use
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.training.gradients import CLIP_MARGIN, GradientEngine, clip_bound, clip_factors
from noisewise.training.inputs import Inputs, select

__all__ = ["Persons", "add_person"]


@dataclass(frozen=True, eq=False)
class Persons:
    """The records of each person.

    Attributes:
        owners: [N], for each record the number of its person, from 0.
        records: [N] numbers of the records; those of one person are together and increase.
        starts: [P + 1]; person j has ``records[starts[j]:starts[j + 1]]``. Persons are in the order
            of their first records.

    Example:
        >>> persons = Persons.of(np.array([7, 3, 7]))
        >>> len(persons), persons.of_person(0).tolist(), persons.of_person(1).tolist()
        (2, [0, 2], [1])
    """

    owners: NDArray[np.int64]
    records: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, owners: NDArray[np.int64]) -> Persons:
        """Group records by person.

        Args:
            owners: [N], a whole number for each record; equal numbers are the same person.

        Raises:
            InvalidValueError: the array has another shape or type.
        """
        if owners.ndim != 1 or owners.dtype.kind not in "iu":
            form = f"{owners.dtype}{list(owners.shape)}"
            raise InvalidValueError("persons", form, "must be one whole number for each record")
        numbers = by_first_use(owners)
        starts = np.concatenate([[0], np.cumsum(np.bincount(numbers))]).astype(np.int64)
        return cls(numbers, np.argsort(numbers, kind="stable"), starts)

    def take(self, records: NDArray[Any] | slice) -> Persons:
        """The persons of some records: numbers, a mask or a slice."""
        return Persons.of(self.owners[records])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_person(self, person: int) -> NDArray[np.int64]:
        """The numbers of a person's records."""
        return self.records[self.starts[person] : self.starts[person + 1]]

    def sample(self, step: int, plan: LocalPlan, rng: RandomSource) -> Iterator[NDArray[np.int64]]:
        """Draw the persons of a step, and the records that each of them contributes.

        Every person is drawn with probability q, independently. Of a person with more than
        ``max_records`` records, each subset of that size has the same probability.

        Args:
            step: number of the step.
            plan: for persons.
            rng: draws persons and records.

        Yields:
            Increasing numbers of the records of each drawn person.
        """
        assert plan.max_records is not None
        for person in rng.poisson_sample(step, len(self), plan.sample_rate).tolist():
            records = self.of_person(person)
            if len(records) > plan.max_records:
                order = rng.record_order(step, person, len(records))
                records = np.sort(records[order[: plan.max_records]])
            yield records


def add_person(
    engine: GradientEngine,
    theta: Tensor,
    records: tuple[Inputs, Tensor],
    plan: LocalPlan,
    physical_batch: int,
    total: Tensor,
    scratch: Tensor,
) -> None:
    """Add the bounded mean gradient of one person's records to ``total``.

    Only this person's records and ``theta`` enter the computation before the vector is bounded, so
    the contribution depends on nothing else, bit for bit, and its norm is at most c whatever the
    rounding errors of the gradients are. A record whose gradient is NaN or infinite adds 0 to the
    mean.

    Args:
        engine: computes sums of gradients.
        theta: [p] parameters.
        records: inputs and targets of the person's records, at least one, in memory of their own.
        plan: its clipping norm and rule are used.
        physical_batch: number of records whose gradients are computed at once.
        total: [p] float64.
        scratch: [p] float64; its content is overwritten.
    """
    inputs, targets = records
    scratch.zero_()
    for start in range(0, len(targets), physical_batch):
        part = slice(start, start + physical_batch)
        engine.add_clipped_sum(theta, select(inputs, part), targets[part], None, scratch)
    scratch.div_(len(targets))
    bound = clip_bound(plan)
    limit = None if bound is None else bound * (1.0 - CLIP_MARGIN)
    factor = float(clip_factors(torch.dot(scratch, scratch)[None], limit))
    if factor > 0.0:  # 0 * nan would be nan
        total.add_(scratch, alpha=factor)
