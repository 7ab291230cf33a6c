"""Bring your own data: arrays, torch datasets, or one file for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples, Scaling
from noisewise.data.files import MAX_BYTES, SUFFIXES, read_arrays
from noisewise.data.partition import ClientData, hold_out
from noisewise.data.tables import read_csv
from noisewise.errors import InvalidValueError

__all__ = [
    "RecordSource",
    "clients_from_files",
    "clients_from_torch",
    "count_classes",
    "dataset_from_arrays",
    "dataset_from_torch",
]


class RecordSource(Protocol):
    """What a torch ``Dataset`` offers: its length, and (input, class) by number."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The pair (input, class)."""
        ...


def dataset_from_arrays(
    inputs: ArrayLike,
    targets: ArrayLike,
    *,
    test_inputs: ArrayLike | None = None,
    test_targets: ArrayLike | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` of arrays, ready for `split_dataset`.

    Args:
        inputs: [N, ...]; uint8 stays as it is, everything else becomes float32.
        targets: [N], classes as whole numbers from 0.
        test_inputs: records that clients are tested on, dealt in the proportions of the training
            records; without them a part of each client's records is held out.
        test_targets: their classes.
        n_classes: number of classes; None takes the largest class + 1.
        scaling: see `Examples`.
        name: for reports.

    Example:
        >>> data = dataset_from_arrays(np.zeros((6, 2)), [0, 1, 2, 0, 1, 2])
        >>> len(data.train), data.n_classes
        (6, 3)
    """
    train = _examples(inputs, targets, scaling)
    if (test_inputs is None) != (test_targets is None):
        raise InvalidValueError("test_targets", test_targets, "test inputs and targets go together")
    test = None
    if test_inputs is not None and test_targets is not None:
        test = _examples(test_inputs, test_targets, scaling, "test_")
        _same_shape([("inputs", train), ("test_inputs", test)])
    highest = max(int(part.targets.max()) for part in (train, test) if part is not None)
    return Dataset(name, train, test, n_classes or highest + 1, deal_test=test is not None)


def dataset_from_torch(
    dataset: RecordSource,
    *,
    test: RecordSource | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` of a torch ``Dataset`` (or any sequence of pairs), read once into memory.

    Args:
        dataset: gives (input, class) by number.
        test: as ``test_inputs`` of `dataset_from_arrays`.
        n_classes: number of classes; None takes the largest class + 1.
        scaling: see `Examples`.
        name: for reports.
    """
    inputs, targets = _stack(dataset, "dataset")
    held = _stack(test, "test") if test is not None else (None, None)
    return dataset_from_arrays(
        inputs,
        targets,
        test_inputs=held[0],
        test_targets=held[1],
        n_classes=n_classes,
        scaling=scaling,
        name=name,
    )


def clients_from_torch(
    datasets: Sequence[RecordSource],
    *,
    tests: Sequence[RecordSource] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    scaling: Scaling | None = None,
) -> tuple[ClientData, ...]:
    """Make clients of one torch ``Dataset`` each.

    Args:
        datasets: what each client holds.
        tests: what each is tested on; None holds out a part of what it holds.
        test_fraction: that part.
        seed: of the part.
        scaling: see `Examples`.
    """
    if tests is not None and len(tests) != len(datasets):
        raise InvalidValueError("tests", f"{len(tests)} datasets", f"must be {len(datasets)}")
    clients = []
    for number, dataset in enumerate(datasets):
        records = _examples(*_stack(dataset, f"datasets[{number}]"), scaling)
        if tests is None:
            clients.append(hold_out(records, test_fraction, seed, number))
        else:
            test = _examples(*_stack(tests[number], f"tests[{number}]"), scaling)
            clients.append(ClientData(records, test))
    return _checked([f"datasets[{number}]" for number in range(len(datasets))], clients)


def clients_from_files(
    files: str | Path | Sequence[str | Path],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    target: str = "target",
    classes: Sequence[str] | None = None,
    scaling: Scaling | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[ClientData, ...]:
    """Make clients of one file each.

    ``.npz`` and ``.safetensors`` files hold the arrays ``inputs`` and ``targets``, and possibly
    ``test_inputs`` and ``test_targets``; without the latter a part is held out. ``.csv`` files have
    a header row, a column with the class, and numbers in all others.

    Args:
        files: paths in the order of the clients, or a folder whose files are taken by name.
        test_fraction: part that is held out where a file has no test records.
        seed: of that part.
        target: CSV column with the class.
        classes: CSV names of the classes in order; None where the column holds numbers from 0.
        scaling: see `Examples`.
        max_bytes: refuse a larger file, or one that unpacks to more.

    Raises:
        InvalidValueError: a file cannot be read or does not fit the others; the message names it.
    """
    paths = _paths(files)
    clients = []
    for number, path in enumerate(paths):
        if path.suffix == ".csv":
            arrays = read_csv(path, target, classes, max_bytes)
        else:
            arrays = read_arrays(path, max_bytes)
        records = _examples(arrays["inputs"], arrays["targets"], scaling, f"{path}: ")
        if "test_inputs" in arrays:
            test = _examples(
                arrays["test_inputs"], arrays["test_targets"], scaling, f"{path}: test_"
            )
            clients.append(ClientData(records, test))
        else:
            clients.append(hold_out(records, test_fraction, seed, number))
    return _checked([str(path) for path in paths], clients)


def count_classes(clients: Sequence[ClientData]) -> int:
    """The largest class of any client + 1: what a model for all of them needs as outputs."""
    return 1 + max(int(p.targets.max()) for client in clients for p in (client.train, client.test))


def _paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    if isinstance(files, (str, Path)):
        folder = Path(files)
        if not folder.is_dir():
            raise InvalidValueError("files", str(files), "must be a folder or a list of files")
        paths = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    else:
        paths = [Path(file) for file in files]
    if not paths:
        raise InvalidValueError("files", str(files), f"has no file that ends in {SUFFIXES}")
    for path in paths:
        if path.suffix not in SUFFIXES or not path.is_file():
            raise InvalidValueError("files", str(path), f"must be a file that ends in {SUFFIXES}")
    return paths


def _examples(
    inputs: ArrayLike, targets: ArrayLike, scaling: Scaling | None, prefix: str = ""
) -> Examples:
    """Bring arrays of any numeric type to those of `Examples`."""
    x, y = np.asarray(inputs), np.asarray(targets)
    if x.dtype.kind not in "biuf":
        raise InvalidValueError(prefix + "inputs", x.dtype, "must be numbers")
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise InvalidValueError(prefix + "inputs", "nan or inf", "must be finite (in float32)")
    if y.dtype.kind not in "biu" or y.ndim != 1 or x.shape[:1] != y.shape or len(y) == 0:
        raise InvalidValueError(
            prefix + "targets",
            f"{y.dtype}{list(y.shape)}",
            f"must be one whole number for each of the inputs {list(x.shape)}, at least one",
        )
    if int(y.min()) < 0:
        raise InvalidValueError(prefix + "targets", int(y.min()), "must be whole numbers >= 0")
    return Examples(x, y.astype(np.int64), scaling)


def _stack(dataset: RecordSource, field: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        pairs = [dataset[index] for index in range(len(dataset))]
        inputs = np.stack([np.asarray(pair[0]) for pair in pairs])
        targets = np.asarray([int(pair[1]) for pair in pairs])
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InvalidValueError(
            field, type(dataset).__name__, f"must give pairs (input, class) of one shape ({error})"
        ) from error
    return inputs, targets


def _checked(names: Sequence[str], clients: list[ClientData]) -> tuple[ClientData, ...]:
    if not clients:
        raise InvalidValueError("clients", 0, "must be at least one")
    _same_shape(
        [(n, part) for n, c in zip(names, clients, strict=True) for part in (c.train, c.test)]
    )
    return tuple(clients)


def _same_shape(parts: Sequence[tuple[str, Examples]]) -> None:
    first, expected = parts[0]
    for name, part in parts:
        if part.inputs.shape[1:] != expected.inputs.shape[1:]:
            raise InvalidValueError(
                name,
                f"records of shape {part.inputs.shape[1:]}",
                f"must be of shape {expected.inputs.shape[1:]} as in {first}",
            )
        if part.inputs.dtype != expected.inputs.dtype:
            raise InvalidValueError(
                name, part.inputs.dtype, f"must be {expected.inputs.dtype} as in {first}"
            )
