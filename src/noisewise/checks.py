"""Checks of single values and lists of names, shared by every type that a caller fills in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from noisewise.errors import InvalidValueError
from noisewise.text import printable

__all__ = [
    "fraction",
    "no_repeats",
    "non_negative_int",
    "non_negative_number",
    "positive_int",
    "positive_number",
    "printable_name",
    "repeated",
]


def positive_number(field: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number above 0.

    Booleans, strings, None, NaN and infinities are refused by name of the field.
    """
    number = _finite(value)
    if number is None or number <= 0:
        raise InvalidValueError(field, value, "must be a finite number > 0")
    return number


def non_negative_number(field: str, value: object) -> float:
    """``value`` as a finite float >= 0."""
    number = _finite(value)
    if number is None or number < 0:
        raise InvalidValueError(field, value, "must be a finite number >= 0")
    return abs(number)  # -0.0 is 0


def _finite(value: object) -> float | None:
    """``value`` as a float, or None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def fraction(field: str, value: object, *, one_allowed: bool = True) -> float:
    """Return ``value`` as a float if it lies in (0, 1], or in (0, 1) without ``one_allowed``."""
    allowed = "must be a number in (0, 1]" if one_allowed else "must be a number in (0, 1)"
    try:
        number = positive_number(field, value)
    except InvalidValueError:
        raise InvalidValueError(field, value, allowed) from None
    if number > 1 or (number == 1 and not one_allowed):
        raise InvalidValueError(field, value, allowed)
    return number


def _integer(field: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise InvalidValueError(field, value, f"must be a whole number >= {minimum}")
    return int(value)


def positive_int(field: str, value: object) -> int:
    """Return ``value`` as an int if it is a whole number of at least 1."""
    return _integer(field, value, 1)


def non_negative_int(field: str, value: object) -> int:
    """Return ``value`` as an int if it is a whole number of at least 0."""
    return _integer(field, value, 0)


def printable_name(field: str, value: object) -> str:
    """Return ``value`` if it is a non-empty text without control characters."""
    if not isinstance(value, str) or not value:
        raise InvalidValueError(field, value, "must be a non-empty string")
    if printable(value) != value:
        raise InvalidValueError(
            field, value, "must have no control characters, line ends or changes of direction"
        )
    return value


def repeated(names: Sequence[str]) -> str | None:
    """The first of ``names`` that stands there twice; None if all differ."""
    return next((name for name in names if list(names).count(name) > 1), None)


def no_repeats(field: str, names: Sequence[str]) -> None:
    """Refuse ``names`` if one of them stands there twice."""
    name = repeated(names)
    if name is not None:
        raise InvalidValueError(field, name, "stands there twice")
