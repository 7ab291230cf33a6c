"""The clients of a config: records read and split, each client with its own settings."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.data.columns import ColumnCoder, parse_columns
from noisewise.data.datasets import Dataset, Scaling, load_dataset
from noisewise.data.examples import IMAGES, Examples, count_units, map_arrays
from noisewise.data.own_files import dataset_from_csv, dataset_from_files
from noisewise.data.partition import ClientData, split_dataset
from noisewise.data.person_split import with_made_up_persons
from noisewise.data.populations import (
    authors_population,
    make_specs,
    order_epsilons,
    sample_batch_sizes,
    sample_epsilons,
)
from noisewise.data.progress import progress_bar
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import DataConfig, ExperimentConfig, FeaturesConfig
from noisewise.experiments.config_task import config_task, typed_dataset
from noisewise.experiments.feature_records import map_dataset
from noisewise.federation.attacks import Attack
from noisewise.federation.clients import Client, make_clients
from noisewise.plugins import load_object
from noisewise.training.features import make_features
from noisewise.worker_processes import available_cores

__all__ = [
    "counts_classes",
    "make_population",
    "read_dataset",
    "split_records",
    "training_dataset",
]

CSV = "csv"  # data.name of a folder with one CSV file for each client
FILES = "files"  # data.name of a folder with one file of any kind for each client


def read_dataset(
    data: DataConfig, columns: Mapping[str, Any] | None = None, *, values: bool = False
) -> Dataset:
    """Read a dataset by name, or call your own function ``"package.module:function"``.

    Args:
        data: names the dataset.
        columns: the config's ``[columns]``, for a table.
        values: the targets are not one class for each record.

    Raises:
        InvalidValueError: names the invalid field.
    """
    mean, std = data.mean, data.std
    if (mean is None) != (std is None):
        raise InvalidValueError("data.mean", mean, f"must be given together with std = {std}")
    scaling = Scaling(tuple(mean), tuple(std)) if mean is not None and std is not None else None
    if data.images and scaling is None:
        scaling = IMAGES
    coder = None if columns is None else parse_columns(columns)
    if data.text_length is not None and (data.name in (CSV, FILES) or ":" in data.name):
        allowed = "is only for the texts of noisewise: data.name = 'spam'"
        raise InvalidValueError("data.text_length", data.text_length, allowed)
    _check_file_fields(data)
    own = {
        "target": data.target or "target", "columns": coder, "scaling": scaling, "values": values,
        "person": data.person,
    }  # fmt: skip
    if data.name == CSV:
        classes = None if data.classes is None else tuple(data.classes)
        dataset = _read_own(dataset_from_csv, CSV, data.folder, classes=classes, **own)
    elif data.name == FILES:
        form = {"length": data.length, "dtype": data.dtype}
        dataset = _read_own(dataset_from_files, FILES, data.folder, **form, **own)
    else:
        dataset = _read(data.name, data.folder, scaling, coder, data.text_length)
    dataset = _declared_form(dataset, scaling if ":" in data.name else None, data.dtype)
    dataset = dataset if data.limit is None else _thinned(dataset, data.limit)
    if data.records_per_person is None:
        return dataset
    return replace(dataset, train=with_made_up_persons(dataset.train, data.records_per_person))


def counts_classes(data: DataConfig) -> bool:
    """Whether the number of classes is that of the records, because the config does not say it."""
    return data.name == FILES or (data.name == CSV and data.classes is None)


_ONLY_FOR = {
    "target": (CSV, FILES),
    "classes": (CSV,),
    "length": (FILES,),
    "person": (CSV, FILES),
}


def _check_file_fields(data: DataConfig) -> None:
    for field, names in _ONLY_FOR.items():
        value = getattr(data, field)
        if value is not None and data.name not in names:
            allowed = f"is only for data.name = {' or '.join(map(repr, names))}"
            raise InvalidValueError(f"data.{field}", value, allowed)


def _declared_form(dataset: Dataset, scaling: Scaling | None, dtype: str | None) -> Dataset:
    """The dataset with the scaling and the type that the config declares for own inputs."""

    def declared(examples: Examples) -> Examples:
        if scaling is not None:
            return replace(examples, scaling=scaling)
        if dtype is None or examples.scaling is not None:
            return examples
        return replace(examples, inputs=map_arrays(lambda a: a.astype(np.float32), examples.inputs))

    if scaling is None and dtype is None:
        return dataset
    test = None if dataset.test is None else declared(dataset.test)
    return replace(dataset, train=declared(dataset.train), test=test)


def _thinned(dataset: Dataset, limit: int) -> Dataset:
    """``limit`` training records, evenly spread, and the same share of the test records."""
    n = len(dataset.train)
    if limit > n:
        raise InvalidValueError("data.limit", limit, f"must be at most the {n} training records")

    def thin(count: int) -> NDArray[np.int64]:
        keep = max(1, count * limit // n)
        return np.linspace(0, count - 1, keep).astype(np.int64)

    return replace(
        dataset,
        train=dataset.train.take(thin(n)),
        test=None if dataset.test is None else dataset.test.take(thin(len(dataset.test))),
        groups=None if dataset.groups is None else dataset.groups[thin(n)],
    )


@functools.lru_cache(maxsize=2)
def _read_own(
    read: Callable[..., Dataset], name: str, folder: str | None, **settings: Any
) -> Dataset:
    """Own files. Cached, since all runs of a comparison use the same dataset."""
    if folder is None:
        raise InvalidValueError("data.folder", None, f"is required by data.name = {name!r}")
    return read(folder, **settings)


@functools.lru_cache(maxsize=2)
def _read(
    name: str,
    folder: str | None,
    scaling: Scaling | None,
    coder: ColumnCoder | None,
    text_length: int | None,
) -> Dataset:
    """Cached, since all runs of a comparison use the same dataset."""
    if ":" not in name:
        with progress_bar() as progress:
            return load_dataset(
                name,
                folder=folder,
                scaling=scaling,
                columns=coder,
                text_length=text_length,
                progress=progress,
            )
    if coder is not None:
        raise InvalidValueError("columns", coder.names, f"cannot be used: {name} is not a table")
    loaded = load_object(name, "data.name")
    try:
        inspect.signature(loaded).bind() if callable(loaded) else None
    except TypeError as error:
        allowed = f"must be a function without arguments that returns a noisewise Dataset ({error})"
        raise InvalidValueError("data.name", name, allowed) from error
    dataset = loaded() if callable(loaded) else loaded
    if not isinstance(dataset, Dataset):
        raise InvalidValueError("data.name", name, "must return a noisewise Dataset")
    return dataset


def training_dataset(config: ExperimentConfig) -> Dataset:
    """The records that clients train on: those of the dataset, or their features.

    Features are computed once and cached on disk.

    Raises:
        InvalidValueError: names the invalid field, or the record without finite features.
    """
    task, features = config_task(config), config.features
    values = not task.one_class
    if features is None:
        dataset = read_dataset(config.data, config.columns, values=values)
    else:
        columns = json.dumps(config.columns)
        dataset = _mapped(
            config.data.model_dump_json(), columns, features.model_dump_json(), values
        )
    return typed_dataset(dataset, task)


@functools.lru_cache(maxsize=1)
def _mapped(data: str, columns: str, features_json: str, values: bool) -> Dataset:
    """Cached, since all runs of a comparison use the same features. The configs come as JSON."""
    part = DataConfig.model_validate_json(data)
    dataset = read_dataset(part, json.loads(columns), values=values)
    table = FeaturesConfig.model_validate_json(features_json)
    features = make_features(
        table.name,
        dataset.train.array.shape[1:],
        options=table.options,
        weights=table.weights,
        sha256=table.sha256,
        mean=table.mean,
        std=table.std,
        normalise=table.normalise,
    )
    with progress_bar() as progress:
        return map_dataset(dataset, features, workers=available_cores(), progress=progress)


def split_records(config: ExperimentConfig, seed: int) -> tuple[ClientData, ...]:
    """Read the records and split them over the clients.

    Args:
        config: which records, and how to split them.
        seed: of the split.

    Returns:
        Each client's training and held-out records.
    """
    data = config.data
    partition: Any = data.partition
    if ":" in data.partition:
        partition = load_object(data.partition, "data.partition")
    return split_dataset(
        training_dataset(config),
        data.clients,
        partition=partition,
        test_fraction=data.test_fraction,
        seed=seed,
        max_labels=data.max_labels,
        alpha=data.alpha,
        min_records=data.min_records,
    )


def make_population(
    config: ExperimentConfig, seed: int, records: Sequence[ClientData] | None = None
) -> tuple[Client, ...]:
    """Make the clients of a config.

    Args:
        config: the experiment.
        seed: of the split; the clients' settings do not depend on it.
        records: of the clients, if they are split already.
    """
    records = split_records(config, seed) if records is None else records
    n, population = len(records), config.population
    if population.unit == "person" and any(part.train.persons is None for part in records):
        allowed = "requires data.person, data.records_per_person or a Dataset with persons"
        raise InvalidValueError("population.unit", population.unit, allowed)
    sizes = [count_units(part.train, population.unit) for part in records]
    epsilons: Any = population.epsilon
    batch_sizes: Any = population.batch_size
    if isinstance(epsilons, str):
        epsilons = (
            authors_population(epsilons, n).epsilons
            if population.draws == "authors"
            else sample_epsilons(epsilons, n, population.seed)
        )
    if population.batch_share is not None:
        share = population.batch_share
        batch_sizes = [max(1, round(share * size)) for size in sizes]
    elif batch_sizes == "mixed":
        batch_sizes = (
            authors_population("Dist1", n).batch_sizes
            if population.draws == "authors"
            else sample_batch_sizes(n, population.seed)
        )
    if population.epsilon_scale != 1:
        scale = population.epsilon_scale
        several = isinstance(epsilons, Sequence)
        epsilons = [scale * e for e in epsilons] if several else scale * epsilons
    if population.order is not None:
        if not isinstance(epsilons, Sequence):
            allowed = "needs one epsilon for each client: a list or a distribution"
            raise InvalidValueError("population.order", population.order, allowed)
        epsilons = order_epsilons(epsilons, sizes, population.order)
    specs = make_specs(
        records,
        epsilons=epsilons,
        batch_sizes=batch_sizes,
        delta=population.delta,
        local_epochs=population.local_epochs,
        unit=population.unit,
        max_records=population.max_records,
    )
    return make_clients(specs, records, _reported_epsilons(config, specs))


def _reported_epsilons(config: ExperimentConfig, specs: Sequence[ClientSpec]) -> dict[str, float]:
    """Epsilons that clients report instead of their own."""
    reported: dict[str, float] = dict(config.population.reported_epsilon)
    for attack in config.attacks:
        if attack.kind == "falsified_epsilon":
            factor = Attack(attack.kind, tuple(attack.clients), attack.strength).size
            reported |= {s.id: factor * s.epsilon for s in specs if s.id in attack.clients}
    return reported
