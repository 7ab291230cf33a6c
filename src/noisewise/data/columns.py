"""`[columns]`: how each column of a table becomes inputs of a model, declared in public.

Type, range, categories and the value for missing cells are written down in a config or a site's
file. Nothing is computed from records (a mean, a deviation or a list of the categories that occur
would cost privacy budget), and each record is coded by itself.

    [columns.age]
    type = "number"
    range = [0, 100]        # clipped to the range, then scaled to [-1, 1]
    missing = 50            # what a missing cell counts as

    [columns.sex]
    type = "category"
    categories = ["male", "female"]
    missing = "own"         # missing cells have an input of their own

    [columns.name]
    type = "drop"           # not an input
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from noisewise.checks import printable_name, repeated
from noisewise.data.csv_records import decimal_number
from noisewise.errors import InvalidValueError
from noisewise.schema import Strict, first_invalid_value

__all__ = [
    "MISSING_CELLS",
    "SPECS",
    "CategoryInput",
    "CategorySpec",
    "ColumnCoder",
    "DropSpec",
    "NumberInput",
    "NumberSpec",
    "parse_columns",
]

MISSING_CELLS = frozenset({"", "?", "NA"})
"""Cells that count as missing in every column, unless they are the name of a category."""

OWN = "own"
_BLANKS = " \t"
Finite = Annotated[float, Field(allow_inf_nan=False)]


class NumberSpec(Strict):
    """A column of decimal numbers with a public range.

    ``missing`` is the value that a missing cell counts as; ``"own"`` gives missing cells an input
    of their own; without it a missing cell is a fault of its record. ``missing_codes`` lists
    further cells that count as missing: numbers (compared as numbers) or texts.
    """

    type: Literal["number"]
    range: Annotated[list[Finite], Field(min_length=2, max_length=2)]
    missing: Finite | Literal["own"] | None = None
    missing_codes: list[Finite | str] = Field(default=[])

    @model_validator(mode="after")
    def _consistent(self) -> NumberSpec:
        low, high = self.range
        if not (low < high and math.isfinite(high - low)):
            raise InvalidValueError("range", self.range, "must be [lowest, highest]")
        if isinstance(self.missing, float) and not low <= self.missing <= high:
            raise InvalidValueError("missing", self.missing, f"must lie in the range {self.range}")
        return self


class CategorySpec(Strict):
    """A column of public categories; each becomes an input that is 1 for its records and else 0.

    Categories are all texts or all numbers; numbers match cells by value (``1`` matches ``1.0``).
    ``missing`` is the category that a missing or unknown cell counts as; ``"own"`` gives such cells
    an input of their own; without it such a cell is a fault of its record.
    """

    type: Literal["category"]
    categories: Annotated[list[str] | list[Finite], Field(min_length=1)]
    missing: str | Finite | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CategorySpec:
        if len(set(self.categories)) < len(self.categories):
            raise InvalidValueError("categories", self.categories, "must all differ")
        for one in self.categories:
            if isinstance(one, str) and one != printable_name("categories", one).strip(_BLANKS):
                raise InvalidValueError(
                    "categories", one, "must have no blanks at the start or end"
                )
        allowed_values = [*self.categories, OWN]
        if OWN in self.categories and self.missing == OWN:
            raise InvalidValueError("missing", OWN, 'is ambiguous: a category is called "own"')
        if self.missing is not None and self.missing not in allowed_values:
            allowed = f"must be one of the categories {self.categories}, or {OWN!r}"
            raise InvalidValueError("missing", self.missing, allowed)
        return self


class DropSpec(Strict):
    """A column that is not an input."""

    type: Literal["drop"]


SPECS: Mapping[str, type[NumberSpec | CategorySpec | DropSpec]] = {
    "number": NumberSpec,
    "category": CategorySpec,
    "drop": DropSpec,
}
"""The types of columns, by name."""


@dataclass(frozen=True)
class NumberInput:
    """Codes the cells of a number column: one input in [-1, 1], and one for missing cells if own.

    Args:
        name: of the column.
        low: smallest value of the range; coded as -1.
        high: largest value of the range; coded as 1.
        missing: value of a missing cell, ``"own"``, or None if cells must not be missing.
        missing_texts: further cells that count as missing.
        missing_values: numbers that count as missing.
    """

    name: str
    low: float
    high: float
    missing: float | str | None = None
    missing_texts: frozenset[str] = frozenset()
    missing_values: frozenset[float] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return (self.name, f"{self.name}=missing") if self.missing == OWN else (self.name,)

    def encode(self, cell: str) -> tuple[float, ...]:
        """Return the inputs of one cell.

        Raises:
            InvalidValueError: the cell is not a finite decimal number, or is missing where it must
                not be.
        """
        text = cell.strip(_BLANKS)
        if text in MISSING_CELLS or text in self.missing_texts:
            return self._encode_missing(cell)
        try:
            value = decimal_number(text.encode(errors="replace"))
        except ValueError:
            value = math.nan
        if value in self.missing_values:
            return self._encode_missing(cell)
        if not math.isfinite(value):
            raise InvalidValueError(self.name, _short(cell), "must be a finite number")
        scaled = self._scale(value)
        return (scaled, 0.0) if self.missing == OWN else (scaled,)

    def _scale(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        return 2.0 * ((clipped - self.low) / (self.high - self.low)) - 1.0

    def _encode_missing(self, cell: str) -> tuple[float, ...]:
        if self.missing is None:
            raise InvalidValueError(self.name, _short(cell), _DECLARE)
        return (self._scale(self.missing),) if isinstance(self.missing, float) else (0.0, 1.0)


@dataclass(frozen=True)
class CategoryInput:
    """Codes the cells of a category column: one input of 0 or 1 for each category.

    Args:
        name: of the column.
        categories: all texts or all numbers.
        missing: the category of a missing or unknown cell, ``"own"``, or None if cells must be
            known.
    """

    name: str
    categories: tuple[str, ...] | tuple[float, ...]
    missing: str | float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        labels = [f"{one:g}" if isinstance(one, float) else one for one in self.categories]
        extra = ["missing"] if self.missing == OWN else []
        return tuple(f"{self.name}={label}" for label in [*labels, *extra])

    def encode(self, cell: str) -> tuple[float, ...]:
        """Return the inputs of one cell.

        Raises:
            InvalidValueError: the cell is none of the categories, and ``missing`` is not declared.
        """
        value: str | float = cell.strip(_BLANKS)
        if isinstance(self.categories[0], float):
            try:
                value = decimal_number(str(value).encode(errors="replace"))
            except ValueError:
                value = math.nan
        if value not in self.categories:
            if self.missing is None:
                categories = ", ".join(map(str, self.categories))
                raise InvalidValueError(self.name, _short(cell), f"must be one of {categories}")
            value = self.missing
        options = (*self.categories, OWN) if self.missing == OWN else self.categories
        return tuple(float(option == value) for option in options)


@dataclass(frozen=True)
class ColumnCoder:
    """Codes the records of a table as inputs of a model; made by `parse_columns`.

    Args:
        inputs: the columns that become inputs, in the order of the declaration.
        dropped: names of the columns that do not.
    """

    inputs: tuple[NumberInput | CategoryInput, ...]
    dropped: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs: ``age``, ``sex=male``, ``sex=female``, ..."""
        return tuple(name for column in self.inputs for name in column.names)

    @property
    def width(self) -> int:
        """Number of inputs."""
        return len(self.names)

    def encode(self, cells: Mapping[str, str]) -> NDArray[np.float32]:
        """Return the inputs [width] of one record; they depend on this record alone.

        Args:
            cells: the text of each column; columns that are not inputs are not read.

        Raises:
            InvalidValueError: a cell is missing from ``cells`` or cannot be coded; the message
                names the column.
        """
        lacking = [column.name for column in self.inputs if column.name not in cells]
        if lacking:
            raise InvalidValueError("cells", sorted(cells), f"must have the column {lacking[0]}")
        row = self.encode_cells([cells[column.name] for column in self.inputs])
        return np.array(row, dtype=np.float32)

    def encode_cells(self, cells: Sequence[str]) -> list[float]:
        """Return the inputs of one record, given one cell for each of the columns ``inputs``."""
        columns = zip(self.inputs, cells, strict=True)
        return [value for column, cell in columns for value in column.encode(cell)]

    def places(self, header: Sequence[str], others: Iterable[str] = ()) -> tuple[int, ...]:
        """Return where the columns ``inputs`` are in the header of a table.

        Args:
            header: names of the columns of the table.
            others: columns with another role (class, client), which need no declaration.

        Raises:
            InvalidValueError: the header repeats a name, lacks a declared column, or has one that
                is not declared.
        """
        twice = repeated(header)
        if twice is not None:
            raise InvalidValueError("header", twice, "is the name of two columns")
        declared = {column.name for column in self.inputs} | set(self.dropped)
        for name in others:
            if name in declared:
                allowed = "is the class or the client, so it must not be declared as an input"
                raise InvalidValueError("columns", name, allowed)
        undeclared = [name for name in header if name not in declared | set(others)]
        if undeclared:
            allowed = 'must be declared in [columns]; type = "drop" leaves it out'
            raise InvalidValueError("columns", undeclared[0], allowed)
        lacking = sorted(declared - set(header))
        if lacking:
            raise InvalidValueError("columns", lacking[0], f"must be a column of {_listed(header)}")
        return tuple(list(header).index(column.name) for column in self.inputs)


def parse_columns(content: Mapping[str, Any], field: str = "columns") -> ColumnCoder:
    """Check the tables of ``[columns]`` and make a coder.

    Args:
        content: by the name of the column, the table with its ``type`` and the fields of
            `NumberSpec`, `CategorySpec` or `DropSpec`.
        field: where the tables come from, for messages.

    Raises:
        InvalidValueError: names the column, the value and what is allowed.

    Example:
        >>> coder = parse_columns({
        ...     "age": {"type": "number", "range": [0, 100], "missing": 50},
        ...     "sex": {"type": "category", "categories": ["male", "female"], "missing": "own"},
        ... })
        >>> coder.names
        ('age', 'sex=male', 'sex=female', 'sex=missing')
        >>> coder.encode({"age": "75", "sex": "female"}).tolist()
        [0.5, 0.0, 1.0, 0.0]
    """
    if not isinstance(content, Mapping):
        raise InvalidValueError(field, content, "must be a table of columns")
    inputs: list[NumberInput | CategoryInput] = []
    dropped: list[str] = []
    for name, table in content.items():
        spec = _parse_spec(f"{field}.{printable_name(field, name)}", table)
        if isinstance(spec, NumberSpec):
            inputs.append(_number_input(name, spec))
        elif isinstance(spec, CategorySpec):
            inputs.append(CategoryInput(name, tuple(spec.categories), spec.missing))  # type: ignore[arg-type]
        else:
            dropped.append(name)
    if not inputs:
        allowed = "must declare at least one column that is an input (number or category)"
        raise InvalidValueError(field, sorted(content), allowed)
    return ColumnCoder(tuple(inputs), tuple(dropped))


def _parse_spec(field: str, table: object) -> NumberSpec | CategorySpec | DropSpec:
    if not isinstance(table, Mapping):
        raise InvalidValueError(field, table, 'must be a table such as { type = "drop" }')
    kind = table.get("type")
    if not isinstance(kind, str) or kind not in SPECS:
        raise InvalidValueError(f"{field}.type", kind, f"must be one of {', '.join(SPECS)}")
    try:
        return SPECS[kind].model_validate(dict(table))
    except ValidationError as error:
        raise first_invalid_value(error, SPECS[kind], f"{field}.") from None


def _number_input(name: str, spec: NumberSpec) -> NumberInput:
    codes = spec.missing_codes
    return NumberInput(
        name,
        spec.range[0],
        spec.range[1],
        missing=spec.missing,
        missing_texts=frozenset(c.strip(_BLANKS) for c in codes if isinstance(c, str)),
        missing_values=frozenset(c for c in codes if not isinstance(c, str)),
    )


_DECLARE = "is missing: declare a value with `missing`, or remove the record"


def _short(cell: str) -> str:
    return cell if len(cell) <= 60 else f"{cell[:60]}..."


def _listed(header: Sequence[str]) -> str:
    names = ", ".join(header)
    return names if len(names) <= 300 else f"the {len(header)} columns of the table"
