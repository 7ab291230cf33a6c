"""Arrays of a user as `Examples`: types are kept, and what cannot be trained on is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.data.examples import IMAGES, Arrays, Examples, Scaling, map_arrays, named_arrays
from noisewise.data.person_ids import first_blank, number_persons
from noisewise.data.sequences import pad_sequences
from noisewise.errors import InvalidValueError

__all__ = ["concatenate_examples", "examples_from", "same_form", "stack_records"]

_LARGEST = int(np.iinfo(np.int64).max)


def examples_from(
    inputs: Any,
    targets: Any,
    scaling: Scaling | None = None,
    *,
    prefix: str = "",
    values: bool = False,
    images: bool = False,
    dtype: str | None = None,
    persons: Any = None,
) -> Examples:
    """Convert arrays of any numeric type to the types of `Examples`.

    Args:
        inputs: one array [N, ...], a tuple of arrays or tensors, or a mapping of them.
        targets: [N] classes, or with ``values`` numbers of any shape [N, ...].
        scaling: see `Examples`.
        prefix: of the fields in errors.
        values: the targets are not one class for each record.
        images: uint8 inputs are pixels, divided by 255.
        dtype: "float32" converts whole numbers; None keeps them.
        persons: [N] whole numbers or text, whose record each one is; None if that is not known.

    Raises:
        InvalidValueError: an array has the wrong type, shape or values.
    """
    if dtype not in (None, "float32"):
        raise InvalidValueError("dtype", dtype, 'must be "float32", or left out to keep types')
    x = _structure(inputs, prefix)
    for name, array in named_arrays(x).items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise InvalidValueError(prefix + name, array.dtype, "must be an array of numbers")
        _check_range(array, prefix + name)
    if dtype is not None and not images and scaling is None:
        x = map_arrays(lambda array: array.astype(np.float32), x)
    x = map_arrays(_narrow, x)
    for name, array in named_arrays(x).items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            record = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
            allowed = "must be finite (in float32): remove or correct the record"
            raise InvalidValueError(f"{prefix}{name}, record {record}", "nan or inf", allowed)
    y = _targets(targets, x, prefix, values)
    owners = None
    if persons is not None:
        owners = number_persons(persons, len(y), prefix + "persons")
        if (blank := first_blank(owners)) >= 0:
            where = f"{prefix}persons, record {blank}"
            raise InvalidValueError(where, persons[blank], "must be the identifier of a person")
    return Examples(x, y, IMAGES if images and scaling is None else scaling, owners)


def _structure(inputs: Any, prefix: str) -> Arrays:
    if isinstance(inputs, Mapping):
        return {str(name): as_array(part, prefix + str(name)) for name, part in inputs.items()}
    if isinstance(inputs, tuple) and inputs and all(hasattr(part, "shape") for part in inputs):
        return tuple(as_array(part, f"{prefix}inputs[{n}]") for n, part in enumerate(inputs))
    return as_array(inputs, prefix + "inputs")


def as_array(values: Any, field: str) -> NDArray[Any]:
    """An array, a list of numbers or a torch tensor as an array; bfloat16 becomes float32.

    Raises:
        InvalidValueError: the values are a mapping, or rows of different lengths.
    """
    if isinstance(values, Mapping):
        allowed = "must be an array: flatten nested inputs into one mapping of arrays"
        raise InvalidValueError(field, type(values).__name__, allowed)
    if hasattr(values, "detach"):  # a torch tensor, which this layer does not import
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":
            values = values.float()
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        allowed = (
            "must be an array of numbers, all records of one shape; pad sequences of different "
            "lengths with noisewise.data.pad_sequences"
        )
        raise InvalidValueError(field, type(values).__name__, allowed) from error


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """Floating-point numbers as float32; whole numbers as they are."""
    if array.dtype.kind != "f" or array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _check_range(array: NDArray[Any], field: str) -> None:
    """Refuse whole numbers that int64 cannot hold, which would become negative."""
    if array.dtype == np.uint64 and array.size and int(array.max()) > _LARGEST:
        record = np.unravel_index(int(array.argmax()), array.shape)[0]
        raise InvalidValueError(
            f"{field}, record {int(record)}", int(array.max()), f"must be at most {_LARGEST}"
        )


def _targets(targets: Any, inputs: Arrays, prefix: str, values: bool) -> NDArray[Any]:
    y, first = as_array(targets, prefix + "targets"), next(iter(named_arrays(inputs).values()))
    form = f"{y.dtype}{list(y.shape)}"
    if y.ndim:
        _check_range(y, prefix + "targets")
    if values:
        if y.dtype.kind not in "biuf" or y.ndim < 1 or len(y) != len(first) or len(y) == 0:
            allowed = f"must be numbers [N, ...], one entry for each of {len(first)} records"
            raise InvalidValueError(prefix + "targets", form, allowed)
        if y.dtype.kind != "f":
            return y.astype(np.int64)
        y = _narrow(y)
        if not np.isfinite(y).all():
            record = int(np.argmin(np.isfinite(y).reshape(len(y), -1).all(axis=1)))
            where = f"{prefix}targets, record {record}"
            raise InvalidValueError(where, "nan or inf", "must be finite numbers (in float32)")
        return y.astype(np.float32)
    if y.dtype.kind not in "biu" or y.ndim != 1 or first.shape[:1] != y.shape or len(y) == 0:
        allowed = (
            f"must be one whole number for each record of inputs {list(first.shape)}, at least "
            "one; for targets that are not one class each, use another task (values=True)"
        )
        raise InvalidValueError(prefix + "targets", form, allowed)
    if int(y.min()) < 0:
        where = f"{prefix}targets, record {int(y.argmin())}"
        raise InvalidValueError(where, int(y.min()), "must be whole numbers >= 0")
    return y.astype(np.int64)


def stack_records(
    dataset: Any, field: str, *, values: bool = False, length: int | None = None
) -> tuple[Arrays, NDArray[Any]]:
    """Inputs and targets of a sequence of pairs (input, target).

    An input is an array, a tuple of arrays or a mapping of arrays. With ``length``, sequences
    [places] are cut or filled up with 0, and targets that are sequences with -100.

    Raises:
        InvalidValueError: the records are not pairs, or have different shapes and no length.
    """
    try:
        pairs = [dataset[index] for index in range(len(dataset))]
        for number, pair in enumerate(pairs):
            if len(pair) != 2:
                allowed = "must be a pair: write several inputs as ((a, b), target)"
                where = f"{field}, record {number}"
                raise InvalidValueError(where, f"{len(pair)} items", allowed)
        inputs = _together([pair[0] for pair in pairs], length, f"{field}: inputs")
        rows = [as_array(pair[1], f"{field}: targets") for pair in pairs]
        if values and length is not None and rows and rows[0].ndim == 1:
            targets = pad_sequences(rows, length, fill=-100, field=f"{field}: targets")[0]
        else:
            targets = np.stack(rows)
    except InvalidValueError:
        raise
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InvalidValueError(
            field,
            type(dataset).__name__,
            "must have pairs (input, target) with inputs of one shape; give `length` for "
            f"sequences of different lengths ({error})",
        ) from error
    return inputs, targets


def _together(records: Sequence[Any], length: int | None, field: str) -> Arrays:
    first = records[0] if records else np.empty(0)
    if isinstance(first, Mapping):
        return {
            str(name): _stacked([record[name] for record in records], length, f"{field}.{name}")
            for name in first
        }
    if isinstance(first, (tuple, list)) and any(hasattr(part, "shape") for part in first):
        return tuple(
            _stacked([record[number] for record in records], length, f"{field}[{number}]")
            for number in range(len(first))
        )
    return _stacked(records, length, field)


def _stacked(rows: Sequence[Any], length: int | None, field: str) -> NDArray[Any]:
    arrays = [as_array(row, f"{field}, record {n}") for n, row in enumerate(rows)]
    if length is not None and arrays and arrays[0].ndim == 1 and arrays[0].dtype.kind in "biu":
        return pad_sequences(arrays, length, field=field)[0]
    return np.stack(arrays)


def same_form(parts: Sequence[tuple[str, Examples]]) -> None:
    """Check that all records have the shapes and types of the first ones.

    Raises:
        InvalidValueError: names the part that differs.
    """
    first, expected = parts[0]
    forms = {name: (a.shape[1:], a.dtype) for name, a in expected.named_inputs().items()}
    for name, part in parts:
        part_forms = {key: (a.shape[1:], a.dtype) for key, a in part.named_inputs().items()}
        if list(part_forms) != list(forms):
            allowed = f"must have the inputs {list(forms)} as in {first}"
            raise InvalidValueError(name, list(part_forms), allowed)
        for key, (shape, dtype) in part_forms.items():
            if shape != forms[key][0]:
                raise InvalidValueError(
                    name,
                    f"records of shape {shape}",
                    f"must be of shape {forms[key][0]} as in {first}",
                )
            if dtype != forms[key][1]:
                raise InvalidValueError(name, dtype, f"must be {forms[key][1]} as in {first}")
        if part.targets.shape[1:] != expected.targets.shape[1:]:
            raise InvalidValueError(
                name,
                f"targets of shape {part.targets.shape[1:]}",
                f"must be of shape {expected.targets.shape[1:]} as in {first}",
            )


def concatenate_examples(parts: Sequence[Examples]) -> tuple[Arrays, NDArray[Any]]:
    """Inputs and targets of several parts of one form, one after the other."""
    names = list(parts[0].named_inputs())
    arrays = iter([np.concatenate([part.named_inputs()[name] for part in parts]) for name in names])
    inputs = map_arrays(lambda _: next(arrays), parts[0].inputs)
    return inputs, np.concatenate([part.targets for part in parts])
