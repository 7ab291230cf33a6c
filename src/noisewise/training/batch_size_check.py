"""Finds the batch sizes in which a record's result has the same bits, whatever its neighbours are.

A float32 product rounds a row differently depending on the number of rows in the batch, and a
vectorised function rounds its last few values differently from the others. A server that chooses
the parameters can amplify such a difference into a whole gradient. So a deployed client uses only
the batch sizes that `check_batch_sizes` accepts, fills the last batch with synthetic records, and
computes one record at a time if no batch size is accepted.

Two checks run on synthetic records and random parameters, before any private record is read:

* Operations (`operation_trace`): a forward and a backward pass are recorded. A batch size is
  accepted only if no operation treats the last values of a tensor differently. Models that branch
  on values, or whose operations change with the batch size, get batches of one record.
* Trial: all tensors that a record's gradient is computed from must have the same bits in every
  accepted batch size, at every position, with any other records.

The checks assume that torch's kernels do the same operations in the same order for the same shapes,
strides and number of threads, whatever the values are.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from noisewise.storage import cache_dir, write_atomic
from noisewise.training.inputs import Inputs, map_inputs, select
from noisewise.training.operation_trace import (
    NoMasks,
    OperationPairs,
    draws_masks,
    has_no_tails,
    trace_operations,
)

__all__ = ["BATCH_SIZES", "BatchSizeCheck", "RowRunner", "check_batch_sizes"]

BATCH_SIZES = (*range(4, 33, 4), *range(40, 65, 8), *range(80, 257, 16))
"""Batch sizes to try. With 32 records or more, at most a fifth of a batch are fillers."""

_REFERENCES = (32, 64, 16, 8, 4)
_SECONDS = 20.0
_VERSION = 1


@dataclass(frozen=True)
class BatchSizeCheck:
    """The accepted batch sizes.

    Attributes:
        sizes: ascending; (1,) if each record must be computed separately.
        reason: why sizes were rejected; empty if all sizes are accepted.
    """

    sizes: tuple[int, ...]
    reason: str = ""


class RowRunner(Protocol):
    """A computation to check; row i of each returned tensor belongs to record i."""

    def passes(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """Run only the model's passes, whose operations are recorded."""
        ...

    def evidence(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """All tensors that the records' contributions are computed from: [b, ...] each."""
        ...


def check_batch_sizes(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Inputs, Tensor],
    largest: int,
    about: str,
) -> BatchSizeCheck:
    """Find the batch sizes in which a record's row has the same bits; cached on disk.

    Args:
        runner: the computation.
        thetas: parameters to try, [p] each.
        records: synthetic inputs and targets, as many as the largest size needs.
        largest: the largest size to try.
        about: identifies the computation in the cache, besides its operations.

    Returns:
        The accepted batch sizes.
    """
    pairs, problem = trace_operations(
        lambda count: runner.passes(
            thetas[0],
            map_inputs(lambda part: part[:count].clone(), records[0]),
            records[1][:count].clone(),
        )
    )
    if problem:
        return BatchSizeCheck((1,), problem)
    key = _key(pairs, largest, about)
    check = _load(key)
    if check is None:
        check = _trial(runner, thetas, records, largest, pairs)
        _save(key, check)
    return check


def _trial(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Inputs, Tensor],
    largest: int,
    pairs: OperationPairs,
) -> BatchSizeCheck:
    sizes = [n for n in BATCH_SIZES if n <= largest and has_no_tails(pairs, n)]
    start = time.process_time()
    with ExitStack() as stack:
        if draws_masks(pairs):
            stack.enter_context(NoMasks())
        for reference in (n for n in _REFERENCES if n in sizes):
            expected = _digests_at(runner, thetas, records, reference, max(sizes))
            if expected is not None:
                break
        else:
            return BatchSizeCheck(
                (1,), "no batch size gives a record the same bits at every position"
            )
        accepted, late = [reference], False
        for size in sizes:
            if size == reference:
                continue
            late = late or time.process_time() - start > _SECONDS
            if not late and _agrees(runner, thetas, records, size, expected):
                accepted.append(size)
    rejected = len(BATCH_SIZES) - len(accepted)
    reason = f"{rejected} of {len(BATCH_SIZES)} batch sizes are not used" if rejected else ""
    return BatchSizeCheck(tuple(sorted(accepted)), reason)


_Digests = list[list[bytes]]
"""For each parameter vector, a digest of the evidence of each record."""


def _digests_at(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Inputs, Tensor],
    size: int,
    count: int,
) -> _Digests | None:
    """Digests of all records in batches of one size; None if they depend on the rest of a batch."""
    results: _Digests = []
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
        results.append(digests)
    return results


def _agrees(
    runner: RowRunner,
    thetas: Sequence[Tensor],
    records: tuple[Inputs, Tensor],
    size: int,
    expected: _Digests,
) -> bool:
    """Whether a batch of another size gives every record the expected digest.

    The records have other positions for each parameter vector.
    """
    for number, (theta, digests) in enumerate(zip(thetas, expected, strict=True)):
        index = [(number * (1 + size // 3) + row) % len(digests) for row in range(size)]
        if _digests(runner, theta, records, index) != [digests[row] for row in index]:
            return False
    return True


def _digests(
    runner: RowRunner, theta: Tensor, records: tuple[Inputs, Tensor], index: list[int]
) -> list[bytes]:
    rows = torch.tensor(index, device=records[1].device)
    evidence = runner.evidence(theta, select(records[0], rows), records[1].index_select(0, rows))
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


def _key(pairs: OperationPairs, largest: int, about: str) -> str:
    """A hash of the computation and of everything on this machine that can change its rounding."""
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
        BATCH_SIZES,
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
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    lines = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(fields))


_checks: dict[str, BatchSizeCheck] = {}
"""The checks of this process by key."""


def _cache_file(key: str) -> Path:
    return cache_dir() / "row-checks" / f"{key[:32]}.json"


def _load(key: str) -> BatchSizeCheck | None:
    if key in _checks:
        return _checks[key]
    try:
        entry = json.loads(_cache_file(key).read_text())
        sizes = tuple(int(size) for size in entry["rows"])
        if entry["key"] != key or not sizes or not set(sizes) <= {1, *BATCH_SIZES}:
            return None
        check = BatchSizeCheck(sizes, str(entry["reason"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    _checks[key] = check
    return check


def _save(key: str, check: BatchSizeCheck) -> None:
    _checks[key] = check
    entry = {"key": key, "rows": check.sizes, "reason": check.reason}
    try:
        write_atomic(_cache_file(key), (json.dumps(entry) + "\n").encode())
    except OSError:
        return  # without a cache folder, the next process checks again
