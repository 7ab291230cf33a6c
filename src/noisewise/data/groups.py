"""Natural federations: records that belong to real clients (states, hospitals, communes)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import no_repeats, positive_int, printable_name
from noisewise.errors import InvalidValueError

__all__ = ["Group", "check_groups", "name_groups", "natural_groups"]

MIN_RECORDS = 2  # one to train and one to test
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Group:
    """The records of one real client.

    Args:
        number: of the client among all clients of the dataset, also those that are left out.
        name: of the client.
        records: sorted numbers of its records.
    """

    number: int
    name: str
    records: NDArray[np.int64]


def check_groups(groups: NDArray[np.int64] | None, names: Sequence[str], n_records: int) -> None:
    """Refuse groups that do not fit the records or their names.

    Args:
        groups: [N], the number of each record's client, or None.
        names: of the clients; empty without groups.
        n_records: N.

    Raises:
        InvalidValueError: names the field, its value and what is allowed.
    """
    if groups is None:
        if names:
            raise InvalidValueError("group_names", tuple(names), "need groups")
        return
    if groups.dtype != np.int64 or groups.shape != (n_records,):
        raise InvalidValueError(
            "groups",
            f"{groups.dtype}{list(groups.shape)}",
            f"must be int64 of shape [{n_records}], the client's number for each record",
        )
    for name in names:
        printable_name("group_names", name)
    no_repeats("group_names", names)
    if n_records and not (groups.min() >= 0 and groups.max() < len(names)):
        span = (int(groups.min()), int(groups.max()))
        raise InvalidValueError("groups", span, f"must lie in 0..{len(names) - 1}")


def name_groups(owners: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number the clients that hold records, in the order of their names.

    Args:
        owners: the name of the client for each record.

    Returns:
        For each record the number of its client, and the names by number.

    Example:
        >>> groups, names = name_groups(["b", "a", "b"])
        >>> groups.tolist(), names
        ([1, 0, 1], ('a', 'b'))
    """
    names = tuple(sorted(set(owners)))
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[owner] for owner in owners], dtype=np.int64), names


def natural_groups(
    groups: NDArray[np.int64] | None, names: Sequence[str], min_records: int | None = None
) -> list[Group]:
    """The records of each real client; clients with too few records are left out and logged.

    Args:
        groups: [N], the number of each record's client.
        names: of the clients.
        min_records: smallest number of records of a client that takes part; None means 2, one to
            train and one to test.

    Raises:
        InvalidValueError: there are no groups, or no client has enough records.
    """
    if groups is None:
        raise InvalidValueError(
            "partition", "natural", "needs a dataset whose records belong to real clients"
        )
    min_size = MIN_RECORDS if min_records is None else positive_int("min_records", min_records)
    least = max(min_size, MIN_RECORDS)
    order = np.argsort(groups, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(groups, minlength=len(names)))[:-1])
    groups_found = [
        Group(number, name, part.astype(np.int64))
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    ]
    large_groups = [group for group in groups_found if len(group.records) >= least]
    if not large_groups:
        most = max((len(group.records) for group in groups_found), default=0)
        raise InvalidValueError("min_records", least, f"no client has more than {most} records")
    if len(large_groups) < len(groups_found):
        left_out = [group for group in groups_found if len(group.records) < least]
        log.warning(
            "left out %d of %d clients with fewer than %d records (%d records in all): %s",
            len(left_out),
            len(groups_found),
            least,
            sum(len(group.records) for group in left_out),
            ", ".join(group.name for group in left_out),
        )
    return large_groups
