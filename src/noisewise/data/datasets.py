"""Datasets by name: load, get, list and verify them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noisewise.checks import positive_int
from noisewise.data.acquire import acquire
from noisewise.data.cache import clean, dataset_folder, exclusive, open_arrays, problems
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.examples import Examples, Scaling
from noisewise.data.layouts import Arrays
from noisewise.data.progress import Progress, silent
from noisewise.errors import InvalidValueError, SourceError

__all__ = [
    "Dataset",
    "DatasetStatus",
    "Examples",
    "Scaling",
    "dataset_names",
    "get_dataset",
    "list_datasets",
    "load_dataset",
    "verify_dataset",
]

DIGITS = "digits"
log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class DatasetStatus:
    """What is known of a dataset without reading it.

    Args:
        name: for `load_dataset`.
        n_train: number of training records.
        n_test: number of published test records; 0 if there are none.
        shape: of a record.
        n_classes: number of classes.
        state: ``"built in"``, ``"cached"``, ``"damaged"`` or ``"not here"``.
        folder: of the cached arrays, or None.
        sources: where it can be had, in order.
    """

    name: str
    n_train: int
    n_test: int
    shape: tuple[int, ...]
    n_classes: int
    state: str
    folder: Path | None
    sources: tuple[str, ...]


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows."""
    return (DIGITS, *CATALOGUE)


def load_dataset(
    name: str,
    *,
    folder: str | Path | None = None,
    scaling: Scaling | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Load a dataset by name, fetching it first if need be.

    Images stay uint8 and memory-mapped; `Examples.arrays` scales what is taken of them. The cache
    is verified by SHA-256 on every load, and fetched anew if it is damaged.

    Args:
        name: one of `dataset_names`. ``"digits"`` needs no network.
        folder: where files were placed by hand; else the variable ``NOISEWISE_DATA`` names it.
        scaling: instead of the paper's normalisation.
        progress: told about downloads.

    Raises:
        InvalidValueError: the name is unknown.
        SourceError: the dataset is not here and no source has it; the message says how to help.
    """
    if name == DIGITS:
        return _digits(scaling)
    get_dataset(name, folder, progress)
    info = CATALOGUE[name]
    arrays = open_arrays(info)
    return Dataset(
        name,
        train=_examples(arrays, "train", scaling or info.scaling),
        test=_examples(arrays, "test", scaling or info.scaling),
        n_classes=info.n_classes,
        deal_test=info.deal_test,
    )


def get_dataset(
    name: str, folder: str | Path | None = None, progress: Progress | None = None
) -> DatasetStatus:
    """Make sure that a dataset is in the cache, whole and verified.

    Several processes may call this at once: one fetches, the others wait.

    Args:
        name: one of `dataset_names`.
        folder: where files were placed by hand; else the variable ``NOISEWISE_DATA`` names it.
        progress: told about downloads.

    Raises:
        InvalidValueError: the name is unknown.
        SourceError: no source has it; the message lists what was tried and how to help.
    """
    _check_name(name)
    if name != DIGITS and problems(CATALOGUE[name]):
        info = CATALOGUE[name]
        with exclusive(name):
            found = problems(info)  # another process may have been quicker
            if found:
                if _cached_files(name):
                    log.warning("%s: cache is damaged (%s); fetching anew", name, "; ".join(found))
                clean(name)
                acquire(info, folder, progress or silent)
    return _status(name)


def list_datasets() -> list[DatasetStatus]:
    """All datasets by name, and whether they are here. Nothing is read but the folder."""
    return [_status(name) for name in dataset_names()]


def verify_dataset(name: str) -> list[str]:
    """Compare a cached dataset with its SHA-256, byte by byte.

    Returns:
        What is wrong, in words; an empty list if all is well. `get_dataset` mends it.

    Raises:
        InvalidValueError: the name is unknown.
    """
    _check_name(name)
    if name == DIGITS:
        return []
    if not _cached_files(name):
        return [f"not here; get it with: noisewise data get {name}"]
    return problems(CATALOGUE[name])


def _digits(scaling: Scaling | None) -> Dataset:
    """The handwritten digits that ship with scikit-learn: 1797 images [1, 8, 8] in [0, 1]."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    bunch = load_digits()
    inputs = (np.asarray(bunch.images, dtype=np.float32) / np.float32(16))[:, None]
    targets = np.asarray(bunch.target, dtype=np.int64)
    return Dataset(DIGITS, Examples(inputs, targets, scaling), test=None, n_classes=10)


def _examples(arrays: Arrays, part: str, scaling: Scaling) -> Examples:
    targets = np.asarray(arrays[f"{part}_targets"]).astype(np.int64)
    return Examples(arrays[f"{part}_inputs"], targets, scaling)


def _check_name(name: str) -> None:
    if name not in dataset_names():
        raise InvalidValueError("dataset", name, f"must be one of {', '.join(dataset_names())}")


def _cached_files(name: str) -> list[Path]:
    return sorted(dataset_folder(name).glob("*.npy"))


def _status(name: str) -> DatasetStatus:
    if name == DIGITS:
        return DatasetStatus(DIGITS, 1797, 0, (1, 8, 8), 10, "built in", None, ("scikit-learn",))
    info = CATALOGUE[name]
    state = "not here"
    if _cached_files(name):
        try:
            open_arrays(info)
            state = "cached"
        except SourceError:
            state = "damaged"
    return DatasetStatus(
        name,
        info.n_train,
        info.n_test,
        info.shape,
        info.n_classes,
        state,
        dataset_folder(name) if state != "not here" else None,
        tuple(source.title for source in info.sources),
    )
