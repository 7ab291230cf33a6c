"""Partitions: which records belong to which client, and which of those it is tested on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import fraction, non_negative_int, positive_int, positive_number
from noisewise.data.apportion import balance_rows, deal_shards, even_sizes, largest_remainder
from noisewise.data.datasets import Dataset, Examples
from noisewise.errors import InvalidValueError
from noisewise.randomness import keyed_generator

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
Partition = Callable[..., Indices]  # (labels, n_clients, seed), or with an option before the seed

TRIES = 200  # draws before a partition gives up on its promised property
TEST_FRACTION = 0.2  # the paper's 2,400 + 600


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds.

    Args:
        train: records that DP-SGD sees.
        test: records held out for the client's own accuracy.
    """

    train: Examples
    test: Examples


def partition_iid(labels: ArrayLike, n_clients: int, seed: int) -> Indices:
    """Deal all records at random, in equal shares (sizes differ by at most one).

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
    """Deal shards of single classes: at most ``max_labels`` classes for a client, equal sizes.

    The paper's appendix on datasets: each class is cut into n * k / C shards and each client gets k
    of them at random; with k = C it gets one of each class. Real classes are not of equal size
    (MNIST's range from 5,421 to 6,742), so records then move between clients that hold the same
    class until all clients have the same size (to within one record).

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        max_labels: k, the largest number of classes at a client; more than C counts as C.
        seed: the same seed gives the same split.

    Returns:
        One sorted array of record numbers for each client; disjoint, and together all records.

    Raises:
        InvalidValueError: no such split was found (equal sizes can be out of reach for k = 1).
    """
    codes, counts = _check(labels, n_clients)
    given = positive_int("max_labels", max_labels)
    per_client = min(given, len(counts))
    if n_clients * per_client < len(counts):
        raise InvalidValueError(
            "max_labels",
            given,
            f"{n_clients} clients with that many labels each cannot hold all {len(counts)} classes",
        )
    rng = _generator(seed)
    sizes = even_sizes(len(codes), n_clients)
    for _ in range(TRIES):
        deal = deal_shards(counts, n_clients, per_client, rng)
        table = balance_rows(deal, sizes, per_client)
        if table is not None:
            return _hand_out(codes, table, rng)
    raise InvalidValueError(
        "max_labels",
        given,
        f"found no split of {len(codes)} records into {n_clients} equal shares with at most that "
        "many labels each; take a larger max_labels, another n_clients or partition 'dirichlet'",
    )


def partition_dirichlet(
    labels: ArrayLike, n_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Indices:
    """Split each class over the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Small alpha: few labels at a client and sizes far apart; large alpha: close to iid. As is usual
    (Li et al. 2022), the draw is repeated until the smallest client has ``min_size`` records.

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
    for _ in range(TRIES):
        shares = _dirichlet(rng, alpha, n_clients, len(counts))
        if shares is None:
            continue
        columns = [largest_remainder(p, int(m)) for p, m in zip(shares, counts, strict=True)]
        table = np.stack(columns, axis=1)
        if table.sum(axis=1).min() >= min_size:
            return _hand_out(codes, table, rng)
    raise _too_skewed(alpha, n_clients, len(codes), min_size)


def partition_quantity(
    labels: ArrayLike, n_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Indices:
    """Quantity skew: shares of the records are Dirichlet(alpha), labels are mixed at random.

    Args:
        labels: [N], the class of each record.
        n_clients: n, at most N.
        alpha: concentration > 0; small values set the sizes far apart.
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
    for _ in range(TRIES):
        shares = _dirichlet(rng, alpha, n_clients, 1)
        if shares is None:
            continue
        sizes = largest_remainder(shares[0], len(codes))
        if sizes.min() >= min_size:
            order = rng.permutation(len(codes))
            return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]
    raise _too_skewed(alpha, n_clients, len(codes), min_size)


def split_dataset(
    dataset: Dataset,
    n_clients: int,
    *,
    partition: str | Partition = "iid",
    test_fraction: float | None = None,
    seed: int = 0,
    max_labels: int | None = None,
    alpha: float | None = None,
) -> tuple[ClientData, ...]:
    """Split a dataset over clients, each with train and test records of the same label mix.

    Args:
        dataset: what to split.
        n_clients: n.
        partition: ``"iid"``, ``"shards"``, ``"dirichlet"``, ``"quantity"``, or a function of
            (labels, n_clients, seed) that returns the record numbers of each client.
        test_fraction: share of a client's records that is held out. None is the paper's way: the
            client's share of the published test set if the dataset says so (CIFAR), else 0.2.
        seed: the same seed gives the same split.
        max_labels: for ``"shards"``.
        alpha: for ``"dirichlet"`` and ``"quantity"``.

    Example:
        >>> from noisewise.data.datasets import load_dataset
        >>> clients = split_dataset(load_dataset("digits"), 10, partition="shards", max_labels=4)
        >>> len(clients[0].train), len(clients[0].test)
        (144, 36)
    """
    if test_fraction is not None:
        fraction("test_fraction", test_fraction, one_allowed=False)
    labels = dataset.train.targets
    parts = _partition(partition, max_labels, alpha)(labels, n_clients, seed)
    for number, part in enumerate(parts):
        if len(part) == 0:
            raise InvalidValueError("partition", partition, f"leaves client {number} empty")
    if test_fraction is None and dataset.deal_test and dataset.test is not None:
        return _with_published_test(dataset.train, dataset.test, parts, seed)
    share = TEST_FRACTION if test_fraction is None else test_fraction
    return tuple(
        hold_out(dataset.train.take(part), share, seed, number) for number, part in enumerate(parts)
    )


def hold_out(records: Examples, test_fraction: float, seed: int, number: int) -> ClientData:
    """Split one client's records into train and test, with the same mix of labels.

    Args:
        records: all that the client holds.
        test_fraction: share that is held out; at least one record stays on either side.
        seed: the same seed gives the same split.
        number: of the client, so that each has a random stream of its own.
    """
    fraction("test_fraction", test_fraction, one_allowed=False)
    if len(records) < 2:
        raise InvalidValueError(
            f"client {number}",
            f"{len(records)} record(s)",
            "needs at least 1 to train and 1 to test; take fewer clients or more data",
        )
    rng = keyed_generator(non_negative_int("seed", seed), "hold out", number)
    mask = _hold_out(records.targets, test_fraction, rng)
    return ClientData(records.take(~mask), records.take(mask))


def _partition(
    partition: str | Partition, max_labels: int | None, alpha: float | None
) -> Partition:
    """The partition of that name with its option filled in; an option without use is an error."""
    options = {"max_labels": max_labels, "alpha": alpha}
    table: dict[str, tuple[Partition, str | None]] = {
        "iid": (partition_iid, None),
        "shards": (partition_shards, "max_labels"),
        "dirichlet": (partition_dirichlet, "alpha"),
        "quantity": (partition_quantity, "alpha"),
    }
    if isinstance(partition, str) and partition not in table:
        raise InvalidValueError("partition", partition, f"must be one of {', '.join(table)}")
    split, needed = table[partition] if isinstance(partition, str) else (partition, None)
    for option, value in options.items():
        if option == needed and value is None:
            raise InvalidValueError(option, value, f"is needed by partition {partition!r}")
        if option != needed and value is not None:
            raise InvalidValueError(option, value, f"has no use in partition {partition!r}")
    chosen = [options[needed]] if needed else []
    return lambda labels, n_clients, seed: split(labels, n_clients, *chosen, seed)


def _check(
    labels: ArrayLike, n_clients: int, min_size: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Class numbers 0..C-1 of the records, and how many records each class has."""
    n_clients = positive_int("n_clients", n_clients)
    values = np.asarray(labels)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidValueError("labels", values.shape, "must be a non-empty list of classes")
    if n_clients * positive_int("min_size", min_size) > len(values):
        raise InvalidValueError(
            "n_clients",
            n_clients,
            f"is too many for {len(values)} records (at least {min_size} for each client)",
        )
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    return codes.astype(np.int64), counts.astype(np.int64)


def _generator(seed: int) -> np.random.Generator:
    return keyed_generator(non_negative_int("seed", seed), "partition")


def _dirichlet(
    rng: np.random.Generator, alpha: float, size: int, draws: int
) -> NDArray[np.float64] | None:
    """``draws`` vectors of ``size`` shares, or None if a tiny alpha underflowed to nothing."""
    shares = rng.dirichlet(np.full(size, alpha), size=draws)
    return shares if np.isfinite(shares).all() and (shares.sum(axis=1) > 0).all() else None


def _too_skewed(alpha: float, n_clients: int, n: int, min_size: int) -> InvalidValueError:
    return InvalidValueError(
        "alpha",
        alpha,
        f"{TRIES} draws left a client of {n_clients} with fewer than {min_size} of {n} records; "
        "take a larger alpha, fewer clients or a smaller min_size",
    )


def _hand_out(
    codes: NDArray[np.int64], table: NDArray[np.int64], rng: np.random.Generator
) -> Indices:
    """Turn a table of amounts [n, C] into record numbers, the records of a class at random."""
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
    """Mask of the test records: the same mix of labels as the rest, at least one, never all."""
    n = len(labels)
    total = min(max(round(n * share), 1), n - 1)
    classes, counts = np.unique(labels, return_counts=True)
    order = rng.permutation(len(classes))  # ties of the rounding fall at random
    mask = np.zeros(n, dtype=np.bool_)
    amounts = largest_remainder(counts[order].astype(np.float64), total)
    for label, amount in zip(classes[order], amounts, strict=True):
        mask[rng.permutation(np.flatnonzero(labels == label))[:amount]] = True
    return mask


def _with_published_test(
    train: Examples, test: Examples, parts: Indices, seed: int
) -> tuple[ClientData, ...]:
    """Split the published test set in the clients' proportions of each class."""
    n_classes = int(max(train.targets.max(), test.targets.max())) + 1
    held = np.stack([np.bincount(train.targets[part], minlength=n_classes) for part in parts])
    table = np.zeros_like(held)
    for label, amount in enumerate(np.bincount(test.targets, minlength=n_classes)):
        shares = held[:, label] if held[:, label].any() else np.ones(len(parts))
        table[:, label] = largest_remainder(shares.astype(np.float64), int(amount))
    # Rounding class by class leaves clients a record or two apart; even that out where possible.
    sizes = largest_remainder(held.sum(axis=1).astype(np.float64), len(test))
    balanced = balance_rows(table, sizes, max_labels=0)
    table = table if balanced is None else balanced
    if (table.sum(axis=1) == 0).any():
        number = int(np.argmin(table.sum(axis=1)))
        raise InvalidValueError(
            "n_clients",
            len(parts),
            f"leaves client {number} no test record; take fewer clients or set test_fraction",
        )
    tests = _hand_out(test.targets, table, keyed_generator(seed, "hold out"))
    return tuple(
        ClientData(train.take(part), test.take(own)) for part, own in zip(parts, tests, strict=True)
    )
