"""Load, download, list and verify datasets by name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import known_name, positive_int
from noisewise.data.acquire import acquire, decode_layouts
from noisewise.data.cache import clean, dataset_folder, exclusive, open_arrays, problems
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.columns import ColumnCoder
from noisewise.data.examples import Examples, Scaling
from noisewise.data.federations import FEDERATIONS, FederationInfo
from noisewise.data.file_sets import cached_files, file_problems, keep_files
from noisewise.data.groups import check_groups, name_groups
from noisewise.data.layouts import Arrays
from noisewise.data.progress import Progress, silent
from noisewise.errors import InvalidValueError, SourceError
from noisewise.text import array_text, short_repr

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


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A dataset, before it is split over the clients.

    Args:
        name: name of the dataset.
        train: records that are split over the clients.
        test: the published test records, or None.
        n_classes: number of classes; targets are 0 .. n_classes - 1. None if the targets are no
            classes (regression), or if the config declares the number.
        deal_test: True tests each client on its share of ``test`` (CIFAR in the paper), False on
            records held out of its share of ``train`` (MNIST in the paper).
        groups: [N], int64, for each training record the number of the real client that has it; None
            if the dataset has no clients of its own.
        group_names: names of these clients, in the order of their numbers.

    Raises:
        InvalidValueError: a target is not below ``n_classes``, or ``deal_test`` is True and
            ``test`` is None.
    """

    name: str
    train: Examples
    test: Examples | None
    n_classes: int | None
    deal_test: bool = False
    groups: NDArray[np.int64] | None = None
    group_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Its name, types and shapes, not the records."""
        inputs, test = array_text(self.train.inputs), None if self.test is None else len(self.test)
        return short_repr(
            self, name=self.name, inputs=inputs, test=test, n_classes=self.n_classes,
            clients=len(self.group_names) or None,
        )  # fmt: skip

    def __post_init__(self) -> None:
        check_groups(self.groups, self.group_names, len(self.train))
        if self.n_classes is not None:
            positive_int("n_classes", self.n_classes)
        if self.deal_test and self.test is None:
            raise InvalidValueError(
                "deal_test", True, "requires test records; pass test or use False"
            )
        for part in (self.train, self.test):
            if self.n_classes is not None and part is not None and len(part) and part.has_classes:
                bad = (part.targets < 0) | (part.targets >= self.n_classes)
                if bad.any():
                    record = int(bad.argmax())
                    where = (
                        f"{'targets' if part is self.train else 'test_targets'}, record {record}"
                    )
                    allowed = f"must be in 0..{self.n_classes - 1}; declare n_classes, or correct"
                    value = part.targets[record].item()
                    raise InvalidValueError(where, value, f"{allowed} the targets")


@dataclass(frozen=True)
class DatasetStatus:
    """What is known about a dataset without reading its records.

    Args:
        name: name for `load_dataset`.
        n_train: number of training records.
        n_test: number of published test records; 0 if there are none.
        shape: shape of a record; empty if records are texts.
        n_classes: number of classes.
        state: ``"built in"``, ``"cached"``, ``"damaged"`` or ``"not cached"``.
        folder: folder of the cached arrays, or None.
        sources: titles of its sources, in the order in which they are tried.
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
    """Return the names that `load_dataset` accepts."""
    return (DIGITS, *CATALOGUE, *FEDERATIONS)


def load_dataset(
    name: str,
    *,
    folder: str | Path | None = None,
    scaling: Scaling | None = None,
    columns: ColumnCoder | None = None,
    text_length: int | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Load a dataset by name; download it first if it is not in the cache.

    Images stay uint8 and memory-mapped; `Examples.arrays` scales a selection of them. Every load
    compares the cache with its SHA-256; a damaged cache is downloaded again.

    Args:
        name: one of `dataset_names`. ``"digits"`` needs no network.
        folder: folder with files that you downloaded; None uses the environment variable
            ``NOISEWISE_DATA``, if it is set.
        scaling: replaces the paper's normalisation.
        columns: for a table: replaces the columns that noisewise declares for it.
        text_length: for texts: length of a record in bytes, by default 2,048 (`text_records`).
        progress: called during downloads.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: the name is unknown, the columns do not match the table, or an argument
            does not apply to this dataset.
        SourceError: no source has the dataset; the message lists what was tried and what to do.

    Example:
        >>> data = load_dataset("digits")
        >>> data.train.inputs.shape, data.n_classes
        ((1797, 1, 8, 8), 10)
    """
    name = _known(name)
    coder = FEDERATIONS[name].coder if name in FEDERATIONS else None
    if coder is None and columns is not None:
        raise InvalidValueError("columns", columns.names, f"cannot be used: {name} is not a table")
    is_text = name in FEDERATIONS and coder is None
    if not is_text and text_length is not None:
        raise InvalidValueError("text_length", text_length, f"cannot be used: {name} has no texts")
    if is_text:
        return _texts(name, folder, scaling, text_length, progress)
    if name == DIGITS:
        return _digits(scaling)
    get_dataset(name, folder, progress)
    if coder is not None:
        return _table(FEDERATIONS[name], columns or coder, scaling)
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
    """Make sure that a dataset is in the cache, complete and verified.

    Several processes may call this at once: one downloads, the others wait.

    Args:
        name: one of `dataset_names`.
        folder: folder with files that you downloaded; None uses the environment variable
            ``NOISEWISE_DATA``, if it is set.
        progress: called during downloads.

    Returns:
        The status of the dataset.

    Raises:
        InvalidValueError: the name is unknown.
        SourceError: no source has the dataset; the message lists what was tried and what to do.
    """
    name = _known(name)
    if _problems(name):
        with exclusive(name):
            faults = _problems(name)  # another process may have downloaded it meanwhile
            if faults:
                if _cached_files(name):
                    log.warning(
                        "%s: the cache is damaged (%s); downloading it again",
                        name,
                        "; ".join(faults),
                    )
                clean(name)
                _acquire(name, folder, progress or silent)
    return _status(name)


def list_datasets() -> list[DatasetStatus]:
    """Return the status of all datasets. Reads the cache folder, but no records."""
    return [_status(name) for name in dataset_names()]


def verify_dataset(name: str) -> list[str]:
    """Compare the bytes of a cached dataset with its SHA-256.

    Returns:
        A list of problems; empty if there are none. `get_dataset` downloads a damaged dataset
        again.

    Raises:
        InvalidValueError: the name is unknown.
    """
    name = _known(name)
    if name == DIGITS:
        return []
    if not _cached_files(name):
        return [f"not cached; download it with: noisewise data get {name}"]
    return _problems(name)


def _problems(name: str) -> list[str]:
    """Return what is wrong with the cached files of a dataset."""
    if name == DIGITS:
        return []
    if name in FEDERATIONS:
        return file_problems(FEDERATIONS[name])
    return problems(CATALOGUE[name])


def _acquire(name: str, folder: str | Path | None, progress: Progress) -> None:
    """Get a dataset into the cache. The caller holds its lock."""

    def store(source_folder: Path, title: str) -> None:
        if name in FEDERATIONS:
            keep_files(FEDERATIONS[name], source_folder)
        else:
            decode_layouts(CATALOGUE[name], source_folder, title, progress)

    acquire(FEDERATIONS.get(name) or CATALOGUE[name], folder, progress, store)


def _table(info: FederationInfo, coder: ColumnCoder, scaling: Scaling | None) -> Dataset:
    """Return the records of a table with their real clients, coded by ``coder``."""
    assert info.reader is not None
    table = info.reader(cached_files(info), coder, info.classes)
    groups, names = name_groups(table.owners)
    train = Examples(table.inputs, table.targets, scaling)
    return Dataset(info.name, train, None, len(info.classes), groups=groups, group_names=names)


def _texts(
    name: str,
    folder: str | Path | None,
    scaling: Scaling | None,
    length: int | None,
    progress: Progress,
) -> Dataset:
    """Return texts as bytes, with their real clients."""
    from noisewise.data.texts import TEXT_LENGTH, load_texts, text_records  # it imports this module

    if scaling is not None:
        allowed = f"cannot be used: {name} consists of texts"
        raise InvalidValueError("scaling.mean", scaling.mean, allowed)
    texts = load_texts(name, folder=folder, progress=progress)
    records = text_records(texts.texts, TEXT_LENGTH if length is None else length)
    train = Examples(records, texts.targets)
    return Dataset(
        name, train, None, texts.n_classes, groups=texts.groups, group_names=texts.group_names
    )


def _digits(scaling: Scaling | None) -> Dataset:
    """Return the handwritten digits of scikit-learn: 1797 images [1, 8, 8] in [0, 1]."""
    from sklearn.datasets import load_digits  # slow to import, needed only here

    bunch = load_digits()
    inputs = (np.asarray(bunch.images, dtype=np.float32) / np.float32(16))[:, None]
    targets = np.asarray(bunch.target, dtype=np.int64)
    return Dataset(DIGITS, Examples(inputs, targets, scaling), test=None, n_classes=10)


def _examples(arrays: Arrays, part: str, scaling: Scaling) -> Examples:
    targets = np.asarray(arrays[f"{part}_targets"]).astype(np.int64)
    return Examples(arrays[f"{part}_inputs"], targets, scaling)


def _known(name: str) -> str:
    return known_name("dataset", name, dataset_names())


def _cached_files(name: str) -> list[Path]:
    if name in FEDERATIONS:
        return [path for path in cached_files(FEDERATIONS[name]).values() if path.exists()]
    return sorted(dataset_folder(name).glob("*.npy"))


def _status(name: str) -> DatasetStatus:
    if name == DIGITS:
        return DatasetStatus(DIGITS, 1797, 0, (1, 8, 8), 10, "built in", None, ("scikit-learn",))
    if name in FEDERATIONS:
        return _federation_status(FEDERATIONS[name])
    info = CATALOGUE[name]
    state = "not cached"
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
        dataset_folder(name) if state != "not cached" else None,
        tuple(source.title for source in info.sources),
    )


def _federation_status(info: FederationInfo) -> DatasetStatus:
    present = _cached_files(info.name)
    state = "cached" if len(present) == len(info.files) else "damaged" if present else "not cached"
    return DatasetStatus(
        info.name,
        info.n_records,
        0,
        () if info.coder is None else (info.coder.width,),
        len(info.classes),
        state,
        dataset_folder(info.name) if present else None,
        tuple(source.title for source in info.sources),
    )
