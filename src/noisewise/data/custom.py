"""Your own data in memory: arrays, torch datasets, rows of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from noisewise.data.datasets import Dataset
from noisewise.data.examples import Arrays, Examples, Scaling
from noisewise.data.groups import name_groups
from noisewise.data.own_arrays import (
    examples_from,
    same_form,
    stack_records,
)
from noisewise.data.partition import ClientData, hold_out
from noisewise.data.sequences import tokenise
from noisewise.errors import InvalidValueError

__all__ = [
    "RecordSource",
    "check_clients",
    "clients_from_torch",
    "count_classes",
    "dataset_from_arrays",
    "dataset_from_rows",
    "dataset_from_torch",
]


class RecordSource(Protocol):
    """The part of a torch ``Dataset`` that is used: its length, and the pair (input, class)."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return the pair (input, class) of a record."""
        ...


def dataset_from_arrays(
    inputs: ArrayLike | Arrays,
    targets: ArrayLike,
    *,
    test_inputs: ArrayLike | Arrays | None = None,
    test_targets: ArrayLike | None = None,
    groups: Sequence[str] | None = None,
    persons: ArrayLike | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    images: bool = False,
    values: bool = False,
    dtype: str | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` from arrays, for `split_dataset`.

    Args:
        inputs: one array [N, ...], a tuple of arrays or a mapping of arrays. Whole numbers stay
            whole numbers, other numbers become float32.
        targets: [N], classes as whole numbers from 0; with ``values`` numbers [N, ...].
        test_inputs: test records. They are split over the clients in the proportions of the
            training records. Without them, a part of each client's records is held out.
        test_targets: classes of the test records.
        groups: the name of the real client that has each record, for the partition "natural".
        persons: [N] whole numbers or text, whose record each one is; equal values are the same
            person. Needed for budgets that protect persons; never an input.
        n_classes: number of classes; None uses the largest class + 1.
        scaling: see `Examples`.
        images: uint8 inputs are pixels: they are divided by 255.
        values: the targets are not one class for each record (regression, labels, segmentation,
            language models).
        dtype: "float32" converts whole numbers in the inputs; None keeps them.
        name: name of the dataset in reports.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: an array has the wrong type, shape or values.

    Example:
        >>> data = dataset_from_arrays(np.zeros((6, 2)), [0, 1, 2, 0, 1, 2])
        >>> len(data.train), data.n_classes
        (6, 3)
    """
    ways: Any = {"values": values, "images": images, "dtype": dtype}
    train = examples_from(inputs, targets, scaling, persons=persons, **ways)
    if (test_inputs is None) != (test_targets is None):
        raise InvalidValueError(
            "test_targets", test_targets, "give both test_inputs and test_targets, or neither"
        )
    test = None
    if test_inputs is not None and test_targets is not None:
        test = examples_from(test_inputs, test_targets, scaling, prefix="test_", **ways)
        same_form([("inputs", train), ("test_inputs", test)])
    if n_classes is None and not values:
        n_classes = 1 + max(int(part.targets.max()) for part in (train, test) if part is not None)
    numbers, names = (None, ()) if groups is None else name_groups(groups)
    return Dataset(
        name,
        train,
        test,
        n_classes,
        deal_test=test is not None,
        groups=numbers,
        group_names=names,
    )


def dataset_from_rows(
    rows: RecordSource,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    text: str = "text",
    label: str = "label",
    test: RecordSource | None = None,
    client: str | None = None,
    person: str | None = None,
    n_classes: int | None = None,
    values: bool = False,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` from rows that are mappings, such as a Hugging Face dataset.

    With a tokenizer, the column ``text`` becomes ``input_ids``, ``attention_mask`` and so on.
    Without one, all other columns of a row are inputs by name.

    Args:
        rows: anything with a length whose items are mappings.
        tokenizer: of Hugging Face, or a function like one.
        length: tokens of a record; texts are cut or padded to it. Required with a tokenizer, and
            for columns with sequences of different lengths.
        text: column with the text.
        label: column with the target.
        test: test rows.
        client: column with the name of the real client, for the partition "natural".
        person: column that says whose record a row is; it is no input.
        n_classes: number of classes; declare it, or the largest class + 1 is used.
        values: the targets are not one class for each record.
        name: for reports.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: a column is missing, or the length is not given.

    Example:
        >>> rows = [{"a": [1, 2], "label": 0}, {"a": [3], "label": 1}]
        >>> dataset_from_rows(rows, length=2).train.inputs["a"].tolist()
        [[1, 2], [3, 0]]
    """
    if tokenizer is not None and length is None:
        raise InvalidValueError("length", None, "must be given with a tokenizer")

    def arrays(part: RecordSource, field: str) -> tuple[Any, Any]:
        items = [part[index] for index in range(len(part))]
        try:
            if tokenizer is not None and length is not None:
                targets = np.asarray([item[label] for item in items])
                return tokenise([item[text] for item in items], tokenizer, length), targets
            left_out = {label, client, person}
            pairs = [({k: v for k, v in r.items() if k not in left_out}, r[label]) for r in items]
        except (KeyError, TypeError, AttributeError) as error:
            allowed = f"must be mappings with the columns {text!r} and {label!r} ({error!r})"
            raise InvalidValueError(field, type(part).__name__, allowed) from error
        return stack_records(pairs, field, values=values, length=length)

    inputs, targets = arrays(rows, "rows")
    test_inputs, test_targets = arrays(test, "test") if test is not None else (None, None)
    groups = None if client is None else [str(rows[k][client]) for k in range(len(rows))]
    try:
        persons = None if person is None else [rows[k][person] for k in range(len(rows))]
    except KeyError as error:
        raise InvalidValueError("person", person, "must be a column of every row") from error
    return dataset_from_arrays(
        inputs,
        targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        groups=groups,
        persons=persons,
        n_classes=n_classes,
        values=values,
        name=name,
    )


def dataset_from_torch(
    dataset: RecordSource,
    *,
    test: RecordSource | None = None,
    n_classes: int | None = None,
    scaling: Scaling | None = None,
    images: bool = False,
    values: bool = False,
    dtype: str | None = None,
    length: int | None = None,
    name: str = "own",
) -> Dataset:
    """Make a `Dataset` from a torch ``Dataset`` or any sequence of pairs.

    All records are read into memory once.

    Args:
        dataset: pairs (input, target). An input is an array, a tuple of arrays for
            ``model(*inputs)``, or a mapping of arrays for ``model(**inputs)``.
        test: test records, as in `dataset_from_arrays`.
        n_classes: number of classes; None uses the largest class + 1.
        scaling: see `Examples`.
        images: see `dataset_from_arrays`, as ``values`` and ``dtype``.
        values: see ``images``.
        dtype: see ``images``.
        length: for sequences of whole numbers with different lengths; longer ones are cut,
            shorter ones filled up with 0.
        name: name of the dataset in reports.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: the records are not pairs of one shape.

    Example:
        >>> data = dataset_from_torch([(np.zeros(2), 0), (np.ones(2), 1)])
        >>> len(data.train), data.n_classes
        (2, 2)
    """
    ways: Any = {"values": values, "length": length}
    inputs, targets = stack_records(dataset, "dataset", **ways)
    test_inputs, test_targets = (
        stack_records(test, "test", **ways) if test is not None else (None, None)
    )
    return dataset_from_arrays(
        inputs,
        targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        n_classes=n_classes,
        scaling=scaling,
        images=images,
        values=values,
        dtype=dtype,
        name=name,
    )


def clients_from_torch(
    datasets: Sequence[RecordSource],
    *,
    tests: Sequence[RecordSource] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    scaling: Scaling | None = None,
    values: bool = False,
    length: int | None = None,
) -> tuple[ClientData, ...]:
    """Make one client from each torch ``Dataset``.

    Args:
        datasets: the records of each client.
        tests: the test records of each client; None holds out a part of the client's records.
        test_fraction: share of the records that is held out, if ``tests`` is None.
        seed: seed of the random choice of that share.
        scaling: see `Examples`.
        values: see `dataset_from_torch`, as ``length``.
        length: see ``values``.

    Returns:
        The clients, in the order of ``datasets``.

    Raises:
        InvalidValueError: records are not pairs of one shape and type, or the number of ``tests``
            is wrong.
    """
    if tests is not None and len(tests) != len(datasets):
        raise InvalidValueError(
            "tests",
            f"{len(tests)} datasets",
            f"must be {len(datasets)} datasets, one for each client",
        )
    clients = []

    def examples(dataset: RecordSource, field: str) -> Examples:
        arrays = stack_records(dataset, field, values=values, length=length)
        return examples_from(*arrays, scaling, prefix=f"{field}: ", values=values)

    for number, dataset in enumerate(datasets):
        records = examples(dataset, f"datasets[{number}]")
        if tests is None:
            clients.append(hold_out(records, test_fraction, seed, number))
        else:
            test = examples(tests[number], f"tests[{number}]")
            clients.append(ClientData(records, test))
    return check_clients([f"datasets[{number}]" for number in range(len(datasets))], clients)


def count_classes(clients: Sequence[ClientData]) -> int:
    """Return the largest class of any client + 1, the number of outputs that a model needs."""
    return 1 + max(int(p.targets.max()) for client in clients for p in (client.train, client.test))


def check_clients(names: Sequence[str], clients: list[ClientData]) -> tuple[ClientData, ...]:
    """The clients, if there are any and all have records of one form; ``names`` are for errors."""
    if not clients:
        raise InvalidValueError("clients", 0, "must be at least 1 client")
    same_form(
        [(n, part) for n, c in zip(names, clients, strict=True) for part in (c.train, c.test)]
    )
    return tuple(clients)
