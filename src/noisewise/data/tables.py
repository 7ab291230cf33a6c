r"""Records in a CSV table: one line is one record, and a fault of a line concerns that line alone.

- The first line is the header: names of columns, in UTF-8, with or without a byte order mark.
- Every other line is a record. A line ends with ``\n`` or ``\r\n``, the last one also with the
  end of the file. An empty line, or one of blanks only, is no record.
- A line is parsed by itself. A quote never reaches into the next line. A carriage return elsewhere
  than before ``\n`` does not end a line: it makes this line a bad one.
- A cell is a decimal number in ASCII: digits, one point, a sign, an exponent, blanks around. The
  class is written in digits, or is one of the given names.
- A line holds at most `CELL_BYTES` bytes for each column of the header. No more than that is ever
  read into memory at once.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from noisewise.data.files import MAX_BYTES, check_size
from noisewise.errors import InvalidValueError

__all__ = ["CELL_BYTES", "decimal_number", "read_csv"]

CELL_BYTES = 256
"""Longest line, in bytes, for each column of the header."""

_HEADER_BYTES = 1 << 24
_BLOCK_CELLS = 1 << 20
_SKIP_BYTES = 1 << 16
_NUMBER = b"0123456789+-.eE \t"  # with these alone, `float` reads nothing but decimal numbers
_NUMBERS = _NUMBER + b","


def read_csv(
    path: Path,
    target: str = "target",
    classes: Sequence[str] | None = None,
    max_bytes: int | None = MAX_BYTES,
    *,
    keep_bad: bool = False,
) -> dict[str, NDArray[Any]]:
    """Read a table with a header: one column is the class, the others are numbers.

    Args:
        path: the file.
        target: name of the column with the class.
        classes: names of the classes in order; None where the column holds whole numbers from 0.
        max_bytes: refuse a larger file before anything is read; None sets no limit.
        keep_bad: a line with a fault becomes a record of NaN with class -1, in place of an error.

    Returns:
        ``inputs`` [N, columns] as float32 and ``targets`` [N] as int64.

    Raises:
        InvalidValueError: the header is wrong; or a line has a fault, and the message names line
            and column.
    """
    check_size(path, path.stat().st_size, max_bytes)
    with open(path, "rb") as file:
        table = _Table.of(file, path, target, classes)
        width = len(table.header) - 1
        per_block = max(1, _BLOCK_CELLS // width)
        inputs = [np.empty((0, width), dtype=np.float32)]
        rows: list[list[float]] = []
        targets: list[int] = []
        for number, line in enumerate(_lines(file, CELL_BYTES * (width + 1)), start=2):
            if line is not None and not line.strip(b" \t"):
                continue
            try:
                row, label = table.record(line, number)
                if not keep_bad:
                    table.check_finite(row, number)
            except InvalidValueError:
                if not keep_bad:
                    raise
                row, label = [math.nan] * width, -1
            rows.append(row)
            targets.append(label)
            if len(rows) == per_block:
                inputs.append(_block(rows))
                rows = []
    if rows:
        inputs.append(_block(rows))
    return {"inputs": np.concatenate(inputs), "targets": np.asarray(targets, dtype=np.int64)}


def decimal_number(cell: bytes) -> float:
    """The number in a cell: decimal, in ASCII, with blanks around; infinite beyond float64.

    Raises:
        ValueError: it is none. ``nan``, ``inf``, ``0x10``, ``1_000`` and digits of other scripts
            are none.

    Example:
        >>> decimal_number(b" -1.5e3 ")
        -1500.0
    """
    if cell.translate(None, _NUMBER):
        raise ValueError("not a decimal number")
    return float(cell)


@dataclass(frozen=True)
class _Table:
    """What the header says, which is public: the same for every line."""

    path: Path
    header: list[str]
    place: int  # of the class
    classes: Mapping[bytes, int]  # empty where classes are whole numbers

    @classmethod
    def of(cls, file: BinaryIO, path: Path, target: str, classes: Sequence[str] | None) -> _Table:
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
                "target", target, f"must be one of the columns {names} of {path}"
            )
        numbers = {name.encode(): number for number, name in enumerate(classes or ())}
        return cls(path, header, header.index(target), numbers)

    def record(self, line: bytes | None, number: int) -> tuple[list[float], int]:
        """Numbers and class of one line; None stands for a line that is too long."""
        if line is None:
            most = CELL_BYTES * len(self.header)
            raise InvalidValueError("file", str(self.path), f"line {number} exceeds {most} bytes")
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
                f"line {number} has {len(cells)} cells, not {len(self.header)}",
            )
        label = self._class(cells.pop(self.place), number)
        try:
            return list(map(float if plain else decimal_number, cells)), label
        except ValueError as error:
            raise self._no_number(cells, number) from error

    def check_finite(self, row: list[float], number: int) -> None:
        """Refuse a number beyond float64."""
        if not all(map(math.isfinite, row)):
            column = next(i for i, value in enumerate(row) if not math.isfinite(value))
            raise InvalidValueError(self._where(number, column), row[column], _FINITE)

    def _class(self, cell: bytes, number: int) -> int:
        name = cell.strip(b" \t")
        if self.classes:
            if name in self.classes:
                return self.classes[name]
            allowed = f"must be one of {', '.join(known.decode() for known in self.classes)}"
        else:
            if name.isdigit() and len(name) < 19:  # what fits into 64 bits
                return int(name)
            allowed = "must be a whole number >= 0, or give classes"
        where = f"{self.path}, line {number}, column {self.header[self.place]}"
        raise InvalidValueError(where, _short(cell), allowed)

    def _no_number(self, cells: list[bytes], number: int) -> InvalidValueError:
        for column, cell in enumerate(cells):
            try:
                decimal_number(cell)
            except ValueError:
                return InvalidValueError(self._where(number, column), _short(cell), _FINITE)
        raise AssertionError("every cell is a number")

    def _where(self, number: int, column: int) -> str:
        """Line and column for a message; ``column`` does not count the class."""
        name = self.header[column + (column >= self.place)]
        return f"{self.path}, line {number}, column {name}"


_FINITE = "must be a finite number"


def _short(cell: bytes) -> str:
    text = cell[:60].decode(errors="replace")
    return text if len(cell) <= 60 else f"{text}..."


def _cells(text: str) -> list[str]:
    """The cells of one line that may have quotes; an unbalanced quote is a `csv.Error`."""
    if "\r" in text:
        raise ValueError("a carriage return within the line")
    return next(csv.reader([text], strict=True), [])


def _lines(file: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """The lines that follow, without their ends; None for one of more than ``limit`` bytes."""
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
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and a bad record
        return np.array(rows, dtype=np.float32)
