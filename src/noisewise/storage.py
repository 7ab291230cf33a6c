"""Files that survive a crash or a full disk: the cache folder, atomic writes, JSON text."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from noisewise.errors import DiskFullError

__all__ = [
    "DISK_FULL_CODES",
    "cache_dir",
    "disk_full",
    "file_lock",
    "lock_is_held",
    "reserve",
    "sole_lock",
    "sync_folder",
    "to_json",
    "write_atomic",
    "writing",
]

DISK_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of the system: disk full, quota exceeded, file too large."""

_HELD: dict[tuple[int, str], object] = {}  # locks by (process, path): a fork copies this memory
_PAUSE = 0.05  # seconds between two attempts to lock a file


def cache_dir() -> Path:
    """Return the folder for files that can be downloaded or computed again.

    It is the environment variable ``NOISEWISE_CACHE``, or else ``noisewise`` in the user's cache
    folder.
    """
    named = os.environ.get("NOISEWISE_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "noisewise"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time run the block; other processes wait.

    The system releases the lock when the process ends, even if it is killed. On a system without
    such locks (Windows), no process waits.

    Args:
        path: file to lock; it is created if it does not exist.
        on_wait: called once before waiting for another process.
    """
    with open(path, "wb") as file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def sole_lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock on a file that serves only as a lock, and remove the file at the end.

    Threads of one process exclude each other too. The system releases the lock when the process
    that took it ends, even if it is killed and workers that it forked still run. POSIX record locks
    do this; closing another handle on the same file would release the lock. On a system without
    such locks, only threads of this process exclude each other.

    Args:
        path: the file, in a folder that exists.
        patience: seconds to wait for another process.

    Raises:
        BlockingIOError: another thread holds the lock, or another process still holds it after
            ``patience`` seconds.
    """
    process, mark = os.getpid(), object()
    key = process, str(path.resolve())
    if _HELD.setdefault(key, mark) is not mark:
        raise BlockingIOError(errno.EAGAIN, "is locked by another thread", str(path))
    try:
        file = _lock(path, time.monotonic() + patience)
        try:
            yield
        finally:
            if file is not None and os.getpid() == process:
                path.unlink(missing_ok=True)  # before the release, so no other process has it
            if file is not None:
                os.close(file)
    finally:
        del _HELD[key]


def _lock(path: Path, deadline: float) -> int | None:
    """Return the descriptor of the locked file; None if the system has no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                path.unlink(missing_ok=True)
                return None  # a file system without locks
            if time.monotonic() >= deadline:
                raise BlockingIOError(
                    errno.EAGAIN, "is locked by another process", str(path)
                ) from error
            time.sleep(_PAUSE)
            continue
        try:
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        os.close(file)  # the previous holder removed the file after we opened it


# C's struct flock on 64-bit systems, and the position of the lock's type in it.
_FLOCK_LAYOUTS = {"linux": ("hhqqi4x", 0), "darwin": ("qqihh", 3)}


def lock_is_held(path: Path) -> bool | None:
    """Whether another process holds the lock of `sole_lock` on a file, without taking it.

    Args:
        path: the lock file; one that does not exist is not locked.

    Returns:
        None if this system or file system cannot tell. A lock of this process counts as not held.
    """
    layout, kind = _FLOCK_LAYOUTS.get(sys.platform, ("", 0))
    if not layout or sys.maxsize < 2**32:
        return None
    import fcntl

    fields = [0] * 5
    fields[kind] = fcntl.F_WRLCK
    try:
        with open(path, "rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *fields))
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return bool(struct.unpack(layout, answer)[kind] != fcntl.F_UNLCK)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the whole old file or the whole new one.

    Writes a temporary file in the same folder, then fsync, rename and fsync of the folder
    (docs/privacy.md, guarantee 12).

    Args:
        path: the file; missing parent folders are created.
        content: all bytes of the file.

    Raises:
        DiskFullError: the disk is full; the old file stays.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors of a full disk into one that names the file and what to do.

    Args:
        path: the file that the block writes, for the error.

    Raises:
        DiskFullError: the block failed because the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_CODES or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, error.strerror, str(path)) from error


def disk_full(error: BaseException | None) -> DiskFullError | None:
    """Return the `DiskFullError` behind an error, also behind the errors of a library, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, DiskFullError):
            return error
        if isinstance(error, OSError) and error.errno in DISK_FULL_CODES:
            return DiskFullError(error.errno, error.strerror, error.filename or "output")
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), "database")
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def reserve(path: Path) -> None:
    """Allocate the disk blocks of a file, before it is written through a memory map.

    A file whose size was only set has no blocks yet. If the disk becomes full while the file is
    mapped, the system ends the process with SIGBUS instead of reporting an error.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(path), open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)


def _plain(value: Any) -> Any:
    """Return the value with types that JSON has; NaN and infinite numbers become None."""
    kind = type(value)  # the frequent types first: a record has several numbers of each client
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is str or kind is int or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays and numbers of numpy, without importing numpy
        return _plain(value.tolist())
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON text: keys sorted, null for NaN and infinite numbers.

    The same input gives the same text.

    Args:
        value: mappings, sequences, strings, numbers, None, and numpy arrays and numbers.
        indent: spaces of each level; None writes one line.

    Example:
        >>> to_json({"b": float("nan"), "a": (1, 2)})
        '{"a": [1, 2], "b": null}'
    """
    return json.dumps(_plain(value), indent=indent, sort_keys=True, allow_nan=False)
