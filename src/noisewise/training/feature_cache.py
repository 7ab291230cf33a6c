"""Features on disk: computed once, resumed after a crash, memory-mapped, verified on opening.

A file of the cache is named by the SHA-256 of the feature map and of the records. Next to it is a
file with a checksum of each chunk of rows, which covers this name too. A chunk that is missing or
damaged, or that belongs to another map or to other records, fails its checksum and is computed
again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.storage import file_lock, reserve, writing
from noisewise.training.feature_checks import one_line
from noisewise.training.features import Features
from noisewise.worker_processes import end_workers, follow_parent

__all__ = ["cached_features", "features_key"]

ReadRecords = Callable[[int, int], NDArray[np.float32]]
"""(start, stop) -> records [stop - start, ...] as the feature map takes them."""

OnProgress = Callable[[int, int], None]
"""(records done, records in all)."""

_CHUNK = 128
_CHECK = 32  # bytes of a checksum
_log = logging.getLogger(__name__)


def features_key(features: Features, records_digest: str) -> str:
    """The name of a cached file: SHA-256 of the feature map and of the records."""
    return hashlib.sha256(f"{features.identity}:{records_digest}".encode()).hexdigest()


def cached_features(
    features: Features,
    count: int,
    read: ReadRecords,
    records_digest: str,
    folder: Path,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> NDArray[np.float32]:
    """The features of all records: [count, d], memory-mapped, read-only.

    An interrupted call is resumed. Of several processes one computes and the others wait. Damaged
    chunks are computed again.

    Args:
        features: the map.
        count: number of records.
        read: gives a range of records.
        records_digest: SHA-256 of all records.
        folder: of the cache.
        workers: processes; the values do not depend on it.
        on_progress: called after each chunk.

    Raises:
        InvalidValueError: the map fails for a record or gives it no finite features, and the
            message gives its number; or the map changes while records are mapped.
        DiskFullError: no room for the file.
        NoisewiseError: a worker process died, or there is no memory.
    """
    if count == 0:
        return np.empty((0, features.width), np.float32)
    key = features_key(features, records_digest)
    path, shape = folder / f"{key}.npy", (count, features.width)
    with ExitStack() as stack, writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        waiting = f"{features.name}: another process computes these features; waiting"
        stack.enter_context(file_lock(folder / f"{key}.lock", lambda: _log.warning(waiting)))
        checks = _open_file(path, shape)
        values: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        missing = [k for k, check in enumerate(checks) if bytes(check) != _check(key, values, k)]
        damaged = sum(bool(checks[k].any()) for k in missing)
        if damaged:
            _log.warning("%d damaged parts are computed again: %s", damaged, path)
        finished = len(checks) - len(missing)
        for number in _compute(features, path, count, read, missing, workers):
            checks[number] = np.frombuffer(_check(key, values, number), np.uint8)
            checks.flush()
            finished += 1
            if on_progress is not None:
                on_progress(min(finished * _CHUNK, count), count)
    return values


def _open_file(path: Path, shape: tuple[int, int]) -> np.memmap[Any, np.dtype[np.uint8]]:
    """Open or create a file of features; returns the checksums of its chunks [k, 32]."""
    checks, form = path.with_suffix(".checks"), (-(-shape[0] // _CHUNK), _CHECK)
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        whole = values.shape == shape and values.dtype == np.float32
        if whole and values.flags.c_contiguous and checks.stat().st_size == math.prod(form):
            return np.memmap(checks, np.uint8, "r+", shape=form)
    except Exception:  # numpy's reader of damaged files raises errors of many types
        pass
    for old in (checks, path):
        old.unlink(missing_ok=True)
    try:
        open_memmap(path, "w+", dtype=np.float32, shape=shape).flush()
        reserve(path)  # a full disk shows now, not as SIGBUS in the middle
        checks.write_bytes(bytes(math.prod(form)))
        return np.memmap(checks, np.uint8, "r+", shape=form)
    except OSError:
        for new in (checks, path):
            new.unlink(missing_ok=True)
        raise


def _check(key: str, values: NDArray[np.float32], chunk: int) -> bytes:
    """SHA-256 of a chunk of rows and of what it belongs to."""
    digest = hashlib.sha256(f"{key}:{chunk}:".encode())
    digest.update(np.ascontiguousarray(values[chunk * _CHUNK : (chunk + 1) * _CHUNK]).data)
    return digest.digest()


def _compute(
    features: Features,
    path: Path,
    count: int,
    read: ReadRecords,
    chunks: list[int],
    workers: int,
) -> Iterator[int]:
    """Write the features of these chunks; yields each as it is done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if workers == 1 or len(chunks) < 2:
            for chunk in chunks:
                _write_chunk(features, path, count, read, chunk)
                yield chunk
            return
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(
            min(workers, len(chunks)),
            context,
            initializer=_begin_worker,
            initargs=(features, path, count, read),
        ) as pool:
            futures = {pool.submit(_write_in_worker, chunk): chunk for chunk in chunks}
            try:
                for future in as_completed(futures):
                    future.result()
                    yield futures[future]
            except BrokenProcessPool as error:
                raise NoisewiseError(
                    "a worker that computed features died, probably for lack of memory. Free "
                    "memory, and run the same command again to resume"
                ) from error
            except BaseException:
                end_workers(pool)
                raise
    finally:
        torch.set_num_threads(threads)


_task: tuple[Features, Path, int, ReadRecords] | None = None  # of a worker, one call at a time


def _begin_worker(features: Features, path: Path, count: int, read: ReadRecords) -> None:
    """Keep what this worker computes: threads of the parent may compute other features."""
    global _task
    _task = features, path, count, read
    follow_parent()


def _write_in_worker(chunk: int) -> None:
    assert _task is not None
    _write_chunk(*_task, chunk)


def _write_chunk(features: Features, path: Path, count: int, read: ReadRecords, chunk: int) -> None:
    start, stop = chunk * _CHUNK, min((chunk + 1) * _CHUNK, count)
    rows = np.empty((stop - start, features.width), np.float32)
    for offset, record in enumerate(read(start, stop)):
        try:
            rows[offset] = features.of_record(record)
        except InvalidValueError as error:
            allowed = f"{error.allowed} (record {start + offset})"
            raise InvalidValueError(error.field, error.value, allowed) from error
        except MemoryError as error:
            text = f"no memory for the features of record {start + offset}. Free memory, and run "
            raise NoisewiseError(f"{text}the same command again to resume") from error
        except Exception as error:
            allowed = f"must map every record (record {start + offset}: {one_line(error)})"
            raise InvalidValueError("features.name", features.name, allowed) from error
    features.check_fixed()
    values = open_memmap(path, "r+")
    values[start:stop] = rows
    values.flush()
