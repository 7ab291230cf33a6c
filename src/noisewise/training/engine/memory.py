"""Keeps the C library from returning each step's memory to the system only to ask for it again."""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_BYTES = 31 * 2**20


def keep_freed_memory() -> None:
    """Take and free one untouched block, from whose size glibc learns what is worth keeping.

    glibc maps large blocks afresh, page by page and zeroed, and gives memory above a threshold
    back at once. Both thresholds grow with the largest block (up to 32 MB) that was ever freed
    (mallopt(3), "dynamic mmap threshold"). Without this, a private step of the paper's CNN spends
    a tenth of its time in page faults. Elsewhere it does nothing.
    """
    torch.empty(_BYTES, dtype=torch.uint8)
