"""Zeros in the rows of broken records, so that all other rows keep their bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["clear_rows", "without_cleared", "without_rows"]

_rows: ContextVar[Tensor | None] = ContextVar("rows", default=None)


def without_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The values [b, ...] with zeros in the given rows, in the same memory layout.

    A kernel may round a matrix differently for other strides or another alignment. With the same
    layout, the other rows give the bits that they give without the zeros.
    """
    strides, offset = values.stride(), values.storage_offset()
    if strides[0] == 0:  # the same for all records
        is_finite = bool(torch.isfinite(values).all())
        return values if is_finite else values.index_fill(0, rows, 0)
    whole = torch.empty(0, dtype=values.dtype, device=values.device)
    storage = values.untyped_storage().clone()  # type: ignore[no-untyped-call]
    whole.set_(storage, offset, values.shape, strides)
    once = whole
    for axis, stride in enumerate(strides):
        if stride == 0:  # an expanded axis, which is written once
            once = once.narrow(axis, 0, min(1, once.shape[axis]))
    once.index_fill_(0, rows, 0)
    return whole


@contextmanager
def clear_rows(rows: Tensor) -> Iterator[None]:
    """Let `without_cleared` set these rows to zero."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def without_cleared(values: Tensor) -> Tensor:
    """The values [b, ...] with zeros in the rows of `clear_rows`.

    A gradient of 0 times an infinite derivative of a shared value is NaN, so zeros at the end of
    the backward pass alone do not clear a record.
    """
    rows = _rows.get()
    return values if rows is None else without_rows(values, rows)
