"""`map_dataset`: a dataset with public features in place of its inputs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples
from noisewise.data.progress import Progress, silent
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
    """
    place = cache_dir() / "features" if folder is None else folder

    def mapped(examples: Examples, part: str) -> Examples:
        digest = hashlib.sha256(repr((examples.scaling, examples.inputs.shape)).encode())
        for start in range(0, len(examples), 4096):
            digest.update(np.ascontiguousarray(examples.inputs[start : start + 4096]).data)
        values = cached_features(
            features,
            len(examples),
            lambda start, stop: examples.take(slice(start, stop)).arrays()[0],
            digest.hexdigest(),
            place,
            workers=workers,
            on_progress=lambda done, total: progress(f"features of {part} records", done, total),
        )
        return Examples(values, examples.targets)

    test = None if dataset.test is None else mapped(dataset.test, "test")
    return replace(dataset, train=mapped(dataset.train, "training"), test=test)
