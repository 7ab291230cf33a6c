"""Your own data: arrays, torch datasets, or one file for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import no_repeats
from noisewise.data.columns import ColumnCoder
from noisewise.data.csv_records import read_csv
from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples, Scaling
from noisewise.data.groups import name_groups
from noisewise.data.partition import ClientData, hold_out
from noisewise.data.record_files import MAX_BYTES, SUFFIXES, read_arrays
from noisewise.errors import InvalidValueError

__all__ = [
    "RecordSource",
    "clients_from_files",
    "clients_from_torch",
    "count_classes",
    "dataset_from_arrays",
    "dataset_from_csv",
    "dataset_from_torch",
]


class RecordSource(Protocol):
    """The part of a torch ``Dataset`` that is used: its length, and the pair (input, class)."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return the pair (input, class) of a record."""
        ...


def dataset_from_arrays(
    inputs: ArrayLike,
    targets: ArrayLike,
    *,
    test_inputs: ArrayLike | None = None,
    test_targets: ArrayLike | None = None,
    groups: Sequence[str] | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` from arrays, for `split_dataset`.

    Args:
        inputs: [N, ...]; uint8 stays uint8, other types become float32.
        targets: [N], classes as whole numbers from 0.
        test_inputs: test records. They are split over the clients in the proportions of the
            training records. Without them, a part of each client's records is held out.
        test_targets: classes of the test records.
        groups: the name of the real client that has each record, for the partition "natural".
        n_classes: number of classes; None uses the largest class + 1.
        scaling: see `Examples`.
        name: name of the dataset in reports.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: an array has the wrong type, shape or values.

    Example:
        >>> data = dataset_from_arrays(np.zeros((6, 2)), [0, 1, 2, 0, 1, 2])
        >>> len(data.train), data.n_classes
        (6, 3)
    """
    train = _examples(inputs, targets, scaling)
    if (test_inputs is None) != (test_targets is None):
        raise InvalidValueError(
            "test_targets", test_targets, "give both test_inputs and test_targets, or neither"
        )
    test = None
    if test_inputs is not None and test_targets is not None:
        test = _examples(test_inputs, test_targets, scaling, "test_")
        _same_shape([("inputs", train), ("test_inputs", test)])
    highest = max(int(part.targets.max()) for part in (train, test) if part is not None)
    numbers, names = (None, ()) if groups is None else name_groups(groups)
    return Dataset(
        name,
        train,
        test,
        n_classes or highest + 1,
        deal_test=test is not None,
        groups=numbers,
        group_names=names,
    )


def dataset_from_csv(
    files: str | Path | Sequence[str | Path],
    *,
    target: str = "target",
    classes: Sequence[str] | None = None,
    columns: ColumnCoder | None = None,
    scaling: Scaling | None = None,
    name: str = "csv",
) -> Dataset:
    """Make a `Dataset` of one CSV file for each real client, for the partition "natural".

    Args:
        files: paths, or a folder whose ``.csv`` files are taken by name. The name of a client is
            that of its file, without ``.csv``.
        target: the column with the class.
        classes: names of the classes in order; None where the column holds numbers from 0.
        columns: how the other columns become inputs (`parse_columns`); None where all are numbers.
        scaling: see `Examples`.
        name: for reports.

    Raises:
        InvalidValueError: a file cannot be read or does not fit the others; the message names it.
    """
    paths = [path for path in _paths(files) if path.suffix == ".csv"]
    if not paths:
        raise InvalidValueError("files", str(files), "has no file that ends in .csv")
    no_repeats("files", [path.stem for path in paths])
    parts = []
    for path in paths:
        arrays = read_csv(path, target, classes, columns=columns)
        parts.append(_examples(arrays["inputs"], arrays["targets"], scaling, f"{path}: "))
    _same_shape([(str(path), part) for path, part in zip(paths, parts, strict=True)])
    return dataset_from_arrays(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        groups=[p.stem for p, part in zip(paths, parts, strict=True) for _ in range(len(part))],
        n_classes=None if classes is None else len(classes),
        scaling=scaling,
        name=name,
    )


def dataset_from_torch(
    dataset: RecordSource,
    *,
    test: RecordSource | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` from a torch ``Dataset`` or any sequence of pairs.

    All records are read into memory once.

    Args:
        dataset: pairs (input, class).
        test: test records, as in `dataset_from_arrays`.
        n_classes: number of classes; None uses the largest class + 1.
        scaling: see `Examples`.
        name: name of the dataset in reports.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: the records are not pairs of one shape.

    Example:
        >>> data = dataset_from_torch([(np.zeros(2), 0), (np.ones(2), 1)])
        >>> len(data.train), data.n_classes
        (2, 2)
    """
    inputs, targets = _stack(dataset, "dataset")
    test_inputs, test_targets = _stack(test, "test") if test is not None else (None, None)
    return dataset_from_arrays(
        inputs,
        targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
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
    """Make one client from each torch ``Dataset``.

    Args:
        datasets: the records of each client.
        tests: the test records of each client; None holds out a part of the client's records.
        test_fraction: share of the records that is held out, if ``tests`` is None.
        seed: seed of the random choice of that share.
        scaling: see `Examples`.

    Returns:
        The clients, in the order of ``datasets``.

    Raises:
        InvalidValueError: records are not pairs of one shape and type, or the number of ``tests``
            is wrong.
    """
    if tests is not None and len(tests) != len(datasets):
        raise InvalidValueError(
            "tests",
            f"{len(tests)} datasets",
            f"must be {len(datasets)} datasets, one for each client",
        )
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
    columns: ColumnCoder | None = None,
    scaling: Scaling | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[ClientData, ...]:
    """Make one client from each file.

    ``.npz`` and ``.safetensors`` files contain the arrays ``inputs`` and ``targets``, and
    optionally ``test_inputs`` and ``test_targets``; without test arrays, a part of the records is
    held out.
    ``.csv`` files have a header line, one column with the class, and numbers or what
    ``columns`` declares in the other columns.

    Args:
        files: paths in the order of the clients, or a folder whose files are read in the order of
            their names.
        test_fraction: share of the records that is held out if a file has no test records.
        seed: seed of the random choice of that share.
        target: for CSV files: name of the column with the class.
        classes: for CSV files: names of the classes in order; None if the column has whole numbers
            from 0.
        columns: for CSV files: how the other columns become inputs (`parse_columns`); None if all
            of them have numbers.
        scaling: see `Examples`.
        max_bytes: reject a file that is larger, or that unpacks to more bytes.

    Returns:
        The clients, in the order of the files.

    Raises:
        InvalidValueError: a file cannot be read, or its records differ in shape or type from the
            other files'. The message names the file.
    """
    paths = _paths(files)
    clients = []
    for number, path in enumerate(paths):
        if path.suffix == ".csv":
            arrays = read_csv(path, target, classes, max_bytes, columns=columns)
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
    """Return the largest class of any client + 1, the number of outputs that a model needs."""
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
        raise InvalidValueError(
            "files", str(files), f"must contain a file that ends in {', '.join(SUFFIXES)}"
        )
    for path in paths:
        if path.suffix not in SUFFIXES or not path.is_file():
            raise InvalidValueError(
                "files", str(path), f"must be a file that ends in {', '.join(SUFFIXES)}"
            )
    return paths


def _examples(
    inputs: ArrayLike, targets: ArrayLike, scaling: Scaling | None, prefix: str = ""
) -> Examples:
    """Convert arrays of any numeric type to the types of `Examples`."""
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
            f"must be one whole number for each record of inputs {list(x.shape)}, at least one",
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
            field,
            type(dataset).__name__,
            f"must have pairs (input, class) with inputs of one shape ({error})",
        ) from error
    return inputs, targets


def _checked(names: Sequence[str], clients: list[ClientData]) -> tuple[ClientData, ...]:
    if not clients:
        raise InvalidValueError("clients", 0, "must be at least 1 client")
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
