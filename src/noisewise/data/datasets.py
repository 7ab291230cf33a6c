"""`Examples` and `Dataset`: records in memory, and the table of datasets that load by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError

__all__ = ["Dataset", "Examples", "Scaling", "dataset_names", "load_dataset"]


@dataclass(frozen=True)
class Scaling:
    """x -> (x - mean) / std, for the whole input or for each channel (the axis after the record's).

    Inputs of type uint8 are divided by 255 first, so ``mean`` and ``std`` speak of [0, 1].

    Args:
        mean: one number, or one for each channel.
        std: as many numbers > 0.
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
        """Return the scaled inputs [N, ...] as float32; the argument stays as it is."""
        scaled = _unit(inputs)
        mean = np.asarray(self.mean, dtype=np.float32)
        std = np.asarray(self.std, dtype=np.float32)
        if len(self.mean) > 1:
            if inputs.ndim < 2 or inputs.shape[1] != len(self.mean):
                raise InvalidValueError(
                    "scaling.mean", self.mean, f"must fit the channels of inputs {inputs.shape}"
                )
            shape = (1, -1) + (1,) * (inputs.ndim - 2)
            mean, std = mean.reshape(shape), std.reshape(shape)
        scaled -= mean
        scaled /= std
        return scaled


def _unit(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """A float32 copy, with uint8 brought to [0, 1]."""
    copy = np.array(inputs, dtype=np.float32)
    if inputs.dtype == np.uint8:
        copy /= np.float32(255)
    return copy


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled records: inputs as they are stored, and the rule that scales them.

    Args:
        inputs: [N, ...], uint8 (images, possibly memory-mapped) or float32; images are
            [N, channels, height, width].
        targets: [N], int64, classes from 0.
        scaling: applied by `arrays`; None leaves float32 alone and brings uint8 to [0, 1].

    Example:
        >>> digits = load_dataset("digits").train
        >>> len(digits), len(digits.take([0, 5, 9]))
        (1797, 3)
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
        """Return a copy of the records at ``index`` only (whole numbers, a mask or a slice)."""
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.size == 0:
                index = index.astype(np.int64)
        inputs = np.array(np.asarray(self.inputs)[index])
        return Examples(inputs, np.array(np.asarray(self.targets)[index]), self.scaling)

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the scaled inputs as float32 and the targets, ready for a model."""
        scaled = self.scaling.apply(self.inputs) if self.scaling else _unit(self.inputs)
        return scaled, np.array(self.targets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset by name.

    Args:
        name: as given to `load_dataset`.
        train: records that are split over the clients.
        test: the published test records, or None.
        n_classes: targets are 0 .. n_classes - 1.
        deal_test: whether clients are tested on their share of ``test`` (CIFAR in the paper);
            if False, on records held out of their share of ``train`` (MNIST in the paper).
    """

    name: str
    train: Examples
    test: Examples | None
    n_classes: int
    deal_test: bool = False

    def __post_init__(self) -> None:
        positive_int("n_classes", self.n_classes)
        if self.deal_test and self.test is None:
            raise InvalidValueError("deal_test", True, "needs a test set; give one or say False")
        for part in (self.train, self.test):
            if part is not None and len(part):
                low, high = int(part.targets.min()), int(part.targets.max())
                if low < 0 or high >= self.n_classes:
                    raise InvalidValueError(
                        "targets", (low, high), f"must lie in 0..{self.n_classes - 1}"
                    )


def _digits() -> Dataset:
    """The handwritten digits that ship with scikit-learn: 1797 images [1, 8, 8] in [0, 1]."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    bunch = load_digits()
    inputs = (np.asarray(bunch.images, dtype=np.float32) / np.float32(16))[:, None]
    targets = np.asarray(bunch.target, dtype=np.int64)
    return Dataset("digits", Examples(inputs, targets), test=None, n_classes=10)


_LOADERS: Mapping[str, Callable[[], Dataset]] = {"digits": _digits}


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows."""
    return tuple(_LOADERS)


def load_dataset(name: str) -> Dataset:
    """Load a dataset by name.

    Args:
        name: one of `dataset_names`. ``"digits"`` needs no network.

    Raises:
        InvalidValueError: the name is unknown.
    """
    if name not in _LOADERS:
        raise InvalidValueError("dataset", name, f"must be one of {', '.join(_LOADERS)}")
    return _LOADERS[name]()
