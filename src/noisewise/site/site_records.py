"""A site's records as its training sees them: each is read by itself, and a bad one adds nothing.

One record must not decide about another record, about the number of the others, or whether a site
answers: the server would see that, and no noise covers it. So a record that no model can learn from
(a line that cannot be read, a value that is not finite, a class that does not exist, another shape)
is left out, with a warning in the site's own log. Since every record enters a batch by a coin of
its own, and the divisor and the number of steps are the plan's, leaving a record out is the same as
letting it in with gradient 0 (docs/privacy.md, guarantees 2 and 16).

What is wrong with a file or an array as a whole (missing, damaged, another shape or type) is an
error: an npz or safetensors file is one container.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.data.columns import ColumnCoder
from noisewise.data.csv_records import decimal_number, read_csv
from noisewise.data.examples import as_float32
from noisewise.data.record_files import SUFFIXES, read_arrays
from noisewise.errors import InvalidValueError
from noisewise.training.local import TensorData

__all__ = ["inputs_and_targets", "read_records", "sound_records"]

_NUMBERS = "biuf"
_BY_RECORD = "OSTU"  # objects and text: numpy chose the type for all records at once
_log = logging.getLogger("noisewise.site")


def read_records(
    path: Path, target: str, field: str, columns: ColumnCoder | None = None
) -> dict[str, NDArray[Any]]:
    """The arrays of a site's file; a CSV line with a fault is a record of NaN with class -1.

    The size of the file is not limited: at a limit, one record would decide.

    Args:
        path: the file.
        target: the column of a CSV file with the class.
        field: where the path comes from, for messages.
        columns: how the other columns of a CSV file become inputs; None if all are numbers.

    Raises:
        InvalidValueError: the file is missing or damaged, or the header of a table is wrong.
    """
    if path.suffix not in SUFFIXES or not path.is_file():
        allowed = f"must be a file that ends in {', '.join(SUFFIXES)}"
        raise InvalidValueError(field, str(path), allowed)
    if path.suffix == ".csv":
        return read_csv(path, target, max_bytes=None, columns=columns, keep_bad=True)
    if columns is not None:
        raise InvalidValueError(field, str(path), "must end in .csv, because [columns] is given")
    return read_arrays(path, max_bytes=None)


def inputs_and_targets(records: object, field: str) -> tuple[Any, Any]:
    """What `sound_records` takes, from what a site's own function returned.

    Args:
        records: a pair (inputs, targets), or a torch ``Dataset`` (anything with a length that gives
            (input, class) by number). A record of a ``Dataset`` that raises an error is a bad one.
        field: where the records come from, for messages.
    """
    if isinstance(records, (tuple, list)):
        if len(records) != 2:
            raise InvalidValueError(field, f"{len(records)} values", _PAIR)
        return records[0], records[1]
    if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
        raise InvalidValueError(field, type(records).__name__, _PAIR)
    inputs: list[object] = []
    targets: list[object] = []
    for number in range(len(records)):
        try:
            one, label = records[number]
            one = np.asarray(one).copy()  # a Dataset may fill the same memory again
        except Exception:
            one, label = None, None
        inputs.append(one)
        targets.append(label)
    return inputs, targets


_PAIR = "must be a pair (inputs, targets), or a torch Dataset"


def sound_records(
    inputs: object, targets: object, shape: tuple[int, ...], classes: int, field: str
) -> TensorData:
    """The records that a model of these inputs and classes can learn from.

    Args:
        inputs: an array [N, ...] of numbers; or a list, or an array of objects or text, of which
            each record is read by itself. uint8 is divided by 255.
        targets: [N] whole numbers, in any numeric type; or a list of such.
        shape: of one record.
        classes: targets are 0 to classes - 1.
        field: where the records come from, for messages.

    Returns:
        float32 [n, ...] in C order and int64 [n], whatever the records hold, also for n = 0.

    Raises:
        InvalidValueError: an array has another shape or type than records for this model, whatever
            its values are; or there are not as many targets as inputs.
    """
    x, finite = _read_inputs(_by_record_or_array(inputs, f"{field}: inputs"), shape, field)
    y = _read_targets(_by_record_or_array(targets, f"{field}: targets"), len(x), classes, field)
    known = y >= 0
    sound = finite & known
    if not sound.all():
        _log.warning(
            "%s: %d of %d records add nothing: %d cannot be read or have values that are not "
            "finite numbers, %d have a class other than 0 to %d",
            field,
            int((~sound).sum()),
            len(sound),
            int((~finite).sum()),
            int((~known).sum()),
            classes - 1,
        )
    if not sound.any():
        _log.error("%s: no record is left, answers are noise alone", field)
    return TensorData(torch.from_numpy(x[sound]), torch.from_numpy(y[sound]))


def _by_record_or_array(values: object, field: str) -> Sequence[object] | NDArray[Any]:
    """A list of records where each must be read by itself, else an array of numbers [N, ...]."""
    if isinstance(values, (list, tuple)):
        return values
    array = np.asarray(values)
    if array.ndim == 0 or array.dtype.kind not in _NUMBERS + _BY_RECORD:
        what = f"{array.dtype}{list(array.shape)}"
        raise InvalidValueError(field, what, "must be an array [N, ...] of numbers, or a list")
    if array.shape == (0,) or array.dtype.kind in _BY_RECORD:  # np.array([]) has no shape to check
        return list(array)
    return array


def _read_inputs(
    values: Sequence[object] | NDArray[Any], shape: tuple[int, ...], field: str
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Inputs [N, ...] and, for each record, whether all of its values are finite numbers."""
    if isinstance(values, np.ndarray):
        if values.shape[1:] != shape:
            what = f"records of shape {values.shape[1:]}"
            raise InvalidValueError(field, what, f"must be {shape}, input_shape in the site's file")
        x = as_float32(values)
    else:
        x = np.full((len(values), *shape), np.nan, dtype=np.float32)
        for number, value in enumerate(values):
            record = _numbers(value, shape)
            if record is not None:
                x[number] = as_float32(record)
    if isinstance(values, np.ndarray) and values.dtype.kind != "f":
        return x, np.ones(len(x), dtype=np.bool_)  # no whole number of 64 bits exceeds float32
    return x, np.logical_and.reduce(np.isfinite(x).reshape(len(x), math.prod(shape)), axis=1)


def _read_targets(
    values: Sequence[object] | NDArray[Any], n: int, classes: int, field: str
) -> NDArray[np.int64]:
    """The class of each record [N], -1 for one that does not exist."""
    if len(values) != n or (isinstance(values, np.ndarray) and values.ndim != 1):
        shape = list(values.shape) if isinstance(values, np.ndarray) else [len(values)]
        allowed = f"must be one class for each of {n} inputs"
        raise InvalidValueError(f"{field}: targets", shape, allowed)
    if isinstance(values, np.ndarray):
        return _classes(values, classes)
    labels = np.full(n, -1, dtype=np.int64)
    for number, value in enumerate(values):
        label = _numbers(value, ())
        if label is not None:
            labels[number] = _classes(label.reshape(1), classes)[0]
    return labels


def _classes(labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Whole numbers from 0 to classes - 1 as int64; -1 for everything else."""
    known = (labels >= 0) & (labels < classes)
    if labels.dtype.kind == "f":
        known &= labels == np.floor(labels)
    found = np.full(len(labels), -1, dtype=np.int64)
    found[known] = labels[known].astype(np.int64)
    return found


def _numbers(record: object, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """One record as an array of numbers of this shape; None if it is none, for whatever reason."""
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
