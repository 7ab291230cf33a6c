"""Which coordinates a part reads must not be foreseeable by the clients of a deployment.

An estimator that reads a sample of a large model draws it by a seed, which makes simulations
repeatable. A client that knows the seed could leave its noise out of just these coordinates, look
quiet and get a large weight. A deployed server therefore asks its parts to draw from the system's
randomness.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar, runtime_checkable

from noisewise.errors import InvalidValueError

__all__ = ["ReadsAllCoordinates", "Reseedable", "reseeded"]

T = TypeVar("T")


@runtime_checkable
class Reseedable(Protocol):
    """An estimator or aggregator that reads a sample of the coordinates, drawn by a seed."""

    def reseeded(self, seed: int | None) -> Self:
        """The same part with this seed; None draws anew from the system at each estimate.

        Raises:
            InvalidValueError: if what it reads can be foreseen nevertheless.
        """
        ...


@runtime_checkable
class ReadsAllCoordinates(Protocol):
    """An estimator or aggregator that declares that it reads every coordinate of every update."""

    @property
    def reads_all_coordinates(self) -> bool:
        """True; a class attribute is enough."""
        ...


def reseeded(part: T, seed: int | None, field: str) -> T:
    """An estimator or aggregator with another seed, or as it is if it reads all coordinates.

    Args:
        part: anybody's.
        seed: None for the system's randomness, as a deployed server has it.
        field: name of the part in the error.

    Raises:
        InvalidValueError: if the part neither can be reseeded nor declares that it reads all
            coordinates.
    """
    if isinstance(part, Reseedable):
        return part.reseeded(seed)
    if isinstance(part, ReadsAllCoordinates) and part.reads_all_coordinates is True:
        return part
    raise InvalidValueError(
        field,
        type(part).__name__,
        "must not read coordinates that clients can foresee: if it reads every coordinate, add "
        "`reads_all_coordinates = True` to the class; if it draws a sample, add a method "
        "reseeded(seed) that returns a copy with that seed, where None takes the system's "
        "randomness (docs/own_parts.md)",
    )
