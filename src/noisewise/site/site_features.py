"""Public features at a site: the map that its own file names, applied to each record alone.

A record without features (the map raises an error, or gives NaN) is left out, like every other bad
record (`site_records`). No server has a say in the map: an instruction has no field for it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from noisewise.errors import InvalidValueError
from noisewise.schema import Count, Strict
from noisewise.site.feature_rows import cached_rows
from noisewise.training.features import Features, Normalise, make_features
from noisewise.training.local import TensorData

__all__ = ["FeaturesPart", "load_features", "mapped_records"]

_log = logging.getLogger("noisewise.site")


class FeaturesPart(Strict):
    """A fixed public map that the site applies to each record; `make_features` explains it.

    ``input_shape`` is the shape of one record. ``model.input_shape`` is then the number of
    features. A path in ``weights`` starts at the site's file.
    """

    name: str
    input_shape: list[Count]
    options: dict[str, Any] = Field(default={})
    weights: str | None = None
    sha256: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    normalise: Normalise = "unit"


def load_features(part: FeaturesPart, file: Path) -> Features:
    """The map that a site's file names, if its weights have the SHA-256 that the file names.

    Args:
        part: ``[features]`` of the site's file.
        file: the site's file.

    Raises:
        InvalidValueError: one line that names the field; see `make_features`.
    """
    try:
        return make_features(
            part.name,
            tuple(part.input_shape),
            options=part.options,
            weights=None if part.weights is None else file.resolve().parent / part.weights,
            sha256=part.sha256,
            mean=part.mean,
            std=part.std,
            normalise=part.normalise,
        )
    except InvalidValueError as error:
        raise InvalidValueError(f"{file}: {error.field}", error.value, error.allowed) from error


def mapped_records(
    features: Features, records: TensorData, folder: Path, source: str, field: str
) -> TensorData:
    """The features of the records, without the records that have none.

    Args:
        features: the map.
        records: of the shape that the map takes.
        folder: of the site's cache; see `cached_rows`.
        source: where the records come from; every source has a cache of its own.
        field: the same for messages.

    Raises:
        InvalidValueError: other accounts can open the folder of the cache.
    """
    rows = cached_rows(features, records.tensor.numpy(), folder, source)
    inputs = torch.from_numpy(rows)
    usable = inputs.isfinite().all(dim=1)
    if bool(usable.all()):
        return TensorData(inputs, records.targets, records.persons)
    lost = int((~usable).sum())
    _log.warning(
        "%s: %d of %d records are left out: %s returns no finite features for them, or "
        "does not take their values",
        field,
        lost,
        len(usable),
        features.name,
    )
    if lost == len(usable):
        _log.error("%s: no usable record: replies contain only noise", field)
    persons = None if records.persons is None else records.persons.take(usable.numpy())
    return TensorData(inputs[usable], records.targets[usable], persons)
