"""Files that survive a crash or a full disk: the cache folder and atomic writes."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from noisewise.errors import DiskFullError

__all__ = [
    "NO_ROOM",
    "cache_dir",
    "disk_full",
    "file_lock",
    "reserve",
    "sole_lock",
    "write_atomic",
    "writing",
]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # full, quota, limit of a file
_HELD: dict[tuple[int, str], object] = {}  # by process and path: a fork's memory is a copy
_PAUSE = 0.05


def cache_dir() -> Path:
    """Return the folder for things that can be made again.

    ``NOISEWISE_CACHE`` names it; else it is ``noisewise`` in the user's cache folder.
    """
    named = os.environ.get("NOISEWISE_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "noisewise"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time do something; the others wait, after ``on_wait`` was called.

    The lock goes with the process, so a killed one leaves none behind. Where the system has no
    such locks, nobody waits.
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
    """Hold the lock of a file that is there for nothing else, and remove the file at the end.

    Threads of one process exclude each other too. The lock goes with the very process that took it:
    a killed one leaves none behind, though workers that it forked live on for a moment. That is
    what POSIX record locks do; closing another handle on the file would lose it. Where the system
    has no such locks, only threads of this process exclude each other.

    Args:
        path: of the file, in a folder that exists.
        patience: seconds to wait for another process.

    Raises:
        BlockingIOError: if another thread or process holds it still.
    """
    own, mark = os.getpid(), object()
    key = own, str(path.resolve())
    if _HELD.setdefault(key, mark) is not mark:
        raise BlockingIOError(errno.EAGAIN, "is locked by another thread", str(path))
    try:
        file = _lock(path, time.monotonic() + patience)
        try:
            yield
        finally:
            if file is not None and os.getpid() == own:
                path.unlink(missing_ok=True)  # before the lock goes, so nobody has locked it yet
            if file is not None:
                os.close(file)
    finally:
        del _HELD[key]


def _lock(path: Path, deadline: float) -> int | None:
    """The descriptor of a locked file; None where there are no locks."""
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
        os.close(file)  # the one before removed it after we had opened it


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` so that a crash leaves either the old file or the new one, never a part.

    Temporary file in the same folder, fsync, rename, fsync of the folder (docs/privacy.md,
    guarantee 12).

    Raises:
        DiskFullError: if there is no room; the old file stays.
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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors of a full disk into one that names the file and the remedy.

    Raises:
        DiskFullError: if the block fails for lack of room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, error.strerror, str(path)) from error


def disk_full(error: BaseException | None) -> DiskFullError | None:
    """The full disk that caused an error, directly or behind another library's error, if any."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, DiskFullError):
            return error
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return DiskFullError(error.errno, error.strerror, error.filename or "output")
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), "database")
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def reserve(path: Path) -> None:
    """Give a file the room that its size promises, before it is written through memory.

    A file that was only made long has no blocks yet. Where they run out while the file is mapped,
    the system ends the process by SIGBUS instead of reporting an error.

    Raises:
        DiskFullError: if there is no room.
    """
    with writing(path), open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
