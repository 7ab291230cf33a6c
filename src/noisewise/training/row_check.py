"""Which batch sizes compute a record's row to the same bits, at every position: a self-check.

A float32 product rounds a row differently depending on how many rows stand beside it, and a
vectorised function rounds its last few values differently from the others. A server that chooses
the parameters can amplify such a difference into a whole gradient. So a deployed client uses only
the batch sizes that `check_rows` accepts, fills up the last batch with made-up records, and takes
records one by one where no batch size is accepted.

Two things are checked, on made-up records and random parameters, before any private record is read:

* By structure (`operations`): a forward and a backward pass are recorded. A batch size counts only
  if no operation treats the last values of a tensor differently. A model that branches on values,
  or whose operations depend on the batch size other than by shape, gets batches of one record.
* By trial: all that a record's gradient is computed from must have the same bits in every accepted
  batch size, at every position, whatever the other records are.

What this rests on: torch's kernels do the same operations in the same order for the same shapes,
strides and threads, whatever the values are.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from noisewise.storage import cache_dir, write_atomic
from noisewise.training.operations import NoMasks, Pairs, draws_masks, has_no_tails, structure

__all__ = ["ROW_COUNTS", "RowCheck", "RowRunner", "check_rows"]

ROW_COUNTS = (*range(4, 33, 4), *range(40, 65, 8), *range(80, 257, 16))
"""Batch sizes to try: from 32 records on, at most one fifth of a batch is filled up."""

_REFERENCES = (32, 64, 16, 8, 4)
_SECONDS = 20.0
_VERSION = 1


@dataclass(frozen=True)
class RowCheck:
    """What the self-check found.

    Attributes:
        rows: the accepted batch sizes, ascending; (1,) if records must be taken one by one.
        reason: why not more; empty if every size that was tried is accepted.
    """

    rows: tuple[int, ...]
    reason: str = ""


class RowRunner(Protocol):
    """What is checked: row i of whatever it returns belongs to record i."""

    def passes(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """The model's passes alone, whose operations are recorded."""
        ...

    def evidence(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """All that decides about the records' contributions: [b, ...] each."""
        ...


def check_rows(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Tensor, Tensor],
    largest: int,
    about: str,
) -> RowCheck:
    """Find the batch sizes in which a record's row has the same bits; cached on disk.

    Args:
        runner: computes the rows.
        thetas: parameters to try, [p] each.
        records: made-up inputs and targets; as many as the largest size needs.
        largest: size to try at the most.
        about: whatever else tells this computation from others, for the cache.
    """
    pairs, doubt = structure(
        lambda count: runner.passes(
            thetas[0], records[0][:count].clone(), records[1][:count].clone()
        )
    )
    if doubt:
        return RowCheck((1,), doubt)
    key = _key(pairs, largest, about)
    known = _load(key)
    if known is None:
        known = _trial(runner, thetas, records, largest, pairs)
        _save(key, known)
    return known


def _trial(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Tensor, Tensor],
    largest: int,
    pairs: Pairs,
) -> RowCheck:
    sizes = [n for n in ROW_COUNTS if n <= largest and has_no_tails(pairs, n)]
    begun = time.process_time()
    with ExitStack() as stack:
        if draws_masks(pairs):
            stack.enter_context(NoMasks())
        for reference in (n for n in _REFERENCES if n in sizes):
            known = _digests_at(runner, thetas, records, reference, max(sizes))
            if known is not None:
                break
        else:
            return RowCheck((1,), "no batch size gives a record the same bits at every position")
        accepted, late = [reference], False
        for size in sizes:
            if size == reference:
                continue
            late = late or time.process_time() - begun > _SECONDS
            if not late and _agrees(runner, thetas, records, size, known):
                accepted.append(size)
    rejected = len(ROW_COUNTS) - len(accepted)
    reason = f"{rejected} of {len(ROW_COUNTS)} batch sizes are not used" if rejected else ""
    return RowCheck(tuple(sorted(accepted)), reason)


_Digests = list[list[bytes]]
"""For each parameter vector, a digest of the evidence of each record."""


def _digests_at(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Tensor, Tensor],
    size: int,
    count: int,
) -> _Digests | None:
    """Digests of all records in batches of one size; None if they depend on position or others."""
    found: _Digests = []
    count = max(size, count)
    for theta in thetas:
        digests: list[bytes] = []
        for start in range(0, count, size):
            index = [(start + row) % count for row in range(size)]
            digests += _digests(runner, theta, records, index)
        digests = digests[:count]
        for shift in (1, size // 2 + 1):
            index = [(shift + row) % count for row in range(size)]
            again = _digests(runner, theta, records, index)
            if again != [digests[record] for record in index]:
                return None
        found.append(digests)
    return found


def _agrees(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Tensor, Tensor],
    size: int,
    known: _Digests,
) -> bool:
    """Whether batches of another size give every record the digest that is known.

    Every parameter vector sees the records at other positions.
    """
    for number, (theta, digests) in enumerate(zip(thetas, known, strict=True)):
        index = [(number * (1 + size // 3) + row) % len(digests) for row in range(size)]
        if _digests(runner, theta, records, index) != [digests[row] for row in index]:
            return False
    return True


def _digests(
    runner: RowRunner, theta: Tensor, records: tuple[Tensor, Tensor], index: list[int]
) -> list[bytes]:
    rows = torch.tensor(index, device=records[0].device)
    evidence = runner.evidence(
        theta, records[0].index_select(0, rows), records[1].index_select(0, rows)
    )
    arrays = [
        value.detach().cpu().contiguous().flatten(1).numpy()
        for value in evidence
        if value.dim() > 1
    ]
    arrays += [value.detach().cpu()[:, None].numpy() for value in evidence if value.dim() == 1]
    digests = []
    for row in range(len(index)):
        digest = hashlib.blake2b(digest_size=16)
        for array in arrays:
            digest.update(array[row].tobytes())
        digests.append(digest.digest())
    return digests


def _key(pairs: Pairs, largest: int, about: str) -> str:
    """Names the computation and everything of this machine that may decide its rounding."""
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_"))
    }
    parts = (
        _VERSION,
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        _processor(),
        ROW_COUNTS,
        settings,
        largest,
        about,
        [operation for operation, _ in pairs],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _processor() -> str:
    """Model and features of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    lines = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


_known: dict[str, RowCheck] = {}


def _cache_file(key: str) -> Path:
    return cache_dir() / "row-checks" / f"{key[:32]}.json"


def _load(key: str) -> RowCheck | None:
    if key in _known:
        return _known[key]
    try:
        entry = json.loads(_cache_file(key).read_text())
        rows = tuple(int(size) for size in entry["rows"])
        if entry["key"] != key or not rows or not set(rows) <= {1, *ROW_COUNTS}:
            return None
        found = RowCheck(rows, str(entry["reason"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    _known[key] = found
    return found


def _save(key: str, found: RowCheck) -> None:
    _known[key] = found
    try:
        write_atomic(_cache_file(key), (json.dumps({"key": key, **asdict(found)}) + "\n").encode())
    except OSError:
        return  # a machine without a cache checks again
