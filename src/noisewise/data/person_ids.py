"""Whose record each record is: from a column or an array to one whole number for each record."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError

__all__ = ["NOBODY", "PersonNumbers", "by_first_use", "first_blank", "number_persons", "person_key"]

NOBODY = -1
"""The number of a record whose person is blank or cannot be read."""

_FORM = "must be whole numbers or text [N], one for each record, not continuous values"


_DECIMAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_MISSING = {"nan", "none", "null", "na", "n/a", "<na>", "nat"}


def person_key(value: object) -> str:
    """The text that identifies a person; empty if the value is blank.

    Whole numbers and text are compared as text, without blanks around it: 7 and "7" are one person,
    "7" and "07" are two. Fractions, None, NaN and booleans name nobody; nor does text that means a
    fraction or a missing value. The text "7.0" is 7, as programs write a column of whole numbers in
    which one is missing.

    Example:
        >>> person_key(7), person_key(" 7 "), person_key("7.0"), person_key(7.5), person_key(None)
        ('7', '7', '7', '', '')
        >>> person_key("7.5"), person_key("NaN"), person_key("ward-7.5")
        ('', '', 'ward-7.5')
    """
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _MISSING:
            return ""
        return _whole_part(text) if _DECIMAL.fullmatch(text) else text
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return person_key(value.item())
    return ""


def _whole_part(text: str) -> str:
    """The whole number that a decimal number with a point means; empty if it has a fraction."""
    whole, _, rest = text.partition(".")
    return whole.removeprefix("+") if whole.strip("+-") and not rest.strip("0") else ""


class PersonNumbers:
    """Numbers persons in the order in which they are seen, from 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, value: object) -> int:
        """The number of the person that a value names; `NOBODY` for a blank."""
        key = person_key(value)
        return self._numbers.setdefault(key, len(self._numbers)) if key else NOBODY


def number_persons(values: Any, count: int, field: str) -> NDArray[np.int64]:
    """Number the persons of records.

    Args:
        values: an array [N] of whole numbers or text, or a list, of which each item is read by
            itself (`person_key`).
        count: N, the number of records.
        field: for messages.

    Returns:
        [N], equal for records of the same person; `NOBODY` where the value names nobody.

    Raises:
        InvalidValueError: the array has another type (such as fractions, whatever their values) or
            another length.

    Example:
        >>> number_persons(["b", "a", "b", ""], 4, "persons").tolist()
        [0, 1, 0, -1]
    """
    if values is None:
        raise InvalidValueError(field, None, "must be given: unit = 'person' needs to know them")
    if not isinstance(values, (list, tuple)):
        values = np.asarray(values)
        if values.ndim != 1 or values.dtype.kind not in "iuSUTO":
            raise InvalidValueError(field, f"{values.dtype}{list(values.shape)}", _FORM)
    if len(values) != count:
        raise InvalidValueError(field, len(values), f"must be {count} values, one for each record")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return by_first_use(values)
    numbers = PersonNumbers()
    return np.array([numbers.number(value) for value in values], dtype=np.int64)


def by_first_use(values: NDArray[Any]) -> NDArray[np.int64]:
    """Number equal values, in the order of their first use.

    Example:
        >>> by_first_use(np.array([7, 3, 7])).tolist()
        [0, 1, 0]
    """
    _, first, codes = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[codes]


def first_blank(numbers: NDArray[np.int64]) -> int:
    """The position of the first record without a person; -1 if all have a person."""
    blank = np.flatnonzero(numbers == NOBODY)
    return int(blank[0]) if len(blank) else -1
