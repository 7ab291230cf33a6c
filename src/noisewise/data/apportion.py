"""Integer arithmetic of splits: rounding shares, and tables with given row and column sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["balance_rows", "deal_shards", "even_sizes", "largest_remainder"]

Counts = NDArray[np.int64]


def even_sizes(total: int, parts: int) -> Counts:
    """Split ``total`` into ``parts`` integers that differ by at most one.

    Example:
        >>> even_sizes(8, 3).tolist()
        [3, 3, 2]
    """
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


def largest_remainder(shares: NDArray[np.float64], total: int) -> Counts:
    """Round ``shares`` (>= 0, not all 0) to integers that sum to ``total``.

    Each part gets the floor of its quota. The rest goes to the parts with the largest remainders,
    to the first ones if remainders are equal. Each count differs from its quota by less than one.

    Example:
        >>> largest_remainder(np.array([0.5, 0.3, 0.2]), 4).tolist()
        [2, 1, 1]
    """
    quota = shares / shares.sum() * total
    counts: Counts = np.floor(quota + 1e-9).astype(np.int64)
    order = np.argsort(counts - quota, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def deal_shards(
    class_counts: Counts, n_clients: int, per_client: int, rng: np.random.Generator
) -> Counts:
    """Give ``per_client`` shards to every client (the paper's appendix, after McMahan et al. 2017).

    Each class is cut into the same number of shards. If the number of shards is not a multiple of
    the number of classes, the largest classes are cut into one more. Each client gets shards at
    random. If a client gets as many shards as there are classes, it gets one of each (the paper's
    CIFAR split).

    Args:
        class_counts: [C], number of records of each class.
        n_clients: number of clients, n.
        per_client: shards of a client, at most C.
        rng: generator of the random choices.

    Returns:
        [n, C], number of records of each class at each client; columns sum to ``class_counts``.
    """
    n_classes = len(class_counts)
    shards = even_sizes(n_clients * per_client, n_classes)[
        np.argsort(np.argsort(-class_counts, kind="stable"), kind="stable")
    ]
    if per_client == n_classes:
        shard_classes = np.tile(np.arange(n_classes), (n_clients, 1))
    else:
        shard_classes = rng.permutation(np.repeat(np.arange(n_classes), shards))
        shard_classes = shard_classes.reshape(n_clients, per_client)
    amounts = np.zeros((n_clients, n_classes), dtype=np.int64)
    for label in range(n_classes):
        owners = rng.permutation(np.nonzero(shard_classes == label)[0])
        np.add.at(amounts[:, label], owners, even_sizes(int(class_counts[label]), len(owners)))
    return amounts


def balance_rows(amounts: Counts, row_sums: Counts, max_labels: int) -> Counts | None:
    """Move records between clients until every client has its size, within the label limit.

    Column sums do not change. Records move along the shortest chain of clients: each client gives
    records of a class that the next client already has. If no such chain exists, the next client
    may also accept a new class, within the limit.

    Args:
        amounts: [n, C], number of records of each class at each client.
        row_sums: [n], the wanted sizes, with the same total.
        max_labels: largest number of classes in a row.

    Returns:
        The new table, or None if there is no chain. Other random shards may have one.
    """
    table = amounts.copy()
    excess = table.sum(axis=1) - row_sums
    while (excess > 0).any():
        source = int(np.argmax(excess))
        held = table > 0
        allowed = held | (held.sum(axis=1) < max_labels)[:, None]
        chain = _chain(held, held, excess, source) or _chain(held, allowed, excess, source)
        if chain is None:
            return None
        moved = min(int(excess[source]), -int(excess[chain[-1][1]]))
        moved = min([moved, *(int(table[giver, label]) for giver, _, label in chain)])
        for giver, taker, label in chain:
            table[giver, label] -= moved
            table[taker, label] += moved
        excess[source] -= moved
        excess[chain[-1][1]] += moved
    return table


def _chain(
    gives: NDArray[np.bool_], takes: NDArray[np.bool_], excess: Counts, source: int
) -> list[tuple[int, int, int]] | None:
    """Search breadth-first from ``source`` for a client that has too few records.

    Returns:
        Steps (giver, taker, class), the first one from ``source``; None if there is no chain.
    """
    parent: dict[int, int] = {source: source}
    queue = [source]
    for giver in queue:
        for taker in np.flatnonzero((takes & gives[giver]).any(axis=1)).tolist():
            if taker in parent:
                continue
            parent[taker] = giver
            queue.append(taker)
            if excess[taker] < 0:
                steps = []
                while taker != source:
                    giver = parent[taker]
                    label = int(np.argmax(takes[taker] & gives[giver]))
                    steps.append((giver, taker, label))
                    taker = giver
                return steps[::-1]
    return None
