"""Your own data in files: one file for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from noisewise.checks import no_repeats
from noisewise.data.columns import ColumnCoder
from noisewise.data.csv_records import read_csv
from noisewise.data.custom import check_clients, dataset_from_arrays
from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples, Scaling
from noisewise.data.own_arrays import concatenate_examples, examples_from, same_form
from noisewise.data.partition import ClientData, hold_out
from noisewise.data.record_files import MAX_BYTES, SUFFIXES, joined_inputs, read_arrays
from noisewise.errors import InvalidValueError

__all__ = ["clients_from_files", "dataset_from_csv", "dataset_from_files"]


def dataset_from_csv(
    files: str | Path | Sequence[str | Path],
    *,
    target: str = "target",
    classes: Sequence[str] | None = None,
    columns: ColumnCoder | None = None,
    scaling: Scaling | None = None,
    values: bool = False,
    person: str | None = None,
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
        values: the target column holds a number to predict, not a class.
        person: the column that says whose record a line is; it is no input.
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
        arrays = read_csv(path, target, classes, columns=columns, values=values, person=person)
        examples = examples_from(
            arrays["inputs"],
            arrays["targets"],
            scaling,
            prefix=f"{path}: ",
            values=values,
            persons=arrays.get("persons"),
        )
        parts.append(examples)
    n_classes = None if classes is None else len(classes)
    return _natural(paths, parts, n_classes, scaling, values, name)


def _natural(
    paths: Sequence[Path],
    parts: Sequence[Examples],
    n_classes: int | None,
    scaling: Scaling | None,
    values: bool,
    name: str,
) -> Dataset:
    """A dataset of files of one form, each of which is a real client."""
    same_form([(str(path), part) for path, part in zip(paths, parts, strict=True)])
    inputs, targets = concatenate_examples(parts)
    persons = None
    if all(part.persons is not None for part in parts):  # names of one file are its own
        persons = [f"{k} {owner}" for k, part in enumerate(parts) for owner in _owners(part)]
    return dataset_from_arrays(
        inputs,
        targets,
        groups=[p.stem for p, part in zip(paths, parts, strict=True) for _ in range(len(part))],
        persons=persons,
        n_classes=n_classes,
        scaling=scaling,
        values=values,
        name=name,
    )


def _owners(part: Examples) -> list[int]:
    return [] if part.persons is None else part.persons.tolist()


def dataset_from_files(
    files: str | Path | Sequence[str | Path],
    *,
    target: str = "target",
    columns: ColumnCoder | None = None,
    length: int | None = None,
    scaling: Scaling | None = None,
    images: bool = False,
    values: bool = False,
    dtype: str | None = None,
    n_classes: int | None = None,
    person: str | None = None,
    name: str = "files",
) -> Dataset:
    """Make a `Dataset` of one file for each real client, for the partition "natural".

    Args:
        files: paths, or a folder, of ``.npz``, ``.safetensors``, ``.csv`` and ``.parquet`` files.
            In npz and safetensors files, ``inputs.NAME`` are several arrays by name.
        target: for CSV and Parquet: the column with the target.
        columns: for CSV: how the other columns become inputs.
        length: for Parquet: length of the lists in columns of whole numbers.
        scaling: see `Examples`.
        images: see `dataset_from_arrays`, as ``values``, ``dtype`` and ``n_classes``.
        values: see ``images``.
        dtype: see ``images``.
        n_classes: see ``images``.
        person: for CSV and Parquet: the column that says whose record a line is; it is no input. In
            npz and safetensors files this is the array ``persons``.
        name: for reports.

    Raises:
        InvalidValueError: a file cannot be read or does not fit the others; the message names it.
    """
    paths = _paths(files)
    no_repeats("files", [path.stem for path in paths])
    parts = []
    for path in paths:
        arrays = _read_file(path, target, None, columns, MAX_BYTES, values, length, person)
        if "test_targets" in arrays:
            allowed = "must have no test arrays: records are held out of each client's own"
            raise InvalidValueError("files", str(path), allowed)
        parts.append(
            examples_from(
                joined_inputs(arrays),
                arrays["targets"],
                scaling,
                prefix=f"{path}: ",
                values=values,
                images=images,
                dtype=dtype,
                persons=arrays.get("persons"),
            )
        )
    return _natural(paths, parts, n_classes, parts[0].scaling, values, name)


def _read_file(
    path: Path,
    target: str,
    classes: Sequence[str] | None,
    columns: ColumnCoder | None,
    max_bytes: int,
    values: bool,
    length: int | None = None,
    person: str | None = None,
) -> dict[str, NDArray[Any]]:
    if path.suffix == ".csv":
        ways: Any = {"columns": columns, "values": values, "person": person}
        return read_csv(path, target, classes, max_bytes, **ways)
    if path.suffix == ".parquet":
        from noisewise.data.parquet_records import read_parquet  # needs the extra ``parquet``

        return read_parquet(path, target, length=length, max_bytes=max_bytes, person=person)
    arrays = read_arrays(path, max_bytes)
    if person is not None and "persons" not in arrays:
        raise InvalidValueError("person", person, f"{path} must have the array persons")
    return arrays


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
    images: bool = False,
    values: bool = False,
    dtype: str | None = None,
    length: int | None = None,
    person: str | None = None,
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
        images: see `dataset_from_arrays`, as ``values`` and ``dtype``.
        values: see ``images``.
        dtype: see ``images``.
        length: see `dataset_from_files`, as ``person``.
        person: see ``length``.

    Returns:
        The clients, in the order of the files.

    Raises:
        InvalidValueError: a file cannot be read, or its records differ in shape or type from the
            other files'. The message names the file.
    """
    paths = _paths(files)
    clients = []
    for number, path in enumerate(paths):
        arrays = _read_file(path, target, classes, columns, max_bytes, values, length, person)
        ways: Any = {"values": values, "images": images, "dtype": dtype}
        records = examples_from(
            joined_inputs(arrays),
            arrays["targets"],
            scaling,
            prefix=f"{path}: ",
            persons=arrays.get("persons"),
            **ways,
        )
        if "test_targets" in arrays:
            test = examples_from(
                joined_inputs(arrays, "test_inputs"),
                arrays["test_targets"],
                scaling,
                prefix=f"{path}: test_",
                **ways,
            )
            clients.append(ClientData(records, test))
        else:
            clients.append(hold_out(records, test_fraction, seed, number))
    return check_clients([str(path) for path in paths], clients)


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
