"""Records in files of one's own: npz, safetensors and CSV, none of which can run code."""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError

__all__ = ["SUFFIXES", "read_arrays", "read_csv"]

MAX_BYTES = 4 << 30
KEYS = ("inputs", "targets", "test_inputs", "test_targets")


def read_arrays(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``.npz`` or ``.safetensors`` file.

    Args:
        path: holds ``inputs`` and ``targets``, and possibly ``test_inputs`` and ``test_targets``.
        max_bytes: refuse more than this, before anything is read.

    Raises:
        InvalidValueError: the file is missing, too large, damaged, or has other arrays.
    """
    _check_size(path, path.stat().st_size, max_bytes)
    try:
        arrays = _READERS[path.suffix](path, max_bytes)
    except InvalidValueError:
        raise
    except Exception as error:  # safetensors and zipfile raise many kinds
        raise InvalidValueError("file", str(path), f"cannot be read ({error})") from error
    wanted = {frozenset(KEYS[:2]), frozenset(KEYS)}
    if frozenset(arrays) not in wanted:
        raise InvalidValueError(
            "file",
            str(path),
            f"must hold inputs and targets (and test_inputs, test_targets), not {sorted(arrays)}",
        )
    return arrays


def _read_npz(path: Path, max_bytes: int) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _check_size(path, sum(entry.file_size for entry in entries), max_bytes)
        for entry in entries:  # a header can claim any shape: believe none that does not fit
            with archive.open(entry) as member:
                version = npy.read_magic(member)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(member)
                if member.tell() + math.prod(shape) * dtype.itemsize != entry.file_size:
                    raise InvalidValueError("file", str(path), f"{entry.filename} is damaged")
    with np.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def _read_safetensors(path: Path, max_bytes: int) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file  # checks the sizes in its header against the file's

    arrays: dict[str, NDArray[Any]] = load_file(path)
    return arrays


_READERS: Mapping[str, Callable[[Path, int], dict[str, NDArray[Any]]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}
SUFFIXES = (*_READERS, ".csv")


def read_csv(
    path: Path,
    target: str = "target",
    classes: Sequence[str] | None = None,
    max_bytes: int = MAX_BYTES,
    *,
    keep_bad: bool = False,
) -> dict[str, NDArray[Any]]:
    """Read a table with a header row: one column is the class, the others are numbers.

    Args:
        path: the file.
        target: name of the column with the class.
        classes: names of the classes in order; None where the column holds whole numbers from 0.
        max_bytes: refuse more than this, before anything is read.
        keep_bad: read a cell that is no number as NaN and one that is no class as -1, and a line
            with too many or too few cells as nothing but such, in place of an error.

    Returns:
        ``inputs`` [N, columns] as float32 and ``targets`` [N].

    Raises:
        InvalidValueError: a cell is no number or no class; the message names line and column.
    """
    _check_size(path, path.stat().st_size, max_bytes)
    numbers = {name: number for number, name in enumerate(classes or ())}
    inputs: list[list[float]] = []
    targets: list[int] = []
    errors = "replace" if keep_bad else "strict"
    with open(path, newline="", encoding="utf-8-sig", errors=errors) as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        if header.count(target) != 1 or len(header) < 2:
            raise InvalidValueError(
                "target", target, f"must be one of the columns {header} of {path}"
            )
        place = header.index(target)
        for row in rows:
            if not row:
                continue
            if len(row) != len(header) and keep_bad:
                targets.append(-1)
                inputs.append([math.nan] * (len(header) - 1))
                continue
            if len(row) != len(header):
                raise InvalidValueError(
                    "file",
                    str(path),
                    f"line {rows.line_num} has {len(row)} cells, not {len(header)}",
                )
            where = f"{path}, line {rows.line_num}, column "
            targets.append(_class(row.pop(place).strip(), numbers, where + target, keep_bad))
            names = header[:place] + header[place + 1 :]
            cells = zip(row, names, strict=True)
            inputs.append([_number(cell, where + name, keep_bad) for cell, name in cells])
    return {
        "inputs": np.asarray(inputs, dtype=np.float32).reshape(len(inputs), len(header) - 1),
        "targets": np.asarray(targets, dtype=np.int64),
    }


def _number(cell: str, where: str, keep_bad: bool) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not keep_bad and not math.isfinite(value):
        raise InvalidValueError(where, cell, "must be a finite number")
    return value


def _class(cell: str, numbers: Mapping[str, int], where: str, keep_bad: bool) -> int:
    if numbers and cell in numbers:
        return numbers[cell]
    if not numbers and cell.isdecimal() and len(cell) < 19:  # what fits into 64 bits
        return int(cell)
    if keep_bad:
        return -1
    if numbers:
        raise InvalidValueError(where, cell, f"must be one of {', '.join(numbers)}")
    raise InvalidValueError(where, cell, "must be a whole number >= 0, or give classes")


def _check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidValueError("file", str(path), f"holds {size} bytes, more than {max_bytes}")
