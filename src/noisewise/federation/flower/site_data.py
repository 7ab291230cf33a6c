"""A site's records as its training sees them: a bad record adds nothing, and nobody is told.

One record must not decide whether a site answers: that would be a sign on the wire which no noise
covers. So records that no model can learn from (a value that is not finite, a class that there is
not) are left out, with a warning in the site's own log. Since every record enters a batch by a coin
of its own, and the divisor and the number of steps are the plan's, leaving a record out is the same
as letting it in with gradient 0 (PRIVACY.md 2). What is wrong with a whole file is still an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from noisewise.data.examples import Examples
from noisewise.data.files import SUFFIXES, read_arrays
from noisewise.data.tables import read_csv
from noisewise.errors import InvalidValueError
from noisewise.training.local import TensorData

__all__ = ["read_records", "sound_records"]

_log = logging.getLogger("noisewise.site")


def read_records(path: Path, target: str, field: str) -> dict[str, NDArray[Any]]:
    """The arrays of a site's file; what cannot be read in a line of CSV is NaN, or class -1."""
    if path.suffix not in SUFFIXES or not path.is_file():
        allowed = f"must be a file that ends in {', '.join(SUFFIXES)}"
        raise InvalidValueError(field, str(path), allowed)
    return read_csv(path, target, keep_bad=True) if path.suffix == ".csv" else read_arrays(path)


def sound_records(
    inputs: ArrayLike, targets: ArrayLike, shape: tuple[int, ...], classes: int, field: str
) -> TensorData:
    """The records that a model of these inputs and classes can learn from.

    Args:
        inputs: [N, ...] numbers; uint8 is brought to [0, 1].
        targets: [N] whole numbers, in any numeric type.
        shape: of one record.
        classes: targets are 0 to classes - 1.
        field: where the records come from, for messages.

    Raises:
        InvalidValueError: shape or type are not those of records for this model, whatever the
            values are.
    """
    x, y = np.asarray(inputs), np.asarray(targets)
    for name, array in (("inputs", x), ("targets", y)):
        if array.dtype.kind not in "biuf":
            raise InvalidValueError(f"{field}: {name}", array.dtype, "must be numbers")
    if x.shape[1:] != shape or x.ndim < 1:
        raise InvalidValueError(field, f"records of shape {x.shape[1:]}", f"must be {shape}")
    if y.shape != x.shape[:1]:
        raise InvalidValueError(
            f"{field}: targets", list(y.shape), f"must be one class for each of {len(x)} inputs"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        x = x if x.dtype == np.uint8 else x.astype(np.float32)
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
        known = (y >= 0) & (y < classes) & (y == np.floor(y))
    sound = finite & known
    if not sound.all():
        _log.warning(
            "%s: %d of %d records add nothing: %d have values that are not finite, %d a class "
            "other than 0 to %d",
            field,
            int((~sound).sum()),
            len(sound),
            int((~finite).sum()),
            int((~known).sum()),
            classes - 1,
        )
    if not sound.any():
        _log.error("%s: no record is left, answers are noise alone", field)
    kept = Examples(x[sound], y[sound].astype(np.int64)).arrays()
    return TensorData(torch.from_numpy(kept[0]), torch.from_numpy(kept[1]))
