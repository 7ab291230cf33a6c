"""In a deployment, clients must not be able to predict which coordinates the server reads.

An estimator that reads a sample of a large model draws the sample with a seed, so that simulations
are repeatable. A client that knows the seed could leave out the noise in exactly these coordinates
and so get a large weight. A deployed server therefore makes its estimator or aggregator draw the
sample from the operating system's randomness.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar, runtime_checkable

from noisewise.errors import InvalidValueError

__all__ = ["ReadsAllCoordinates", "Reseedable", "reseeded"]

T = TypeVar("T")


@runtime_checkable
class Reseedable(Protocol):
    """An estimator or aggregator that reads a sample of the coordinates, drawn with a seed."""

    def reseeded(self, seed: int | None) -> Self:
        """Return a copy with another seed.

        Args:
            seed: the new seed. With None, the copy draws a new sample for each estimate from the
                operating system's randomness.

        Raises:
            InvalidValueError: the coordinates that it reads would still be predictable.
        """
        ...


@runtime_checkable
class ReadsAllCoordinates(Protocol):
    """An estimator or aggregator that reads every coordinate of every update, and declares it."""

    @property
    def reads_all_coordinates(self) -> bool:
        """Always True; a class attribute is sufficient."""
        ...


def reseeded(part: T, seed: int | None, field: str) -> T:
    """Return an estimator or aggregator with another seed.

    Args:
        part: a built-in estimator or aggregator, or your own.
        seed: the new seed; None for the operating system's randomness, as on a deployed server.
        field: name of the part in the error message.

    Returns:
        A copy with the seed, or ``part`` itself if it declares that it reads all coordinates.

    Raises:
        InvalidValueError: the part is neither `Reseedable` nor `ReadsAllCoordinates`, or its
            ``reseeded`` returns something else than a copy.
    """
    if isinstance(part, Reseedable):
        copy: T = part.reseeded(seed)
        if type(copy) is not type(part):
            kind = type(part).__name__
            allowed = f"{kind}.reseeded(seed) must return a copy, not a {type(copy).__name__}"
            raise InvalidValueError(field, kind, allowed)
        return copy
    if isinstance(part, ReadsAllCoordinates) and part.reads_all_coordinates is True:
        return part
    raise InvalidValueError(
        field,
        type(part).__name__,
        "must not read coordinates that clients can predict: if it reads every coordinate, add "
        "`reads_all_coordinates = True` to the class; if it draws a sample, add a method "
        "reseeded(seed) that returns a copy with that seed, where None means the operating "
        "system's randomness (docs/own_aggregators.md)",
    )
