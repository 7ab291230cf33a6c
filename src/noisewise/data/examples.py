"""`Examples`: labelled records as they are stored, and their scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import positive_number
from noisewise.data.specs import Unit
from noisewise.errors import InvalidValueError
from noisewise.text import array_text, short_repr

__all__ = [
    "IMAGES", "Arrays", "Examples", "Scaling", "as_float32", "count_units", "map_arrays",
    "named_arrays",
]  # fmt: skip

Arrays = NDArray[Any] | tuple[NDArray[Any], ...] | Mapping[str, NDArray[Any]]
"""Inputs [N, ...]: one array, a tuple (``model(*arrays)``) or a mapping (``model(**arrays)``)."""


@dataclass(frozen=True)
class Scaling:
    """Scale inputs: x -> (x - mean) / std, for the whole input or for each channel.

    Channels are axis 1, the axis after the record's. Inputs of type uint8 are images: they are
    divided by 255 first, so ``mean`` and ``std`` refer to values in [0, 1].

    Args:
        mean: one number, or one for each channel.
        std: as many numbers > 0.

    Raises:
        InvalidValueError: the numbers are not finite, or ``std`` has another length or a number
            <= 0.

    Example:
        >>> Scaling(mean=(0.5,), std=(0.5,)).apply(np.array([[0, 255]], np.uint8)).tolist()
        [[-1.0, 1.0]]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise InvalidValueError(
                "scaling.std", self.std, f"must have as many numbers as mean = {self.mean}"
            )
        if not np.isfinite(self.mean).all():
            raise InvalidValueError("scaling.mean", self.mean, "must be finite numbers")
        for value in self.std:
            positive_number("scaling.std", value)

    def apply(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Return the scaled inputs [N, ...] as a new float32 array."""
        scaled = as_float32(inputs)
        mean = np.asarray(self.mean, dtype=np.float32)
        std = np.asarray(self.std, dtype=np.float32)
        if len(self.mean) > 1:
            if inputs.ndim < 2 or inputs.shape[1] != len(self.mean):
                raise InvalidValueError(
                    "scaling.mean",
                    self.mean,
                    f"must have one number for each channel of the inputs {inputs.shape}",
                )
            shape = (1, -1) + (1,) * (inputs.ndim - 2)
            mean, std = mean.reshape(shape), std.reshape(shape)
        scaled -= mean
        scaled /= std
        return scaled


def as_float32(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """Return a float32 copy in C order; uint8 is divided by 255.

    Each number is rounded to float64 first. So a whole number gives the same bits in an int64 array
    as in an array that is float64 because of one fraction in it.
    """
    wide = inputs.dtype.itemsize > 4 and inputs.dtype != np.float64
    with np.errstate(over="ignore"):  # above the largest float32: infinite
        exact = inputs.astype(np.float64) if wide else inputs
        copy = np.array(exact, dtype=np.float32, order="C")
    if inputs.dtype == np.uint8:
        copy /= np.float32(255)
    return copy


IMAGES = Scaling((0.0,), (1.0,))
"""Images without normalisation: uint8 is divided by 255, float32 stays as it is."""


def named_arrays(inputs: Arrays) -> dict[str, NDArray[Any]]:
    """The arrays with names for messages and hashes: ``inputs``, ``inputs[0]``, or their own."""
    if isinstance(inputs, np.ndarray):
        return {"inputs": inputs}
    if isinstance(inputs, Mapping):
        return {f"inputs.{name}": array for name, array in inputs.items()}
    return {f"inputs[{number}]": array for number, array in enumerate(inputs)}


def map_arrays(function: Callable[[NDArray[Any]], NDArray[Any]], inputs: Arrays) -> Arrays:
    """Apply a function to each array, and keep the structure."""
    if isinstance(inputs, np.ndarray):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: function(array) for name, array in inputs.items()}
    return tuple(function(array) for array in inputs)


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Records with targets, as they are stored, and their scaling.

    Whole numbers stay whole numbers: only inputs with a ``scaling`` become fractions.

    Args:
        inputs: [N, ...], one array (possibly memory-mapped), a tuple of arrays or a mapping of
            arrays; float32, bool or whole numbers of any type. Images are
            [N, channels, height, width].
        targets: [N, ...], int64 or float32; for classes [N] int64, from 0.
        scaling: applied by `arrays`; None leaves the inputs as they are. For one array only.
        persons: [N] int64, a number for each record; equal numbers are the same person. None if
            that is not known.

    Raises:
        InvalidValueError: an array has another type or shape.

    Example:
        >>> records = Examples(np.zeros((9, 4), np.float32), np.arange(9))
        >>> len(records), len(records.take([0, 5, 8]))
        (9, 3)
    """

    inputs: Arrays
    targets: NDArray[Any]
    scaling: Scaling | None = None
    persons: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        """Types and shapes, not the records."""
        inputs, targets = array_text(self.inputs), array_text(self.targets)
        return short_repr(self, inputs=inputs, targets=targets, scaling=self.scaling)

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, (np.ndarray, tuple, Mapping)):
            raise InvalidValueError(
                "inputs",
                type(self.inputs),
                "must be a numpy array, a tuple of arrays or a mapping of arrays",
            )
        named = {**self.named_inputs(), "targets": self.targets}
        if len(named) == 1:
            raise InvalidValueError("inputs", self.inputs, "must have at least one array")
        n = len(next(iter(named.values()))) if _has_records(self.inputs) else 0
        for field, array in named.items():
            if not isinstance(array, np.ndarray):
                raise InvalidValueError(field, type(array), "must be a numpy array")
            form, allowed = f"{array.dtype}{list(array.shape)}", "int64 or float32"
            fits = array.dtype in (np.int64, np.float32)
            if field != "targets":
                fits, allowed = fits or array.dtype.kind in "biu", "whole numbers or float32"
            if not fits or array.ndim < 1 or len(array) != n:
                allowed = f"must be {allowed} of shape [{n}, ...]"
                raise InvalidValueError(field, form, f"{allowed}, one for each record")
        if self.persons is not None and (
            self.persons.dtype != np.int64 or self.persons.shape != (n,)
        ):
            form = f"{self.persons.dtype}{list(self.persons.shape)}"
            raise InvalidValueError("persons", form, f"must be int64 of shape [{n}]")
        if self.scaling is not None and not isinstance(self.inputs, np.ndarray):
            raise InvalidValueError(
                "scaling", self.scaling, "must be left out for records of several arrays"
            )

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    def named_inputs(self) -> dict[str, NDArray[Any]]:
        """The input arrays by name, see `named_arrays`."""
        return named_arrays(self.inputs)

    @property
    def array(self) -> NDArray[Any]:
        """The inputs of records that are one array.

        Raises:
            InvalidValueError: the records have several arrays.
        """
        if not isinstance(self.inputs, np.ndarray):
            names = list(self.named_inputs())
            raise InvalidValueError("inputs", names, "must be one array for this use")
        return self.inputs

    @property
    def input_shape(self) -> Any:
        """The shape of one record: a tuple, or a tuple or mapping of them."""
        if isinstance(self.inputs, np.ndarray):
            return self.inputs.shape[1:]
        if isinstance(self.inputs, Mapping):
            return {name: array.shape[1:] for name, array in self.inputs.items()}
        return tuple(array.shape[1:] for array in self.inputs)

    @property
    def has_classes(self) -> bool:
        """Whether the target of each record is one whole number, as for classes."""
        return self.targets.ndim == 1 and self.targets.dtype == np.int64

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N], the class of each record for splits; all 0 if targets are not one class each."""
        if self.has_classes:
            return self.targets
        return np.zeros(len(self), dtype=np.int64)

    def take(self, index: ArrayLike | slice) -> Examples:
        """Return a copy of the records at ``index`` (integers, a mask or a slice)."""
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.size == 0:
                index = index.astype(np.int64)
        inputs = map_arrays(lambda array: np.array(np.asarray(array)[index]), self.inputs)
        persons = None if self.persons is None else self.persons[index]
        targets = np.array(np.asarray(self.targets)[index])
        return Examples(inputs, targets, self.scaling, persons)

    def arrays(self) -> tuple[Arrays, NDArray[Any]]:
        """Return the inputs as a model needs them, and the targets, as copies.

        Whole numbers become int64, since torch's embeddings take no smaller unsigned type.
        """
        if self.scaling is not None:
            return self.scaling.apply(self.array), np.array(self.targets)
        return map_arrays(_as_stored, self.inputs), np.array(self.targets)


def count_units(records: Examples, unit: Unit) -> int:
    """The number of records, or of the persons whom they belong to.

    Raises:
        InvalidValueError: the unit is a person, and the records have no persons.

    Example:
        >>> zeros, persons = np.zeros((3, 2), np.float32), np.array([4, 4, 9])
        >>> count_units(Examples(zeros, np.arange(3), persons=persons), "person")
        2
    """
    if unit == "record":
        return len(records)
    if records.persons is None:
        raise InvalidValueError("persons", None, 'must be given for unit = "person"')
    return len(np.unique(records.persons))


def _has_records(inputs: Arrays) -> bool:
    return all(isinstance(a, np.ndarray) and a.ndim > 0 for a in named_arrays(inputs).values())


def _as_stored(array: NDArray[Any]) -> NDArray[Any]:
    whole = array.dtype.kind in "iu"
    return np.array(array, dtype=np.int64 if whole else array.dtype, order="C")
