"""Whole-number arithmetic of splits: fair rounding, and tables with given row and column sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["balance_rows", "deal_shards", "even_sizes", "largest_remainder"]

Counts = NDArray[np.int64]


def even_sizes(total: int, parts: int) -> Counts:
    """Split ``total`` into ``parts`` whole numbers that differ by at most one."""
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


def largest_remainder(shares: NDArray[np.float64], total: int) -> Counts:
    """Round ``shares`` (>= 0, not all 0) to whole numbers that sum to ``total``.

    Each part gets the floor of its quota; what is left goes to the largest remainders, the first
    ones on ties. No part is more than one off its quota.
    """
    quota = shares / shares.sum() * total
    counts: Counts = np.floor(quota + 1e-9).astype(np.int64)
    order = np.argsort(counts - quota, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def deal_shards(
    class_counts: Counts, n_clients: int, per_client: int, rng: np.random.Generator
) -> Counts:
    """Deal ``per_client`` shards to every client: the paper's appendix, after McMahan et al. 2017.

    Each class is cut into the same number of shards (the largest classes get one more where the
    number of shards is no multiple of the classes), and each client gets shards at random. With as
    many shards for a client as there are classes, it gets one of each (the paper's CIFAR split).

    Args:
        class_counts: [C], records of each class.
        n_clients: n.
        per_client: shards of a client, at most C.
        rng: source of the deal.

    Returns:
        [n, C], records of each class for each client; columns sum to ``class_counts``.
    """
    n_classes = len(class_counts)
    shards = even_sizes(n_clients * per_client, n_classes)[
        np.argsort(np.argsort(-class_counts, kind="stable"), kind="stable")
    ]
    if per_client == n_classes:
        deal = np.tile(np.arange(n_classes), (n_clients, 1))
    else:
        deal = rng.permutation(np.repeat(np.arange(n_classes), shards))
        deal = deal.reshape(n_clients, per_client)
    amounts = np.zeros((n_clients, n_classes), dtype=np.int64)
    for label in range(n_classes):
        owners = rng.permutation(np.nonzero(deal == label)[0])
        np.add.at(amounts[:, label], owners, even_sizes(int(class_counts[label]), len(owners)))
    return amounts


def balance_rows(amounts: Counts, row_sums: Counts, max_labels: int) -> Counts | None:
    """Move records between clients until every client has its size, keeping the label limit.

    Column sums stay. Records travel along shortest chains of clients, each of which passes on a
    class that the next one holds already (or, if no such chain exists, may still take up).

    Args:
        amounts: [n, C], records of each class for each client.
        row_sums: [n], the sizes wanted; the same total.
        max_labels: largest number of classes in a row.

    Returns:
        The new table, or None where no chain is left (another deal may have one).
    """
    table = amounts.copy()
    excess = table.sum(axis=1) - row_sums
    while (excess > 0).any():
        source = int(np.argmax(excess))
        held = table > 0
        roomy = held | (held.sum(axis=1) < max_labels)[:, None]
        chain = _chain(held, held, excess, source) or _chain(held, roomy, excess, source)
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
    """Breadth-first search from ``source`` to a client that lacks records.

    Returns:
        Steps (giver, taker, class) from the source on, or None.
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
