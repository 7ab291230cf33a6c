"""Readers of the tables of real federations: files of several formats become coded records."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.data.columns import CategoryInput, ColumnCoder, NumberInput
from noisewise.data.csv_records import decimal_number
from noisewise.errors import InvalidValueError

__all__ = [
    "CodedTable",
    "Roles",
    "TableReader",
    "code_rows",
    "read_fars",
    "read_heart",
    "read_vietnam",
]

_BLOCK = 8192  # rows whose cells are in memory at a time


@dataclass(frozen=True, eq=False)
class CodedTable:
    """Records of a table.

    Args:
        inputs: [N, width].
        targets: [N], classes from 0.
        owners: the name of the client for each record.
    """

    inputs: NDArray[np.float32]
    targets: NDArray[np.int64]
    owners: tuple[str, ...]

    @classmethod
    def join(cls, parts: Sequence[CodedTable]) -> CodedTable:
        """All records of several tables, one table after the other."""
        return cls(
            np.concatenate([part.inputs for part in parts]),
            np.concatenate([part.targets for part in parts]),
            tuple(owner for part in parts for owner in part.owners),
        )


TableReader = Callable[[Mapping[str, Path], ColumnCoder, Sequence[str]], CodedTable]
"""(files of the dataset by name, coder, names of the classes) -> records."""


@dataclass(frozen=True)
class Roles:
    """Which columns of a table are not inputs.

    Args:
        target: the column with the class.
        classify: the number of the class from its cell.
        client: the column with the client; None if all rows belong to one client.
        owner: the name of the client from its cell (an empty text without ``client``).
    """

    target: str
    classify: Callable[[str], int]
    client: str | None
    owner: Callable[[str], str]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that need no declaration."""
        return (self.target,) if self.client is None else (self.target, self.client)

    def places(self, header: Sequence[str]) -> tuple[int, int | None]:
        """Return where class and client are in a header."""
        names = list(header)
        client = None if self.client is None else names.index(self.client)
        return names.index(self.target), client


def code_rows(
    rows: Iterable[Sequence[str]],
    header: Sequence[str],
    coder: ColumnCoder,
    roles: Roles,
    file: str,
    first_line: int,
) -> CodedTable:
    """Code the rows of a table, each by itself.

    Args:
        rows: the cells of each record.
        header: names of the columns.
        coder: how columns become inputs.
        roles: the other columns.
        file: name of the table, for messages.
        first_line: line of the first row in the file, for messages.

    Raises:
        InvalidValueError: the columns do not fit the header, or a cell is invalid; the message
            names line and column.
    """
    try:
        positions = coder.places(header, roles.columns)
    except InvalidValueError as error:
        raise InvalidValueError(f"{file}: {error.field}", error.value, error.allowed) from error
    columns = [_Column(column, {}, []) for column in coder.inputs]
    target, client = roles.places(header)
    inputs = [np.empty((0, coder.width), dtype=np.float32)]
    targets: list[int] = []
    owners: list[str] = []
    iterator = iter(rows)
    line = first_line
    while block := list(islice(iterator, _BLOCK)):
        for number, row in enumerate(block):
            try:
                if len(row) != len(header):
                    raise InvalidValueError("cells", len(row), f"must be {len(header)}")
                targets.append(roles.classify(row[target]))
                owners.append(roles.owner("" if client is None else row[client]))
            except InvalidValueError as error:
                raise _at(file, line + number, error) from error
        coded = [
            column.encode([row[position] for row in block], file, line)
            for column, position in zip(columns, positions, strict=True)
        ]
        inputs.append(np.concatenate(coded, axis=1))
        line += len(block)
    return CodedTable(np.concatenate(inputs), np.asarray(targets, dtype=np.int64), tuple(owners))


@dataclass(frozen=True)
class _Column:
    """Codes one column of many rows; a cell that occurs again is not coded again."""

    column: NumberInput | CategoryInput
    code_numbers: dict[str, int]  # cell -> position of its code in ``codes``
    codes: list[tuple[float, ...]]

    def encode(self, cells: Sequence[str], file: str, line: int) -> NDArray[np.float32]:
        """Return the inputs [len(cells), number of inputs]."""
        positions = np.empty(len(cells), dtype=np.int64)
        for number, cell in enumerate(cells):
            position = self.code_numbers.get(cell)
            if position is None:
                try:
                    self.codes.append(self.column.encode(cell))
                except InvalidValueError as error:
                    raise _at(file, line + number, error) from error
                position = self.code_numbers[cell] = len(self.codes) - 1
            positions[number] = position
        table: NDArray[np.float32] = np.array(self.codes, dtype=np.float32)[positions]
        return table


def _at(file: str, line: int, error: InvalidValueError) -> InvalidValueError:
    where = f"{file}, line {line}, column {error.field}"
    return InvalidValueError(where, error.value, error.allowed)


def _class_of(column: str, names: Sequence[str]) -> Callable[[str], int]:
    numbers = {name: number for number, name in enumerate(names)}

    def classify(cell: str) -> int:
        if cell not in numbers:
            raise InvalidValueError(column, cell, f"must be one of {', '.join(numbers)}")
        return numbers[cell]

    return classify


def _above_zero(column: str) -> Callable[[str], int]:
    def classify(cell: str) -> int:
        try:
            return int(decimal_number(cell.encode(errors="replace")) > 0)
        except ValueError:
            raise InvalidValueError(column, cell, "must be a number") from None

    return classify


def read_fars(files: Mapping[str, Path], coder: ColumnCoder, classes: Sequence[str]) -> CodedTable:
    """Read ``fars.dat``: the class is INJURY_SEVERITY, a client is a state."""
    roles = Roles("INJURY_SEVERITY", _class_of("INJURY_SEVERITY", classes), "CASE_STATE", str)
    with open(files["fars.dat"], encoding="utf-8") as file:
        header, first_line = _keel_header(file, "fars.dat")
        rows = (line.rstrip("\n").split(",") for line in file if line.strip())
        return code_rows(rows, header, coder, roles, "fars.dat", first_line)


def _keel_header(lines: Iterator[str], name: str) -> tuple[list[str], int]:
    """Names of the columns of a KEEL file, and the line of its first record."""
    header = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words[:1] == ["@attribute"] and len(words) > 1:
            header.append(words[1])
        elif words[:1] == ["@data"]:
            return header, number + 1
    raise InvalidValueError("file", name, "must have a line @data")


_HEART_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
    "slope", "ca", "thal", "num",
)  # fmt: skip
_HOSPITALS = {
    "processed.cleveland.data": "cleveland",
    "processed.hungarian.data": "hungary",
    "processed.switzerland.data": "switzerland",
    "processed.va.data": "va-long-beach",
}


def read_heart(files: Mapping[str, Path], coder: ColumnCoder, classes: Sequence[str]) -> CodedTable:
    """Read the ``processed.*.data`` files: the class is whether num > 0, a client is a hospital."""
    parts = []
    for name, hospital in _HOSPITALS.items():
        roles = Roles("num", _above_zero("num"), None, lambda _, hospital=hospital: hospital)  # type: ignore[misc]
        with open(files[name], encoding="ascii") as file:
            rows = (line.strip().split(",") for line in file if line.strip())
            parts.append(code_rows(rows, _HEART_COLUMNS, coder, roles, name, 1))
    return CodedTable.join(parts)


def read_vietnam(
    files: Mapping[str, Path], coder: ColumnCoder, classes: Sequence[str]
) -> CodedTable:
    """Read ``VietNamI.csv``: the class is whether pharvis > 0, a client is a commune."""
    name = "VietNamI.csv"
    roles = Roles(
        "pharvis", _above_zero("pharvis"), "commune", lambda cell: f"commune-{cell.zfill(3)}"
    )
    with open(files[name], encoding="ascii", newline="") as file:
        rows = csv.reader(file, strict=True)
        header = [column or "row" for column in next(rows)]  # R leaves the first name empty
        return code_rows(rows, header, coder, roles, name, 2)
