"""Read records from a Parquet file; needs pyarrow, the extra ``parquet``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.data.person_ids import number_persons
from noisewise.data.record_files import MAX_BYTES, check_size
from noisewise.data.sequences import pad_sequences
from noisewise.errors import InvalidValueError, MissingExtraError

__all__ = ["read_parquet"]


def read_parquet(
    path: Path,
    target: str = "target",
    *,
    length: int | None = None,
    max_bytes: int | None = MAX_BYTES,
    person: str | None = None,
) -> dict[str, NDArray[Any]]:
    """Read a Parquet file: one column is the target, the others are inputs.

    Columns of numbers become one array ``inputs`` [N, columns]. If a column has lists, every column
    is an array of its own, ``inputs.NAME``; lists of whole numbers are cut or filled up to
    ``length``, other lists must have equal lengths.

    Args:
        path: the file.
        target: name of the column with the target.
        length: of the lists; required if there are lists of whole numbers.
        max_bytes: reject a file that is larger, or that unpacks to more bytes; None sets no limit.
        person: name of the column, of whole numbers or text, that says whose record a row is.

    Returns:
        Arrays by name, with ``targets``, and ``persons`` if that column is given.

    Raises:
        InvalidValueError: the file is damaged or too large, a cell is missing, or a column has
            another type.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        message = "Parquet files need pyarrow: pip install 'noisewise[parquet]'"
        raise MissingExtraError(message) from None
    check_size(path, path.stat().st_size, max_bytes)
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
        check_size(path, sum(group.total_byte_size for group in groups), max_bytes)
        table = file.read()
    except InvalidValueError:
        raise
    except Exception as error:  # pyarrow raises many types
        raise InvalidValueError("file", str(path), f"cannot be read ({error})") from error
    names = table.column_names
    if names.count(target) != 1 or len(names) < 2:
        allowed = f"must be one of the columns {names} of {path}, and not the only one"
        raise InvalidValueError("target", target, allowed)
    owners = _persons(table, person, target, path)
    names = [name for name in names if name != person]
    columns = {
        name: _column(table.column(name), f"{path}: column {name}", length, name == target)
        for name in names
    }
    targets = columns.pop(target)
    if all(column.ndim == 1 for column in columns.values()):
        arrays = {"inputs": np.stack(list(columns.values()), axis=1)}
    else:
        arrays = {f"inputs.{name}": column for name, column in columns.items()}
    return {**arrays, "targets": targets, **owners}


def _persons(table: Any, person: str | None, target: str, path: Path) -> dict[str, NDArray[Any]]:
    """The column of persons; refused by its declared type, whatever its values are."""
    if person is None:
        return {}
    names = table.column_names
    if names.count(person) != 1 or person == target or len(names) < 3:
        allowed = f"must be one of the columns {names} of {path}, not the target or the only input"
        raise InvalidValueError("person", person, allowed)
    column = table.column(person)
    kind = str(column.type)
    if not kind.startswith(("int", "uint", "string", "large_string", "dictionary")):
        allowed = "must be whole numbers or text: a continuous value identifies no person"
        raise InvalidValueError(f"{path}: column {person}", kind, allowed)
    return {"persons": number_persons(column.to_pylist(), len(column), f"{path}: column {person}")}


def _column(column: Any, field: str, length: int | None, is_target: bool) -> NDArray[Any]:
    if column.null_count:
        raise InvalidValueError(field, f"{column.null_count} missing cells", "must have no null")
    rows = column.to_pylist()
    if rows and isinstance(rows[0], list):
        try:
            arrays = [np.asarray(row) for row in rows]
        except ValueError as error:
            raise InvalidValueError(field, "lists", f"must have equal lengths ({error})") from error
        for number, array in enumerate(arrays):
            if array.dtype.kind not in "biuf":
                where, allowed = f"{field}, record {number}", "must be a list of numbers, no nulls"
                raise InvalidValueError(where, f"list of {array.dtype}", allowed)
        whole = all(array.dtype.kind in "biu" for array in arrays if array.size)
        if whole and arrays[0].ndim == 1:
            if length is None:
                allowed = "must be given: lists are cut or filled up to it"
                raise InvalidValueError("length", None, f"{allowed} ({field})")
            return pad_sequences(arrays, length, fill=-100 if is_target else 0, field=field)[0]
        try:
            return np.stack(arrays)
        except ValueError as error:
            raise InvalidValueError(field, "lists", f"must have equal lengths ({error})") from error
    values = np.asarray(rows)
    if values.dtype.kind not in "biuf":
        raise InvalidValueError(field, str(column.type), "must have numbers or lists of numbers")
    return values
