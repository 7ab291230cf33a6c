"""Files that survive a crash: the cache folder and atomic writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_dir", "file_lock", "write_atomic"]


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


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` so that a crash leaves either the old file or the new one, never a part.

    Temporary file in the same folder, fsync, rename, fsync of the folder (PRIVACY.md 12).
    """
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
