"""Datasets, partitions over clients, and the settings of the clients (populations)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noisewise.lazy_imports import lazy_names

if TYPE_CHECKING:
    from noisewise.data.columns import ColumnCoder, parse_columns
    from noisewise.data.custom import (
        clients_from_torch,
        count_classes,
        dataset_from_arrays,
        dataset_from_rows,
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
    from noisewise.data.describe import describe_dataset
    from noisewise.data.examples import Examples, Scaling
    from noisewise.data.own_files import clients_from_files, dataset_from_csv, dataset_from_files
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
        order_epsilons,
        population_table,
        sample_batch_sizes,
        sample_epsilons,
    )
    from noisewise.data.sequences import next_tokens, pad_sequences, tokenise
    from noisewise.data.specs import ClientSpec
    from noisewise.data.texts import TextDataset, load_texts, text_records

__all__ = [
    "AuthorsDraw",
    "ClientData",
    "ClientSpec",
    "ColumnCoder",
    "Dataset",
    "DatasetStatus",
    "Examples",
    "Scaling",
    "TextDataset",
    "authors_population",
    "clients_from_files",
    "clients_from_torch",
    "count_classes",
    "dataset_from_arrays",
    "dataset_from_csv",
    "dataset_from_files",
    "dataset_from_rows",
    "dataset_from_torch",
    "dataset_names",
    "describe_dataset",
    "get_dataset",
    "list_datasets",
    "load_dataset",
    "load_texts",
    "make_specs",
    "next_tokens",
    "order_epsilons",
    "pad_sequences",
    "parse_columns",
    "partition_dirichlet",
    "partition_iid",
    "partition_quantity",
    "partition_shards",
    "population_table",
    "sample_batch_sizes",
    "sample_epsilons",
    "split_dataset",
    "text_records",
    "tokenise",
    "verify_dataset",
]

# Names are imported on first use: a site that reads its records loads no code for downloads.
_HOMES = {
    "AuthorsDraw": "populations",
    "ClientData": "partition",
    "ClientSpec": "specs",
    "ColumnCoder": "columns",
    "Dataset": "datasets",
    "DatasetStatus": "datasets",
    "Examples": "examples",
    "Scaling": "examples",
    "TextDataset": "texts",
    "authors_population": "populations",
    "clients_from_files": "own_files",
    "clients_from_torch": "custom",
    "count_classes": "custom",
    "dataset_from_arrays": "custom",
    "dataset_from_csv": "own_files",
    "dataset_from_files": "own_files",
    "dataset_from_rows": "custom",
    "dataset_from_torch": "custom",
    "dataset_names": "datasets",
    "describe_dataset": "describe",
    "get_dataset": "datasets",
    "list_datasets": "datasets",
    "load_dataset": "datasets",
    "load_texts": "texts",
    "make_specs": "populations",
    "next_tokens": "sequences",
    "pad_sequences": "sequences",
    "tokenise": "sequences",
    "order_epsilons": "populations",
    "parse_columns": "columns",
    "partition_dirichlet": "partition",
    "partition_iid": "partition",
    "partition_quantity": "partition",
    "partition_shards": "partition",
    "population_table": "populations",
    "sample_batch_sizes": "populations",
    "sample_epsilons": "populations",
    "split_dataset": "partition",
    "text_records": "texts",
    "verify_dataset": "datasets",
}


__getattr__ = lazy_names(__name__, _HOMES)
