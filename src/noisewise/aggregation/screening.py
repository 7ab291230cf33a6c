"""Screening: which received updates can be aggregated (docs/privacy.md, guarantee 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.aggregation.base import UpdateMatrix
from noisewise.errors import UpdateError

__all__ = ["Screened", "screen_updates", "update_fault"]


_LARGEST_ENERGY = 1e200  # estimators square and sum; float32 updates never come near


@dataclass(frozen=True)
class Screened:
    """The sound updates, and why each of the others was dropped."""

    updates: UpdateMatrix
    dropped: Mapping[str, str]


def update_fault(update: object, size: int, dtype: torch.dtype) -> str | None:
    """What is wrong with one update, or None."""
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
        return f"has {bad} values that are not finite"
    if float(update.detach().double().square().sum()) > _LARGEST_ENERGY:
        return f"is too large: its squared norm is above {_LARGEST_ENERGY:g}"
    return None


def screen_updates(
    received: Mapping[str, Tensor], *, size: int, dtype: torch.dtype = torch.float32
) -> Screened:
    """Keep updates of the right type, shape and dtype with finite values; say why others go.

    Clients are ordered by id, so that the result does not depend on who answered first.

    Args:
        received: updates by client id.
        size: p, the length that the server asked for.
        dtype: the type that the server asked for.

    Raises:
        UpdateError: if nothing is left; the message holds the reasons.
    """
    faults = {client: update_fault(update, size, dtype) for client, update in received.items()}
    dropped = {client: fault for client, fault in sorted(faults.items()) if fault is not None}
    kept = sorted(client for client, fault in faults.items() if fault is None)
    if not kept:
        reasons = "; ".join(f"{client} {fault}" for client, fault in dropped.items())
        raise UpdateError(f"no usable update in this round: {reasons or 'nobody answered'}")
    first = received[kept[0]].detach()
    matrix = torch.empty((size, len(kept)), dtype=dtype, device=first.device)
    for column, client in enumerate(kept):  # one at a time: they may come from disk
        matrix[:, column] = received[client].detach()
    return Screened(UpdateMatrix(matrix, tuple(kept)), dropped)
