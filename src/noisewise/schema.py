"""The base class, the field types and the errors of the pydantic models of our TOML files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from noisewise.checks import similar_name, with_suggestion
from noisewise.errors import InvalidValueError
from noisewise.text import short_repr

__all__ = ["Count", "OpenShare", "Positive", "Share", "Strict", "first_invalid_value"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number > 0."""

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""A number in (0, 1]."""

OpenShare = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""A number in (0, 1)."""

Count = Annotated[int, Field(ge=1)]
"""A whole number >= 1."""


class Strict(BaseModel):
    """A frozen table that does not convert types and rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def __repr__(self) -> str:
        """The fields that were given."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        return short_repr(self, **{name: getattr(self, name) for name in given})


def first_invalid_value(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> InvalidValueError:
    """Return one of pydantic's errors as one line: the most useful one.

    An unknown key comes first, since it may be a misspelt one, then a missing field. A field with
    several allowed types (a number, a list, a name) fails once for each of them; the line joins
    these.

    Args:
        error: what pydantic raised.
        model: the model of the whole content.
        prefix: of the field's name in the message, for example the name of the file.

    Example:
        >>> class Part(Strict):
        ...     rounds: Count
        >>> try:
        ...     Part.model_validate({"rounds": 0})
        ... except ValidationError as error:
        ...     print(first_invalid_value(error, Part, "training."))
        training.rounds = 0: must be greater than or equal to 1
    """
    first, *_ = errors = sorted(error.errors(), key=_rank)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return InvalidValueError(prefix + cause.field, cause.value, cause.allowed)
    name, table = _field_of(first, model)
    if first["type"] == "missing":
        return InvalidValueError(prefix + name, None, "is missing and has no default")
    if first["type"] == "extra_forbidden":
        known = sorted(table.model_fields)
        key, allowed = str(first["loc"][-1]), f"unknown key, must be one of {', '.join(known)}"
        if similar := similar_name(key, known):
            allowed = f"unknown key, did you mean {similar}? It must be one of {', '.join(known)}"
        return InvalidValueError(prefix + name, first["input"], allowed)
    messages = [each["msg"] for each in errors if _field_of(each, model)[0] == name]
    allowed = " or ".join(dict.fromkeys(map(_requirement, messages)))
    if isinstance(first["input"], str):
        allowed = with_suggestion(first["input"], _names_in(messages), allowed)
    return InvalidValueError(prefix + name, first["input"], allowed)


def _rank(error: ErrorDetails) -> int:
    return {"extra_forbidden": 0, "missing": 1}.get(error["type"], 2)


def _field_of(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """The dotted name of the field that an error is about, and the table that it is in.

    The location of an error also has the names of types, and the number of an item in a list. The
    field's name leaves out types, and numbers of items that are not tables.
    """
    names: list[str] = []
    table, inner = model, [model]
    for part in error["loc"]:
        matching = next((each for each in inner if part in each.model_fields), None)
        if isinstance(part, int):
            names += [str(part)] if inner else []
        elif matching is not None:
            table = matching
            names.append(part)
            inner = _tables_in(table.model_fields[part].annotation)
        elif any(part == each.__name__ for each in inner):
            inner = [each for each in inner if part == each.__name__]
        elif error["type"] == "extra_forbidden" and inner:  # the last part is the unknown key
            table = inner[0]
            names.append(part)
    return ".".join(names), table


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """The table types in an annotation: itself, or the arguments of a list or a union."""
    if arguments := get_args(annotation):
        return [table for argument in arguments for table in _tables_in(argument)]
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_table else []


def _names_in(messages: Sequence[str]) -> list[str]:
    """The names that pydantic's messages list as allowed: "should be 'pld' or 'rdp'"."""
    return [name for message in messages for name in re.findall(r"'([^']*)'", message)]


def _requirement(message: str) -> str:
    """A message of pydantic in the form of our own errors: "must be ..."."""
    table = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    return re.sub(r"^(Input|List|Value) should", "must", table)
