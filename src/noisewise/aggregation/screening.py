"""Screening: drops received updates that cannot be aggregated (docs/privacy.md, guarantee 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.aggregation.base import UpdateMatrix
from noisewise.errors import UpdateError
from noisewise.text import short_repr

__all__ = ["Screened", "screen_updates", "stack_updates", "update_fault"]


_LARGEST_ENERGY = 1e200  # estimators square and sum it; float32 updates are far below


@dataclass(frozen=True, repr=False)
class Screened:
    """The usable updates of a round, and the reasons for the others.

    Attributes:
        updates: the usable updates.
        dropped: why an update was dropped, by client id.
    """

    updates: UpdateMatrix
    dropped: Mapping[str, str]

    def __repr__(self) -> str:
        """The number of usable updates and of dropped ones."""
        return short_repr(self, usable=len(self.updates.ids), dropped=dict(self.dropped))


def update_fault(update: object, size: int, dtype: torch.dtype) -> str | None:
    """Return what is wrong with one update, or None if it is usable.

    Args:
        update: what a client sent.
        size: p, the expected length.
        dtype: the expected type.
    """
    if not isinstance(update, Tensor):
        return f"is a {type(update).__name__}, not a tensor"
    if update.layout != torch.strided or update.is_nested or update.is_meta:
        return "is not a dense tensor with values"
    if update.shape != (size,):
        return f"has shape {tuple(update.shape)}, expected ({size},)"
    if update.dtype != dtype:
        return f"has dtype {update.dtype}, expected {dtype}"
    if not bool(torch.isfinite(update).all()):
        bad = int((~torch.isfinite(update)).sum())
        return f"has {bad} NaN or infinite values"
    if float(update.detach().double().square().sum()) > _LARGEST_ENERGY:
        return f"is too large: its squared norm is above {_LARGEST_ENERGY:g}"
    return None


def screen_updates(
    received: Mapping[str, Tensor], *, size: int, dtype: torch.dtype = torch.float32
) -> Screened:
    """Keep the updates with the expected shape and dtype and finite values.

    Clients are sorted by id, so the result does not depend on the order of their replies.

    Args:
        received: updates by client id.
        size: p, the expected length.
        dtype: the expected type.

    Returns:
        The usable updates, and why each of the others was dropped.

    Raises:
        UpdateError: no update is usable; the message lists the reasons.
    """
    faults = {client: update_fault(update, size, dtype) for client, update in received.items()}
    dropped = {client: fault for client, fault in sorted(faults.items()) if fault is not None}
    usable_ids = sorted(client for client, fault in faults.items() if fault is None)
    if not usable_ids:
        reasons = "; ".join(f"{client} {fault}" for client, fault in dropped.items())
        raise UpdateError(f"no usable update in this round: {reasons or 'no client replied'}")
    return Screened(stack_updates(received, usable_ids), dropped)


def stack_updates(updates: Mapping[str, Tensor], clients: Iterable[str]) -> UpdateMatrix:
    """Make the update matrix of some clients, ordered by id.

    Args:
        updates: updates [p] by client id.
        clients: ids of at least one client; `update_fault` found no fault in their updates.

    Returns:
        The matrix [p, n].
    """
    ids = tuple(sorted(clients))
    first = updates[ids[0]]
    matrix = torch.empty((len(first), len(ids)), dtype=first.dtype, device=first.device)
    for column, client in enumerate(ids):  # one at a time, because they may be read from disk
        matrix[:, column] = updates[client].detach()
    return UpdateMatrix(matrix, ids)
