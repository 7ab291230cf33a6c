"""Checks of numbers and names that a caller passes to the package."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from noisewise.errors import InvalidValueError
from noisewise.text import printable

__all__ = [
    "fraction",
    "known_name",
    "matching_name",
    "no_repeats",
    "non_negative_int",
    "non_negative_number",
    "positive_int",
    "positive_number",
    "printable_name",
    "repeated",
    "similar_name",
    "with_suggestion",
]


def positive_number(field: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number > 0.

    Args:
        field: name of the argument or config key, for the error.
        value: the value to check.

    Raises:
        InvalidValueError: ``value`` is 0 or less, a boolean, a string, None, NaN or infinite.
    """
    number = _finite(value)
    if number is None or number <= 0:
        raise InvalidValueError(field, value, "must be a finite number > 0")
    return number


def non_negative_number(field: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number >= 0; see `positive_number`."""
    number = _finite(value)
    if number is None or number < 0:
        raise InvalidValueError(field, value, "must be a finite number >= 0")
    return abs(number)  # -0.0 is 0


def _finite(value: object) -> float | None:
    """Return ``value`` as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer above the largest float
        return None
    return number if math.isfinite(number) else None


def fraction(field: str, value: object, *, one_allowed: bool = True) -> float:
    """Return ``value`` as a float if it is in (0, 1].

    Args:
        field: name of the argument or config key, for the error.
        value: the value to check.
        one_allowed: False rejects 1 too.

    Raises:
        InvalidValueError: ``value`` is not such a number.
    """
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
    """Return ``value`` as an int if it is a whole number >= 1, else raise `InvalidValueError`."""
    return _integer(field, value, 1)


def non_negative_int(field: str, value: object) -> int:
    """Return ``value`` as an int if it is a whole number >= 0, else raise `InvalidValueError`."""
    return _integer(field, value, 0)


def printable_name(field: str, value: object) -> str:
    """Return ``value`` if it is a non-empty string without control characters.

    Raises:
        InvalidValueError: ``value`` is not such a string.
    """
    if not isinstance(value, str) or not value:
        raise InvalidValueError(field, value, "must be a non-empty string")
    if printable(value) != value:
        raise InvalidValueError(
            field,
            value,
            "must have no control characters, line ends or characters that change the writing "
            "direction",
        )
    return value


def matching_name(value: str, names: Iterable[str]) -> str:
    """Return the one of ``names`` that equals ``value`` up to case, "_" and "-", or ``value``.

    Example:
        >>> matching_name("fashion_MNIST", ["mnist", "fashion-mnist"])
        'fashion-mnist'
    """
    names = list(names)
    if value in names:
        return value
    return {_spelling(name): name for name in names}.get(_spelling(value), value)


def known_name(field: str, value: object, names: Iterable[str], or_else: str = "") -> str:
    """Return the one of ``names`` that ``value`` means; see `matching_name`.

    Args:
        field: name of the argument or config key, for the error.
        value: the name that was given.
        names: all names.
        or_else: what else is allowed, for the error: ", or a path".

    Raises:
        InvalidValueError: there is no such name. The message suggests the most similar one.

    Example:
        >>> known_name("method.name", "RobustHPD", ["NoiseWise", "RobustHDP"])
        Traceback (most recent call last):
        ...
        noisewise.errors.InvalidValueError: method.name = 'RobustHPD': did you mean RobustHDP? ...
    """
    names = list(names)
    if isinstance(value, str) and (name := matching_name(value, names)) in names:
        return name
    allowed = f"must be one of {', '.join(names)}{or_else}"
    raise InvalidValueError(field, value, with_suggestion(value, names, allowed))


def similar_name(value: object, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that is most similar to ``value``; None if none is similar.

    Example:
        >>> similar_name("pdl", ["moments", "pld", "rdp"])
        'pld'
    """
    by_spelling = {_spelling(name): name for name in names}
    similar = difflib.get_close_matches(_spelling(str(value)), by_spelling, n=1)
    return by_spelling[similar[0]] if similar else None


def with_suggestion(value: object, names: Iterable[str], allowed: str) -> str:
    """Return ``allowed``, which says what a name must be, after the most similar of ``names``."""
    name = similar_name(value, names)
    return allowed if name is None else f"did you mean {name}? It {allowed}"


def _spelling(name: str) -> str:
    """A name without differences in spelling that users do not intend."""
    return name.casefold().replace("_", "").replace("-", "")


def repeated(names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is listed twice; None if all differ."""
    return next((name for name in names if list(names).count(name) > 1), None)


def no_repeats(field: str, names: Sequence[str]) -> None:
    """Raise `InvalidValueError` if one of ``names`` is listed twice."""
    name = repeated(names)
    if name is not None:
        raise InvalidValueError(field, name, "is listed twice; list it once")
