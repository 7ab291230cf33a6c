"""Split the records of a dataset over clients, and each client's records into train and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import (
    fraction,
    non_negative_int,
    positive_int,
    positive_number,
    with_suggestion,
)
from noisewise.data.apportion import balance_rows, deal_shards, even_sizes, largest_remainder
from noisewise.data.datasets import Dataset, Examples
from noisewise.data.groups import Group, natural_groups
from noisewise.data.person_split import SplitUnits
from noisewise.errors import InvalidValueError
from noisewise.randomness import keyed_generator
from noisewise.text import short_repr

__all__ = [
    "ClientData",
    "hold_out",
    "partition_dirichlet",
    "partition_iid",
    "partition_quantity",
    "partition_shards",
    "split_dataset",
]

Indices = list[NDArray[np.int64]]
Partition = Callable[..., Indices]
"""A function of (labels, n_clients, seed), or with one option before the seed."""

TRIES = 200  # random draws before a partition reports that it found no valid split
NATURAL = "natural"  # the partition into the real clients of a dataset
PARTITIONS = ("iid", "shards", "dirichlet", "quantity", NATURAL)
_BY_CLASS = ("shards", "dirichlet")
TEST_FRACTION = 0.2  # the paper: 2,400 train and 600 test records


@dataclass(frozen=True, eq=False, repr=False)
class ClientData:
    """The records of one client.

    Args:
        train: records for DP-SGD.
        test: held-out records for the client's own accuracy.
        name: name of a real client; None if a partition made the client.
    """

    train: Examples
    test: Examples
    name: str | None = None

    def __repr__(self) -> str:
        """Its name and the numbers of its records."""
        return short_repr(self, name=self.name, train=len(self.train), test=len(self.test))


def partition_iid(labels: ArrayLike, n_clients: int, seed: int) -> Indices:
    """Split all records at random into equal shares (sizes differ by at most one).

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        seed: the same seed gives the same split.

    Returns:
        One sorted array of record numbers for each client; disjoint, and together all records.
    """
    codes, _ = _check(labels, n_clients)
    order = _generator(seed).permutation(len(codes))
    cuts = np.cumsum(even_sizes(len(codes), n_clients))[:-1]
    return [np.sort(part) for part in np.split(order, cuts)]


def partition_shards(labels: ArrayLike, n_clients: int, max_labels: int, seed: int) -> Indices:
    """Split into equal shares with at most ``max_labels`` classes at each client.

    The paper's appendix on datasets: each class is cut into n * k / C shards and each client gets k
    shards at random; with k = C it gets one of each class. Real classes differ in size (MNIST's
    have 5,421 to 6,742 records), so records then move between clients that have the same class,
    until the sizes of all clients differ by at most one record.

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        max_labels: k, the largest number of classes at a client; a value above C is used as C.
        seed: the same seed gives the same split.

    Returns:
        One sorted array of record numbers for each client; disjoint, and together all records.

    Raises:
        InvalidValueError: no such split was found (for k = 1 there may be none of equal sizes).
    """
    codes, counts = _check(labels, n_clients)
    n_labels = positive_int("max_labels", max_labels)
    per_client = min(n_labels, len(counts))
    if n_clients * per_client < len(counts):
        raise InvalidValueError(
            "max_labels",
            n_labels,
            f"{n_clients} clients with {n_labels} labels each cannot have all {len(counts)} "
            "classes; increase max_labels or n_clients",
        )
    rng = _generator(seed)
    sizes = even_sizes(len(codes), n_clients)
    for _ in range(TRIES):
        amounts = deal_shards(counts, n_clients, per_client, rng)
        table = balance_rows(amounts, sizes, per_client)
        if table is not None:
            return _assign_records(codes, table, rng)
    raise InvalidValueError(
        "max_labels",
        n_labels,
        f"found no split of {len(codes)} records into {n_clients} equal shares with at most "
        f"{n_labels} labels each; use a larger max_labels, another n_clients or partition "
        "'dirichlet'",
    )


def partition_dirichlet(
    labels: ArrayLike, n_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Indices:
    """Split each class over the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    A small alpha gives few labels at a client and very different sizes; a large alpha is close to
    iid. As in Li et al. 2022, the draw is repeated until the smallest client has ``min_size``
    records.

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        alpha: concentration > 0.
        seed: the same seed gives the same split.
        min_size: smallest number of records that a client may get.

    Returns:
        One sorted array of record numbers for each client; disjoint, and together all records.

    Raises:
        InvalidValueError: no draw left every client with ``min_size`` records.
    """
    codes, counts = _check(labels, n_clients, min_size)
    positive_number("alpha", alpha)
    rng = _generator(seed)
    for shares in _dirichlet(rng, alpha, n_clients, len(counts)):
        columns = [largest_remainder(p, int(m)) for p, m in zip(shares, counts, strict=True)]
        table = np.stack(columns, axis=1)
        if table.sum(axis=1).min() >= min_size:
            return _assign_records(codes, table, rng)
    raise _too_skewed(alpha, n_clients, len(codes), min_size)


def partition_quantity(
    labels: ArrayLike, n_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Indices:
    """Split into shares of Dirichlet(alpha) sizes (quantity skew), with labels mixed at random.

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        alpha: concentration > 0; small values give very different sizes.
        seed: the same seed gives the same split.
        min_size: smallest number of records that a client may get.

    Returns:
        One sorted array of record numbers for each client; disjoint, and together all records.

    Raises:
        InvalidValueError: no draw left every client with ``min_size`` records.
    """
    codes, _ = _check(labels, n_clients, min_size)
    positive_number("alpha", alpha)
    rng = _generator(seed)
    for shares in _dirichlet(rng, alpha, n_clients, 1):
        sizes = largest_remainder(shares[0], len(codes))
        if sizes.min() >= min_size:
            order = rng.permutation(len(codes))
            return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]
    raise _too_skewed(alpha, n_clients, len(codes), min_size)


def split_dataset(
    dataset: Dataset,
    n_clients: int | None = None,
    *,
    partition: str | Partition = "iid",
    test_fraction: float | None = None,
    seed: int = 0,
    max_labels: int | None = None,
    alpha: float | None = None,
    min_records: int | None = None,
) -> tuple[ClientData, ...]:
    """Split a dataset over clients; a client's train and test records have the same label mix.

    If it is known whose records they are, the records of a person stay together.

    Args:
        dataset: the dataset.
        n_clients: number of clients; optional for ``"natural"``.
        partition: ``"iid"``, ``"shards"``, ``"dirichlet"``, ``"quantity"``, ``"natural"`` (the real
            clients of the dataset), or a function of (labels, n_clients, seed) that returns the
            record numbers of each client.
        test_fraction: share of a client's records that is held out. None does as the paper: the
            client's share of the published test set if ``dataset.deal_test`` (CIFAR), else 0.2.
        seed: the same seed gives the same split.
        max_labels: option of ``"shards"``, see `partition_shards`.
        alpha: option of ``"dirichlet"`` and ``"quantity"``.
        min_records: option of ``"natural"``: clients with fewer records are left out.

    Returns:
        The records of each client.

    Raises:
        InvalidValueError: an option is invalid, missing or not used by the partition, or a client
            would have no records.

    Example:
        >>> from noisewise.data.datasets import load_dataset
        >>> clients = split_dataset(load_dataset("digits"), 10, partition="shards", max_labels=4)
        >>> len(clients[0].train), len(clients[0].test)
        (144, 36)
    """
    if test_fraction is not None:
        fraction("test_fraction", test_fraction, one_allowed=False)
    options = {"max_labels": max_labels, "alpha": alpha, "min_records": min_records}
    if partition == NATURAL:
        _check_options(partition, options, "min_records", required=False)
        groups = _natural(dataset, n_clients, min_records)
        names: list[str | None] = [group.name for group in groups]
        numbers = [group.number for group in groups]
        parts = [group.records for group in groups]
    else:
        split = _partition(partition, options)
        if partition in _BY_CLASS and not dataset.train.has_classes:
            allowed = "must be iid, quantity, natural or own: the targets are not one class each"
            raise InvalidValueError("partition", partition, allowed)
        units = SplitUnits.of(dataset.train)
        dealt = split(units.labels, positive_int("n_clients", n_clients), seed)
        parts = [units.records(part) for part in dealt]
        names, numbers = [None] * len(parts), list(range(len(parts)))
    for number, part in enumerate(parts):
        if len(part) == 0:
            raise InvalidValueError(
                "partition",
                partition,
                f"gives client {number} no records; every client needs at least one",
            )
    if test_fraction is None and dataset.deal_test and dataset.test is not None:
        clients = _with_published_test(dataset.train, dataset.test, parts, seed)
    else:
        share = TEST_FRACTION if test_fraction is None else test_fraction
        clients = tuple(
            hold_out(dataset.train.take(part), share, seed, number)
            for number, part in zip(numbers, parts, strict=True)
        )
    return tuple(replace(client, name=name) for client, name in zip(clients, names, strict=True))


def _natural(dataset: Dataset, n_clients: int | None, min_records: int | None) -> list[Group]:
    groups = natural_groups(dataset.groups, dataset.group_names, min_records)
    if n_clients is not None and n_clients != len(groups):
        allowed = f"must be left out, or the {len(groups)} real clients of {dataset.name}"
        raise InvalidValueError("n_clients", n_clients, allowed)
    return groups


def hold_out(records: Examples, test_fraction: float, seed: int, number: int) -> ClientData:
    """Split one client's records into train and test, with the same mix of labels.

    If it is known whose records they are, the records of a person stay together.

    Args:
        records: all records of the client.
        test_fraction: share that is held out; train and test get at least one record each.
        seed: the same seed gives the same split.
        number: number of the client; each client has its own random stream.

    Returns:
        The train and test records.

    Raises:
        InvalidValueError: the client has fewer than two records or persons.
    """
    fraction("test_fraction", test_fraction, one_allowed=False)
    units = SplitUnits.of(records)
    if len(units.labels) < 2:
        unit_name = "record(s)" if units.owners is None else "person(s)"
        raise InvalidValueError(
            f"client {number}",
            f"{len(units.labels)} {unit_name}",
            "must be at least 1 to train and 1 to test; use fewer clients or more data",
        )
    rng = keyed_generator(non_negative_int("seed", seed), "hold out", number)
    mask = _hold_out(units.labels, test_fraction, rng)
    train, test = (units.records(np.flatnonzero(chosen)) for chosen in (~mask, mask))
    return ClientData(records.take(train), records.take(test))


def _partition(partition: str | Partition, options: Mapping[str, float | None]) -> Partition:
    """Return the partition with its option; an option that it does not use is an error."""
    table: dict[str, tuple[Partition, str | None]] = {
        "iid": (partition_iid, None),
        "shards": (partition_shards, "max_labels"),
        "dirichlet": (partition_dirichlet, "alpha"),
        "quantity": (partition_quantity, "alpha"),
    }
    if isinstance(partition, str) and partition not in table:
        names = ", ".join(PARTITIONS)
        allowed = with_suggestion(partition, PARTITIONS, f"must be one of {names}")
        raise InvalidValueError("partition", partition, allowed)
    split, needed = table[partition] if isinstance(partition, str) else (partition, None)
    _check_options(partition, options, needed)
    chosen = [options[needed]] if needed else []
    return lambda labels, n_clients, seed: split(labels, n_clients, *chosen, seed)


def _check_options(
    partition: str | Partition,
    options: Mapping[str, float | None],
    used: str | None,
    required: bool = True,
) -> None:
    """Refuse an option that the partition does not use, or one that it lacks."""
    for option, value in options.items():
        if option == used and value is None and required:
            raise InvalidValueError(option, value, f"is required by partition {partition!r}")
        if option != used and value is not None:
            raise InvalidValueError(
                option, value, f"is not used by partition {partition!r}; leave it out"
            )


def _check(
    labels: ArrayLike, n_clients: int, min_size: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the class number 0..C-1 of each record, and the number of records of each class."""
    n_clients = positive_int("n_clients", n_clients)
    values = np.asarray(labels)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidValueError("labels", values.shape, "must be a non-empty list of classes")
    if n_clients * positive_int("min_size", min_size) > len(values):
        raise InvalidValueError(
            "n_clients",
            n_clients,
            f"is too many for {len(values)} records; each client needs at least {min_size}",
        )
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    return codes.astype(np.int64), counts.astype(np.int64)


def _generator(seed: int) -> np.random.Generator:
    return keyed_generator(non_negative_int("seed", seed), "partition")


def _dirichlet(
    rng: np.random.Generator, alpha: float, size: int, vectors: int
) -> Iterator[NDArray[np.float64]]:
    """Yield up to `TRIES` draws of vectors of shares [vectors, size]; not those that underflow."""
    for _ in range(TRIES):
        shares = rng.dirichlet(np.full(size, alpha), size=vectors)
        if np.isfinite(shares).all() and (shares.sum(axis=1) > 0).all():
            yield shares


def _too_skewed(alpha: float, n_clients: int, n: int, min_size: int) -> InvalidValueError:
    return InvalidValueError(
        "alpha",
        alpha,
        f"in {TRIES} random splits of {n} records over {n_clients} clients, a client had fewer "
        f"than {min_size}; use a larger alpha, fewer clients or a smaller min_size",
    )


def _assign_records(
    codes: NDArray[np.int64], table: NDArray[np.int64], rng: np.random.Generator
) -> Indices:
    """Turn a table of counts [n, C] into record numbers, chosen at random within each class."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(table.shape[0])]
    for label in range(table.shape[1]):
        records = rng.permutation(np.flatnonzero(codes == label))
        for owned, piece in zip(
            parts, np.split(records, np.cumsum(table[:, label])[:-1]), strict=True
        ):
            owned.append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in parts]


def _hold_out(
    labels: NDArray[np.int64], share: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Return the mask of the test records: the label mix of all records, at least one, not all."""
    n = len(labels)
    total = min(max(round(n * share), 1), n - 1)
    classes, counts = np.unique(labels, return_counts=True)
    order = rng.permutation(len(classes))  # equal remainders are rounded at random
    mask = np.zeros(n, dtype=np.bool_)
    amounts = largest_remainder(counts[order].astype(np.float64), total)
    for label, amount in zip(classes[order], amounts, strict=True):
        mask[rng.permutation(np.flatnonzero(labels == label))[:amount]] = True
    return mask


def _with_published_test(
    train: Examples, test: Examples, parts: Indices, seed: int
) -> tuple[ClientData, ...]:
    """Split the published test set in the clients' proportions of each class."""
    labels, test_labels = train.labels, test.labels
    n_classes = int(max(labels.max(), test_labels.max())) + 1
    held = np.stack([np.bincount(labels[part], minlength=n_classes) for part in parts])
    table = np.zeros_like(held)
    for label, amount in enumerate(np.bincount(test_labels, minlength=n_classes)):
        shares = held[:, label] if held[:, label].any() else np.ones(len(parts))
        table[:, label] = largest_remainder(shares.astype(np.float64), int(amount))
    # After rounding each class, sizes can be off by a record or two; correct that where possible.
    sizes = largest_remainder(held.sum(axis=1).astype(np.float64), len(test))
    balanced = balance_rows(table, sizes, max_labels=0)
    table = table if balanced is None else balanced
    if (table.sum(axis=1) == 0).any():
        number = int(np.argmin(table.sum(axis=1)))
        raise InvalidValueError(
            "n_clients",
            len(parts),
            f"gives client {number} no test record; use fewer clients or set test_fraction",
        )
    tests = _assign_records(test_labels, table, keyed_generator(seed, "hold out"))
    return tuple(
        ClientData(train.take(part), test.take(own)) for part, own in zip(parts, tests, strict=True)
    )
