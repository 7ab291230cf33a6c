"""`Examples`: labelled records as they are stored, and their scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import positive_number
from noisewise.errors import InvalidValueError

__all__ = ["Examples", "Scaling", "as_float32"]


@dataclass(frozen=True)
class Scaling:
    """Scale inputs: x -> (x - mean) / std, for the whole input or for each channel.

    Channels are axis 1, the axis after the record's. Inputs of type uint8 are divided by 255 first,
    so ``mean`` and ``std`` refer to values in [0, 1].

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


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled records: inputs as they are stored, their classes and their scaling.

    Args:
        inputs: [N, ...], uint8 (images, possibly memory-mapped) or float32; images are
            [N, channels, height, width].
        targets: [N], int64, classes from 0.
        scaling: applied by `arrays`; None does not change float32 and divides uint8 by 255.

    Raises:
        InvalidValueError: an array has another type or shape.

    Example:
        >>> records = Examples(np.zeros((9, 4), np.float32), np.arange(9))
        >>> len(records), len(records.take([0, 5, 8]))
        (9, 3)
    """

    inputs: NDArray[Any]
    targets: NDArray[np.int64]
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        for field in ("inputs", "targets"):
            if not isinstance(getattr(self, field), np.ndarray):
                raise InvalidValueError(field, type(getattr(self, field)), "must be a numpy array")
        if self.inputs.ndim < 1 or self.inputs.dtype not in (np.uint8, np.float32):
            raise InvalidValueError(
                "inputs",
                f"{self.inputs.dtype}{list(self.inputs.shape)}",
                "must be uint8 or float32 of shape [N, ...]",
            )
        if self.targets.dtype != np.int64 or self.targets.shape != self.inputs.shape[:1]:
            raise InvalidValueError(
                "targets",
                f"{self.targets.dtype}{list(self.targets.shape)}",
                f"must be int64 of shape [{self.inputs.shape[0]}], one class for each input",
            )

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    def take(self, index: ArrayLike | slice) -> Examples:
        """Return a copy of the records at ``index`` (integers, a mask or a slice)."""
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.size == 0:
                index = index.astype(np.int64)
        inputs = np.array(np.asarray(self.inputs)[index])
        return Examples(inputs, np.array(np.asarray(self.targets)[index]), self.scaling)

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the scaled inputs as float32 and the targets, as a model needs them."""
        scaled = self.scaling.apply(self.inputs) if self.scaling else as_float32(self.inputs)
        return scaled, np.array(self.targets)
