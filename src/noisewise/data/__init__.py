"""Datasets, partitions and populations: who the clients are and what they hold."""

from noisewise.data.custom import (
    clients_from_files,
    clients_from_torch,
    count_classes,
    dataset_from_arrays,
    dataset_from_torch,
)
from noisewise.data.datasets import (
    Dataset,
    DatasetStatus,
    dataset_names,
    get_dataset,
    list_datasets,
    load_dataset,
    verify_dataset,
)
from noisewise.data.examples import Examples, Scaling
from noisewise.data.partition import (
    ClientData,
    partition_dirichlet,
    partition_iid,
    partition_quantity,
    partition_shards,
    split_dataset,
)
from noisewise.data.populations import (
    AuthorsDraw,
    authors_population,
    make_specs,
    population_table,
    sample_batch_sizes,
    sample_epsilons,
)
from noisewise.data.specs import ClientSpec

__all__ = [
    "AuthorsDraw",
    "ClientData",
    "ClientSpec",
    "Dataset",
    "DatasetStatus",
    "Examples",
    "Scaling",
    "authors_population",
    "clients_from_files",
    "clients_from_torch",
    "count_classes",
    "dataset_from_arrays",
    "dataset_from_torch",
    "dataset_names",
    "get_dataset",
    "list_datasets",
    "load_dataset",
    "make_specs",
    "partition_dirichlet",
    "partition_iid",
    "partition_quantity",
    "partition_shards",
    "population_table",
    "sample_batch_sizes",
    "sample_epsilons",
    "split_dataset",
    "verify_dataset",
]
