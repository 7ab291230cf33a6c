r"""Read records from a CSV file: one line is one record, and an invalid line affects no other line.

- The first line is the header: names of columns, in UTF-8, with or without a byte order mark.
- Every other line is a record. A line ends with ``\n`` or ``\r\n``; the last line may also end
  with the file. A line that is empty or has only blanks is not a record.
- Each line is parsed alone. A quoted cell cannot continue on the next line. A carriage return that
  is not before ``\n`` does not end a line, but makes the line invalid.
- A cell is a decimal number in ASCII: digits, one point, a sign, an exponent, blanks around it;
  or, with declared columns, what `noisewise.data.columns` allows. The class is written in digits,
  or is one of the given names.
- A line has at most `CELL_BYTES` bytes for each column of the header. The reader never has more
  than one such line in memory as text.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from noisewise.data.person_ids import PersonNumbers, person_key
from noisewise.data.record_files import MAX_BYTES, check_size
from noisewise.errors import InvalidValueError

if TYPE_CHECKING:
    from noisewise.data.columns import ColumnCoder

__all__ = ["CELL_BYTES", "decimal_number", "read_csv"]

CELL_BYTES = 256
"""Largest number of bytes in a line, for each column of the header."""

_HEADER_BYTES = 1 << 24
_BLOCK_CELLS = 1 << 20
_SKIP_BYTES = 1 << 16
_NUMBER = b"0123456789+-.eE \t"  # with these characters, `float` accepts only decimal numbers
_NUMBERS = _NUMBER + b","


def read_csv(
    path: Path,
    target: str = "target",
    classes: Sequence[str] | None = None,
    max_bytes: int | None = MAX_BYTES,
    *,
    columns: ColumnCoder | None = None,
    keep_bad: bool = False,
    values: bool = False,
    person: str | None = None,
) -> dict[str, NDArray[Any]]:
    """Read a CSV file with a header: one column is the class, the others are inputs.

    Args:
        path: the file.
        target: name of the column with the class.
        classes: names of the classes in order; None if the column has whole numbers from 0.
        max_bytes: reject a larger file before it is read; None sets no limit.
        columns: how the other columns become inputs; None if all of them have numbers.
        keep_bad: an invalid line becomes a record of NaN with class -1, or with ``values`` target
            NaN, instead of an error.
        values: the column ``target`` has numbers to predict instead of classes.
        person: name of the column that says whose record a line is, as text (`person_key`). It is
            no input. With ``keep_bad``, a blank becomes person -1 instead of an error.

    Returns:
        ``inputs`` [N, number of inputs] as float32 and ``targets`` [N] as int64, or with ``values``
        as float32; with ``person``, ``persons`` [N] as int64, a number for each person.

    Raises:
        InvalidValueError: the file is too large, its header is invalid, or a line is invalid. The
            message names the line and the column.
    """
    check_size(path, path.stat().st_size, max_bytes)
    with open(path, "rb") as file:
        table = _Table.of(file, path, target, classes, columns, values, person)
        n_inputs = len(table.header) - len(table.other_columns)
        width = n_inputs if columns is None else columns.width
        owners, person_numbers = list[int](), PersonNumbers()
        per_block = max(1, _BLOCK_CELLS // width)
        inputs = [np.empty((0, width), dtype=np.float32)]
        rows: list[list[float]] = []
        targets: list[float] = []
        for number, line in enumerate(_lines(file, CELL_BYTES * len(table.header)), start=2):
            if line is not None and not line.strip(b" \t"):
                continue
            try:
                row, label, owner = table.record(line, number)
                if not keep_bad:
                    table.check_finite(row, number)
                    table.check_person(owner, number)
            except InvalidValueError:
                if not keep_bad:
                    raise
                row, label, owner = [math.nan] * width, math.nan if values else -1, b""
            rows.append(row)
            targets.append(label)
            owners.append(person_numbers.number(owner))
            if len(rows) == per_block:
                inputs.append(_block(rows))
                rows = []
    if rows:
        inputs.append(_block(rows))
    labels = _block([targets])[0] if values else np.asarray(targets, dtype=np.int64)
    arrays = {"inputs": np.concatenate(inputs), "targets": labels}
    return arrays if person is None else {**arrays, "persons": np.asarray(owners, dtype=np.int64)}


def decimal_number(cell: bytes) -> float:
    """Return the decimal number in a cell: in ASCII, with blanks around it.

    A number above the largest float64 becomes infinite.

    Raises:
        ValueError: the cell is not a decimal number. ``nan``, ``inf``, ``0x10``, ``1_000`` and
            digits of other scripts are not.

    Example:
        >>> decimal_number(b" -1.5e3 ")
        -1500.0
    """
    if cell.translate(None, _NUMBER):
        raise ValueError("not a decimal number")
    return float(cell)


@dataclass(frozen=True)
class _Table:
    """The header of a file, which is public, and the names of the classes."""

    path: Path
    header: list[str]
    class_column: int
    classes: Mapping[bytes, int]  # empty if classes are whole numbers
    coder: ColumnCoder | None
    input_columns: tuple[int, ...]  # of the coder
    values: bool = False
    person_column: int | None = None

    @property
    def other_columns(self) -> tuple[int, ...]:
        """The columns of the class and of the person, which are no inputs; the last one first."""
        both = {self.class_column, self.person_column} - {None}
        return tuple(sorted((column for column in both if column is not None), reverse=True))

    @classmethod
    def of(
        cls,
        file: BinaryIO,
        path: Path,
        target: str,
        classes: Sequence[str] | None,
        coder: ColumnCoder | None,
        values: bool = False,
        person: str | None = None,
    ) -> _Table:
        """Read the header, the first line of the file."""
        line = file.readline(_HEADER_BYTES + 1)
        if len(line) > _HEADER_BYTES:
            allowed = f"its first line must be a header of at most {_HEADER_BYTES} bytes"
            raise InvalidValueError("file", str(path), allowed)
        try:
            text = line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
            cells = _cells(text)
        except (ValueError, csv.Error) as error:
            allowed = f"its first line must be a header in UTF-8, ended by a newline ({error})"
            raise InvalidValueError("file", str(path), allowed) from error
        header = [name.strip() for name in cells]
        if header.count(target) != 1 or len(header) < 2:
            names = str(header) if len(text) < 1000 else f"in its {len(header)}-column header"
            raise InvalidValueError(
                "target",
                target,
                f"must be one of the columns {names} of {path}, exactly once, and the file must "
                "have another column",
            )
        if person is not None and (header.count(person) != 1 or person == target):
            names = str(header) if len(text) < 1000 else f"in its {len(header)}-column header"
            allowed = f"must be one of the columns {names} of {path}, exactly once, not the target"
            raise InvalidValueError("person", person, allowed)
        if person is not None and len(header) < 3:
            raise InvalidValueError("file", str(path), "must have a column with inputs")
        others = [target] if person is None else [target, person]
        numbers = {name.encode(): number for number, name in enumerate(classes or ())}
        try:
            input_columns = () if coder is None else coder.places(header, others)
        except InvalidValueError as error:
            raise InvalidValueError(f"{path}: {error.field}", error.value, error.allowed) from error
        person_column = None if person is None else header.index(person)
        return cls(
            path, header, header.index(target), numbers, coder, input_columns, values, person_column
        )

    def record(self, line: bytes | None, number: int) -> tuple[list[float], float, bytes]:
        """Return the numbers, the class and the person of one line.

        Args:
            line: None if it is too long.
            number: of the line.
        """
        if line is None:
            limit = CELL_BYTES * len(self.header)
            raise InvalidValueError(
                "file", str(self.path), f"line {number} has more than {limit} bytes"
            )
        plain = not line.translate(None, _NUMBERS)
        try:
            cells = line.split(b",") if plain else [c.encode() for c in _cells(line.decode())]
        except (ValueError, csv.Error) as error:
            raise InvalidValueError(
                "file", str(self.path), f"line {number} cannot be read ({error})"
            ) from error
        if len(cells) != len(self.header):
            raise InvalidValueError(
                "file",
                str(self.path),
                f"line {number} has {len(cells)} cells, the header has {len(self.header)}",
            )
        label = self._class(cells[self.class_column], number)
        owner = b"" if self.person_column is None else cells[self.person_column]
        if self.coder is not None:
            return self._coded(self.coder, cells, number), label, owner
        for column in self.other_columns:
            del cells[column]
        try:
            return list(map(float if plain else decimal_number, cells)), label, owner
        except ValueError as error:
            raise self._not_a_number(cells, number) from error

    def _coded(self, coder: ColumnCoder, cells: list[bytes], number: int) -> list[float]:
        try:
            return coder.encode_cells([cells[column].decode() for column in self.input_columns])
        except InvalidValueError as error:
            where = f"{self.path}, line {number}, column {error.field}"
            raise InvalidValueError(where, error.value, error.allowed) from error

    def check_finite(self, row: list[float], number: int) -> None:
        """Raise `InvalidValueError` if a number of the row is above the largest float64."""
        if not all(map(math.isfinite, row)):
            column = next(i for i, value in enumerate(row) if not math.isfinite(value))
            raise InvalidValueError(self._where(number, column), row[column], _FINITE)

    def check_person(self, cell: bytes, number: int) -> None:
        """Raise `InvalidValueError` if the file has a column of persons and this cell is blank."""
        if self.person_column is not None and not person_key(cell):
            where = f"{self.path}, line {number}, column {self.header[self.person_column]}"
            raise InvalidValueError(where, _short(cell), "must be the identifier of a person")

    def _class(self, cell: bytes, number: int) -> float:
        name = cell.strip(b" \t")
        if self.values:
            return self._value(cell, number)
        if self.classes:
            if name in self.classes:
                return self.classes[name]
            allowed = f"must be one of {', '.join(label.decode() for label in self.classes)}"
        else:
            if name.isdigit() and len(name) < 19:  # fits into 64 bits
                return int(name)
            allowed = "must be a whole number >= 0; if classes have names, pass them as classes"
        where = f"{self.path}, line {number}, column {self.header[self.class_column]}"
        raise InvalidValueError(where, _short(cell), allowed)

    def _value(self, cell: bytes, number: int) -> float:
        """The number to predict, which must be finite in float32."""
        try:
            value = decimal_number(cell)
        except ValueError:
            value = math.nan
        if abs(value) <= float(np.finfo(np.float32).max):
            return value
        where = f"{self.path}, line {number}, column {self.header[self.class_column]}"
        raise InvalidValueError(where, _short(cell), _FINITE)

    def _not_a_number(self, cells: list[bytes], number: int) -> InvalidValueError:
        for column, cell in enumerate(cells):
            try:
                decimal_number(cell)
            except ValueError:
                return InvalidValueError(self._where(number, column), _short(cell), _FINITE)
        raise AssertionError("every cell is a number")

    def _where(self, number: int, column: int) -> str:
        """Return line and column for a message; ``column`` counts inputs only."""
        for other in reversed(self.other_columns):
            column += column >= other
        name = self.header[column]
        return f"{self.path}, line {number}, column {name}"


_FINITE = "must be a finite number"


def _short(cell: bytes) -> str:
    text = cell[:60].decode(errors="replace")
    return text if len(cell) <= 60 else f"{text}..."


def _cells(text: str) -> list[str]:
    """Return the cells of one line with quotes; an unbalanced quote raises `csv.Error`."""
    if "\r" in text:
        raise ValueError("carriage return inside the line")
    return next(csv.reader([text], strict=True), [])


def _lines(file: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """Yield the remaining lines without line ends; None for a line of more than ``limit`` bytes."""
    while line := file.readline(limit + 2):
        if line.endswith(b"\n"):
            content = line[:-1].removesuffix(b"\r")
            yield content if len(content) <= limit else None
        elif len(line) <= limit:
            yield line  # the last line
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(_SKIP_BYTES)
            yield None


def _block(rows: list[list[float]]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # above the largest float32: infinite, so an invalid record
        return np.array(rows, dtype=np.float32)
