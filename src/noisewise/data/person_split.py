"""Splits of records that keep the records of a person together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import positive_int
from noisewise.data.examples import Examples
from noisewise.errors import InvalidValueError

__all__ = ["SplitUnits", "with_made_up_persons"]


@dataclass(frozen=True, eq=False)
class SplitUnits:
    """What a split deals out: records, or persons with all of their records if they are known.

    Attributes:
        labels: [units], the class of a record, or of the first record of a person.
        owners: [N], the unit of each record; None if every record is a unit.
    """

    labels: NDArray[np.int64]
    owners: NDArray[np.int64] | None

    @classmethod
    def of(cls, records: Examples) -> SplitUnits:
        """The units of some records."""
        if records.persons is None:
            return cls(records.labels, None)
        _, first, owners = np.unique(records.persons, return_index=True, return_inverse=True)
        return cls(records.labels[first], owners.astype(np.int64))

    def records(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The increasing numbers of the records of some units."""
        if self.owners is None:
            return units
        chosen = np.zeros(len(self.labels), np.bool_)
        chosen[units] = True
        return np.flatnonzero(chosen[self.owners])


def with_made_up_persons(records: Examples, records_per_person: int) -> Examples:
    """The records with generated persons: each has the given number of consecutive records.

    Args:
        records: in an order that is public.
        records_per_person: the last person may have fewer.

    Raises:
        InvalidValueError: the persons of the records are known already.
    """
    size = positive_int("records_per_person", records_per_person)
    if records.persons is not None:
        allowed = "must be left out: these records already have persons"
        raise InvalidValueError("data.records_per_person", size, allowed)
    return replace(records, persons=np.arange(len(records)) // size)
