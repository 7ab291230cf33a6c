"""Read a site's records for training. Each record is read separately; invalid ones are left out.

One record must not affect how another record is read, how many others are used, or whether a site
replies: the server would see the difference, and no noise hides it. So an invalid record (a line
that cannot be read, a value that is not finite, a class that does not exist, another shape) is
left out, with a warning in the site's own log. Each record is sampled into a batch independently,
and the plan sets the divisor and the number of steps. So leaving a record out has the same effect
as including it with gradient 0 (docs/privacy.md, guarantees 2 and 16).

A fault of a whole file or array (missing, damaged, another shape or type) is an error: an npz or
safetensors file is one container.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.data.columns import ColumnCoder
from noisewise.data.csv_records import decimal_number, read_csv
from noisewise.data.examples import as_float32
from noisewise.data.person_ids import NOBODY
from noisewise.data.record_files import SUFFIXES, read_arrays
from noisewise.errors import InvalidValueError
from noisewise.site.site_persons import read_persons
from noisewise.site.site_task import RecordRules, whole_numbers
from noisewise.training.local import TensorData
from noisewise.training.persons import Persons
from noisewise.training.synthetic_records import TensorForm
from noisewise.training.tasks import CLASSIFICATION

__all__ = ["inputs_and_targets", "read_records", "usable_records"]

_NUMBERS = "biuf"
_BY_RECORD = "OSTU"  # objects and text: numpy chose the type for all records at once
_log = logging.getLogger("noisewise.site")


def read_records(
    path: Path,
    target: str,
    field: str,
    columns: ColumnCoder | None = None,
    *,
    values: bool = False,
    person: str | None = None,
) -> dict[str, NDArray[Any]]:
    """The arrays of a site's file; a CSV line with a fault is a record of NaN with class -1.

    The size of the file is not limited: at a limit, one record would decide.

    Args:
        path: the file.
        target: the column of a CSV file with the class.
        field: where the path comes from, for messages.
        columns: how the other columns of a CSV file become inputs; None if all are numbers.
        values: the column ``target`` has a number to predict instead of a class.
        person: the column, or the array of another file, that says whose record each one is; None
            if records have no persons. The result has their numbers (see `read_persons`) as
            ``persons``, and as ``test_persons`` those of the array ``test_PERSON``.

    Raises:
        InvalidValueError: the file is missing or damaged, or the header of a table is wrong, or it
            has no such column or array.
    """
    suffixes = [suffix for suffix in SUFFIXES if suffix != ".parquet"]  # one container of records
    if path.suffix not in suffixes or not path.is_file():
        allowed = f"must be a file that ends in {', '.join(suffixes)}"
        raise InvalidValueError(field, str(path), allowed)
    if path.suffix == ".csv":
        try:
            return read_csv(
                path, target, max_bytes=None, columns=columns, keep_bad=True, values=values,
                person=person,
            )  # fmt: skip
        except InvalidValueError as error:
            if error.field != "person":
                raise
            raise InvalidValueError("data.person", error.value, error.allowed) from error
    if columns is not None:
        raise InvalidValueError(field, str(path), "must end in .csv, because [columns] is given")
    if person is None:
        return read_arrays(path, max_bytes=None)
    arrays = read_arrays(path, max_bytes=None, persons=person)
    renamed = {person: "persons"}
    if "test_targets" in arrays:
        renamed[f"test_{person}"] = "test_persons"
    for name in renamed:
        if name not in arrays:
            raise InvalidValueError("data.person", person, f"{path} must have the array {name}")
    return {
        renamed.get(name, name): read_persons(array, f"{field}: {name}")
        if name in renamed
        else array
        for name, array in arrays.items()
    }


def inputs_and_targets(records: object, field: str, *, persons: bool = False) -> tuple[Any, ...]:
    """What `usable_records` takes, from what a site's own function returned.

    Args:
        records: a pair (inputs, targets), or a torch ``Dataset`` (anything with a length that gives
            (input, class) by number). A record of a ``Dataset`` that raises an error is invalid.
        field: where the records come from, for messages.
        persons: whether there is a third value: whose record each one is.

    Returns:
        Inputs and targets, and the values that name the persons if there are any.
    """
    count, form = (3, _TRIPLE) if persons else (2, _PAIR)
    if isinstance(records, (tuple, list)):
        if len(records) != count:
            raise InvalidValueError(field, f"{len(records)} values", form)
        return tuple(records)
    if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
        raise InvalidValueError(field, type(records).__name__, form)
    parts: tuple[list[object], ...] = tuple([] for _ in range(count))
    for number in range(len(records)):
        try:
            one, *others = records[number]
            record = _copied(one), *others
            if len(record) != count:
                record = (None,) * count
        except Exception:
            record = (None,) * count
        for part, value in zip(parts, record, strict=True):
            part.append(value)
    return parts


def _copied(one: Any) -> Any:
    """A record's inputs in new memory: a Dataset may fill the same memory again."""
    if isinstance(one, Mapping):
        return {name: np.asarray(part).copy() for name, part in one.items()}
    return np.asarray(one).copy()


_PAIR = "must be a pair (inputs, targets), or a torch Dataset"
_TRIPLE = "must be three values (inputs, targets, persons), or a torch Dataset of such records"


def usable_records(
    inputs: object,
    targets: object,
    shape: tuple[int, ...],
    classes: int,
    field: str,
    rules: RecordRules | None = None,
    *,
    images: bool | None = None,
    persons: NDArray[np.int64] | None = None,
) -> TensorData:
    """The records that a model of these inputs and classes can learn from.

    Args:
        inputs: an array [N, ...] of numbers; or a list, or an array of objects or text, of which
            each record is read by itself.
        targets: [N] whole numbers, in any numeric type; or a list of such.
        shape: of one record.
        classes: targets are 0 to classes - 1.
        field: where the records come from, for messages.
        rules: of another task or of other inputs than one float32 array; None for a classification.
        images: for uint8 inputs that the model takes as float32: True divides them by 255, False
            keeps the numbers. None is an error for an array of uint8; in a list, a record of uint8
            is then left out.
        persons: [N], whose record each one is; see `read_persons`. A record of nobody is left out.

    Returns:
        Inputs in C order and targets in the declared types, whatever the records hold, also for
        n = 0: by default float32 [n, ...] and int64 [n].

    Raises:
        InvalidValueError: an array has another shape or type than records for this model, whatever
            its values are; or there are not as many targets or persons as inputs.
    """
    if rules is None:
        task = replace(CLASSIFICATION, classes=classes)
        rules = RecordRules(task, (), (TensorForm(shape, torch.float32),))
    arrays, finite = _read_all_inputs(inputs, rules, field, images)
    y, has_target = _read_targets(
        _by_record_or_array(targets, f"{field}: targets"), len(finite), rules, field
    )
    named = _with_person(persons, len(finite), field)
    usable = finite & has_target & named
    if not usable.all():
        _log.warning(
            "%s: %d of %d records are left out: %d cannot be read or have values that are not "
            "finite numbers, %d have a target that does not exist for %s%s",
            field,
            int((~usable).sum()),
            len(usable),
            int((~finite).sum()),
            int((~has_target).sum()),
            rules.task.name,
            "" if persons is None else f", {int((~named).sum())} do not say whose they are",
        )
    if not usable.any():
        _log.error("%s: no usable record: replies contain only noise", field)
    tensors = [torch.from_numpy(array[usable]) for array in arrays]
    made = dict(zip(rules.names, tensors, strict=True)) if rules.names else tensors[0]
    owners = None if persons is None else Persons.of(persons[usable])
    return TensorData(made, torch.from_numpy(y[usable]), owners)


def _with_person(persons: NDArray[np.int64] | None, n: int, field: str) -> NDArray[np.bool_]:
    """For each record whether it says whose it is; True for all if that is not asked."""
    if persons is None:
        return np.ones(n, dtype=np.bool_)
    if len(persons) != n:
        allowed = f"must be one value for each of {n} inputs"
        raise InvalidValueError(f"{field}: persons", [len(persons)], allowed)
    return np.not_equal(persons, NOBODY)


def _read_all_inputs(
    inputs: object, rules: RecordRules, field: str, images: bool | None
) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
    """Every input array [N, ...], and for each record whether all of its inputs can be used."""
    if not rules.names:
        parts = {"inputs": inputs}
    elif isinstance(inputs, Mapping):
        parts = {name: inputs.get(name) for name in rules.names}
    elif isinstance(inputs, (list, tuple)):
        parts = {name: [_entry(record, name) for record in inputs] for name in rules.names}
    else:
        allowed = f"must be arrays by name: {', '.join(rules.names)}"
        raise InvalidValueError(f"{field}: inputs", type(inputs).__name__, allowed)
    arrays, usable = [], None
    for (name, values), form in zip(parts.items(), rules.inputs, strict=True):
        if values is None:
            raise InvalidValueError(f"{field}: inputs", None, f"must have the array {name}")
        source = f"{field}: {name}" if rules.names else f"{field}: inputs"
        read = _by_record_or_array(values, source)
        array: NDArray[Any]
        if form.dtype == torch.int64:
            array, good = _read_whole(read, form, source)
        else:
            array, good = _read_inputs(read, form.shape, field, images)
        if usable is not None and len(good) != len(usable):
            allowed = f"must have {len(usable)} records, as many as the other inputs"
            raise InvalidValueError(source, len(good), allowed)
        arrays.append(array)
        usable = good if usable is None else usable & good
    assert usable is not None
    return arrays, usable


def _entry(record: object, name: str) -> object:
    """One input of a record; None if the record has no such input."""
    return record.get(name) if isinstance(record, Mapping) else None


def _read_whole(
    values: Sequence[object] | NDArray[Any], form: TensorForm, field: str
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids [N, ...] and, for each record, whether all of them are whole numbers in range."""
    if isinstance(values, np.ndarray):
        if values.shape[1:] != form.shape:
            actual = f"records of shape {values.shape[1:]}"
            raise InvalidValueError(field, actual, f"must be {form.shape}, as in the site's file")
        return whole_numbers(values, form.limit)
    rows = [_numbers(value, form.shape) for value in values]
    read = [None if row is None else whole_numbers(row[None], form.limit) for row in rows]
    ids = np.zeros((len(rows), *form.shape), np.int64)
    good = np.array([one is not None and bool(one[1][0]) for one in read], dtype=np.bool_)
    for number, one in enumerate(read):
        if one is not None and good[number]:
            ids[number] = one[0][0]
    return ids, good


def _by_record_or_array(values: object, field: str) -> Sequence[object] | NDArray[Any]:
    """A list of records where each must be read by itself, else an array of numbers [N, ...]."""
    if isinstance(values, (list, tuple)):
        return values
    array = np.asarray(values)
    if array.ndim == 0 or array.dtype.kind not in _NUMBERS + _BY_RECORD:
        actual = f"{array.dtype}{list(array.shape)}"
        raise InvalidValueError(field, actual, "must be an array [N, ...] of numbers, or a list")
    if array.shape == (0,) or array.dtype.kind in _BY_RECORD:  # np.array([]) has no shape to check
        return list(array)
    return array


def _read_inputs(
    values: Sequence[object] | NDArray[Any],
    shape: tuple[int, ...],
    field: str,
    images: bool | None,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Inputs [N, ...] and, for each record, whether all of its values are finite numbers."""
    if isinstance(values, np.ndarray):
        if values.shape[1:] != shape:
            actual = f"records of shape {values.shape[1:]}"
            raise InvalidValueError(
                field, actual, f"must be {shape}, input_shape in the site's file"
            )
        if values.dtype == np.uint8 and images is None:
            raise InvalidValueError(f"{field}: inputs", "uint8", f"needs data.images: {_UINT8}")
        x = _fractions(values, images)
    else:
        x, undeclared = np.full((len(values), *shape), np.nan, dtype=np.float32), 0
        for number, value in enumerate(values):
            record = _numbers(value, shape)
            if record is None:
                continue
            if record.dtype == np.uint8 and images is None:
                undeclared += 1
                continue
            x[number] = _fractions(record, images)
        if undeclared:
            _log.warning("%s: %d records of uint8 need data.images: %s", field, undeclared, _UINT8)
    if isinstance(values, np.ndarray) and values.dtype.kind != "f":
        return x, np.ones(len(x), dtype=np.bool_)  # no whole number of 64 bits exceeds float32
    return x, np.logical_and.reduce(np.isfinite(x).reshape(len(x), math.prod(shape)), axis=1)


_UINT8 = "true divides them by 255, false keeps the numbers"


def _fractions(values: NDArray[Any], images: bool | None) -> NDArray[np.float32]:
    """Values as float32; uint8 is divided by 255 if it is declared to be an image."""
    return as_float32(values if images or values.dtype != np.uint8 else values.astype(np.int16))


def _read_targets(
    values: Sequence[object] | NDArray[Any], n: int, rules: RecordRules, field: str
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Targets [N, ...] and, for each record, whether its target exists."""
    shape = rules.target_shape
    wrong = isinstance(values, np.ndarray) and values.shape[1:] != shape
    if len(values) != n or wrong:
        actual = list(values.shape) if isinstance(values, np.ndarray) else [len(values)]
        target = "one class" if rules.task.one_class else f"one target of shape {list(shape)}"
        allowed = f"must be {target} for each of {n} inputs"
        raise InvalidValueError(f"{field}: targets", actual, allowed)
    if isinstance(values, np.ndarray):
        return rules.targets(values)
    rows = [_numbers(value, shape) for value in values]
    read = [None if row is None else rules.targets(row[None]) for row in rows]
    targets = rules.targets(np.zeros((0, *shape)))[0]
    targets = np.zeros((n, *shape), targets.dtype)
    has_target = np.array([one is not None and bool(one[1][0]) for one in read], dtype=np.bool_)
    for number, one in enumerate(read):
        if one is not None and has_target[number]:
            targets[number] = one[0][0]
    return targets, has_target


def _numbers(record: object, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """One record as an array of numbers of this shape; None if it cannot be converted."""
    try:
        array = np.asarray(record)
        if array.dtype.kind == "O":  # the type of these values, not that of all records
            array = np.asarray(array.tolist())
        if array.shape != shape:
            return None
        if array.dtype.kind in "STU":
            cells = (c if isinstance(c, bytes) else c.encode() for c in array.ravel().tolist())
            array = np.array([decimal_number(cell) for cell in cells]).reshape(shape)
    except Exception:
        return None
    return array if array.dtype.kind in _NUMBERS else None
