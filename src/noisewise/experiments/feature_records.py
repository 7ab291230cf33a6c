"""`map_dataset`: a dataset with public features in place of its inputs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples, as_float32
from noisewise.data.progress import Progress, silent
from noisewise.errors import InvalidValueError
from noisewise.storage import cache_dir
from noisewise.training.feature_cache import cached_features
from noisewise.training.features import Features

__all__ = ["map_dataset"]


def map_dataset(
    dataset: Dataset,
    features: Features,
    *,
    workers: int = 1,
    folder: Path | None = None,
    progress: Progress = silent,
) -> Dataset:
    """The dataset with features instead of inputs: [N, d] float32, memory-mapped.

    Args:
        dataset: whose records are scaled as its models see them.
        features: the map.
        workers: processes.
        folder: of the cache; by default that of the package.
        progress: called with the number of records that are done.

    Raises:
        InvalidValueError: a record has no finite features; the message gives its number.
        DiskFullError: no room for the features.

    Example:
        Features of a scattering transform, computed once and kept in the cache:

            dataset = map_dataset(load_dataset("mnist"), features, workers=2)
    """
    cache_folder = cache_dir() / "features" if folder is None else folder

    def mapped(examples: Examples, part: str) -> Examples:
        inputs = examples.array
        form: list[object] = [examples.scaling, inputs.shape]
        if inputs.dtype not in (np.uint8, np.float32):  # these two differ in their size
            form.append(inputs.dtype.str)
        digest = hashlib.sha256(repr(tuple(form)).encode())
        for start in range(0, len(examples), 4096):
            digest.update(np.ascontiguousarray(inputs[start : start + 4096]).data)
        values = cached_features(
            features,
            len(examples),
            lambda start, stop: _fractions(examples.take(slice(start, stop)), features),
            digest.hexdigest(),
            cache_folder,
            workers=workers,
            on_progress=lambda done, total: progress(f"features of {part} records", done, total),
        )
        return Examples(values, examples.targets, persons=examples.persons)

    test = None if dataset.test is None else mapped(dataset.test, "test")
    return replace(dataset, train=mapped(dataset.train, "training"), test=test)


def _fractions(examples: Examples, features: Features) -> NDArray[np.float32]:
    """Scaled inputs; bytes are divided by 255 if the dataset or the map declares it."""
    if examples.scaling is not None:
        return examples.scaling.apply(examples.array)
    if examples.array.dtype == np.uint8 and features.input_range is None:
        allowed = (
            "must be true to divide inputs of type uint8 by 255 (in Python images=True); for "
            'numbers that are not pixels set data.dtype = "float32"'
        )
        raise InvalidValueError("data.images", None, allowed)
    return as_float32(examples.array)
