"""Whose record each one is at a site, and which held-out record of each person is scored.

Each value is read by itself: a value that names nobody (blank, a fraction, not finite) removes its
own record and no other one (docs/privacy.md, guarantees 16 and 17).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.data.person_ids import NOBODY, PersonNumbers, by_first_use
from noisewise.errors import InvalidValueError
from noisewise.randomness import RandomSource
from noisewise.training.inputs import select
from noisewise.training.local import TensorData

__all__ = ["one_record_each", "read_persons"]

_LARGEST = 2.0**53  # up to here, float64 has all whole numbers


def read_persons(values: object, field: str) -> NDArray[np.int64]:
    """Number the persons of records, in the order of their first use.

    Whole numbers of a float type name a person too: a single missing value in a column of whole
    numbers makes programs store all of them as floats.

    Args:
        values: an array [N] of numbers or text, or a list of such values.
        field: where they come from, for messages.

    Returns:
        [N], equal for records of the same person; `NOBODY` where a value names nobody.

    Raises:
        InvalidValueError: the array has another shape or type, whatever its values are.

    Example:
        >>> read_persons(np.array([8.0, 3.0, 8.0, 0.5, np.nan]), "persons").tolist()
        [0, 1, 0, -1, -1]
    """
    if not isinstance(values, (list, tuple)):
        array = np.asarray(values)
        if values is None or array.ndim != 1 or array.dtype.kind not in "iufSUTO":
            form = f"{array.dtype}{list(array.shape)}"
            allowed = "must be whole numbers or text, one for each record"
            raise InvalidValueError(field, form, allowed)
        if array.dtype.kind in "iu":
            return by_first_use(array)
        if array.dtype.kind == "f":
            return _whole_floats(array)
        values = list(array)
    persons = PersonNumbers()
    return np.array([persons.number(_without_float(value)) for value in values], dtype=np.int64)


def _whole_floats(values: NDArray[Any]) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):
        whole = (np.abs(values) <= _LARGEST) & (values == np.floor(values))
    numbers = np.full(len(values), NOBODY, np.int64)
    numbers[whole] = by_first_use(values[whole])
    return numbers


def _without_float(value: object) -> object:
    """A whole number instead of a float without a fraction."""
    if isinstance(value, (float, np.floating)):
        number = float(value)
        whole = math.isfinite(number) and number == math.floor(number) and abs(number) <= _LARGEST
        return int(number) if whole else None
    return value


def one_record_each(data: TensorData, rng: RandomSource) -> TensorData:
    """One record of each person, each of their records with the same probability.

    All records of one person together then change a sum over the result by at most what one record
    can add to it. The choice for a person depends on no other person.

    Args:
        data: records with their persons.
        rng: draws the record of each person.
    """
    persons = data.persons
    if persons is None:
        raise InvalidValueError("data.persons", None, "must be given: the plan protects persons")
    chosen = np.zeros(len(persons), np.int64)
    for person in range(len(persons)):
        records = persons.of_person(person)
        chosen[person] = records[rng.record_order(0, person, len(records))[0]]
    index = torch.from_numpy(chosen)
    return TensorData(
        select(data.inputs, index), data.targets.index_select(0, index), persons.take(chosen)
    )
