"""Features on disk: computed once, resumed after a crash, memory-mapped, verified on opening.

A file of the cache is named by the SHA-256 of the feature map and of the records, so features of
another encoder or of other records are never found under the same name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.storage import file_lock, reserve, write_atomic, writing
from noisewise.training.features import Features
from noisewise.worker_processes import end_workers, follow_parent

__all__ = ["cached_features", "features_key"]

ReadRecords = Callable[[int, int], NDArray[np.float32]]
"""(start, stop) -> records [stop - start, ...] as the feature map takes them."""

OnProgress = Callable[[int, int], None]
"""(records done, records in all)."""

_CHUNK = 128
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

    An interrupted call is resumed. Of several processes one computes and the others wait. A damaged
    file is computed again.

    Args:
        features: the map.
        count: number of records.
        read: gives a range of records.
        records_digest: SHA-256 of all records.
        folder: of the cache.
        workers: processes; the values do not depend on it.
        on_progress: called after each chunk.

    Raises:
        InvalidValueError: a record has no finite features; the message gives its number.
        DiskFullError: no room for the file.
    """
    key = features_key(features, records_digest)
    path, note = folder / f"{key}.npy", folder / f"{key}.json"
    shape = (count, features.width)
    with ExitStack() as stack, writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        waiting = f"{features.name}: another process computes these features; waiting"
        stack.enter_context(file_lock(folder / f"{key}.lock", lambda: _log.warning(waiting)))
        if (known := _open(path, note, shape)) is not None:
            return known
        part, done_file = folder / f"{key}.part.npy", folder / f"{key}.done"
        done = _begin(part, done_file, shape)
        missing = [int(k) for k in np.flatnonzero(done == 0)]
        finished = int(done.sum())
        for number in _compute(features, part, count, read, missing, workers):
            done[number] = 1
            done.flush()
            finished += 1
            if on_progress is not None:
                on_progress(min(finished * _CHUNK, count), count)
        values = np.load(part, mmap_mode="r", allow_pickle=False)
        content = {"features": features.name, "sha256": _sha256(values), "shape": list(shape)}
        del values
        part.replace(path)
        write_atomic(note, json.dumps(content).encode())
        done_file.unlink(missing_ok=True)
        opened = _open(path, note, shape)
    assert opened is not None
    return opened


def _open(path: Path, note: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """The finished file; None if it is missing or damaged."""
    if not note.exists() or not path.exists():
        return None
    try:
        content: Any = json.loads(note.read_bytes())
        values: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        whole = values.dtype == np.float32 and values.shape == shape
        if whole and content["sha256"] == _sha256(values):
            return values
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    _log.warning("cached features are damaged and are computed again: %s", path)
    note.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return None


def _begin(
    part: Path, done_file: Path, shape: tuple[int, int]
) -> np.memmap[Any, np.dtype[np.uint8]]:
    """Which chunks are done [k]: those of an interrupted call, or none."""
    chunks = -(-shape[0] // _CHUNK)
    try:
        done = np.memmap(done_file, np.uint8, "r+", shape=(chunks,))
        values = np.load(part, mmap_mode="r", allow_pickle=False)
        if values.shape == shape and values.dtype == np.float32:
            return done
    except (OSError, ValueError, EOFError):
        pass
    done_file.unlink(missing_ok=True)
    open_memmap(part, "w+", dtype=np.float32, shape=shape).flush()
    reserve(part)  # a full disk shows now, not as SIGBUS in the middle
    return np.memmap(done_file, np.uint8, "w+", shape=(chunks,))


def _compute(
    features: Features,
    part: Path,
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
                _write_chunk(features, part, count, read, chunk)
                yield chunk
            return
        global _task
        _task = features, part, count, read
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(
            min(workers, len(chunks)), context, initializer=follow_parent
        ) as pool:
            futures = {pool.submit(_write_in_worker, chunk): chunk for chunk in chunks}
            try:
                for future in as_completed(futures):
                    future.result()
                    yield futures[future]
            except BaseException:
                end_workers(pool)
                raise
    finally:
        torch.set_num_threads(threads)


_task: tuple[Features, Path, int, ReadRecords] | None = None


def _write_in_worker(chunk: int) -> None:
    assert _task is not None
    _write_chunk(*_task, chunk)


def _write_chunk(features: Features, part: Path, count: int, read: ReadRecords, chunk: int) -> None:
    start, stop = chunk * _CHUNK, min((chunk + 1) * _CHUNK, count)
    rows = np.empty((stop - start, features.width), np.float32)
    for place, record in enumerate(read(start, stop)):
        try:
            rows[place] = features.of_record(record)
        except InvalidValueError as error:
            allowed = f"{error.allowed} (record {start + place})"
            raise InvalidValueError(error.field, error.value, allowed) from error
    values = open_memmap(part, "r+")
    values[start:stop] = rows
    values.flush()


def _sha256(values: NDArray[np.float32]) -> str:
    """SHA-256 of the values, by blocks of rows."""
    digest = hashlib.sha256()
    for start in range(0, len(values), 4096):
        digest.update(np.ascontiguousarray(values[start : start + 4096]).data)
    return digest.hexdigest()
