"""Features of a site's records on disk: computed once, private, one row for each record.

A row holds the SHA-256 of its record, a checksum and the features. A row that is damaged, or that
another map computed, fails its checksum and is computed again. Rows of records that the site no
longer has are deleted at the next reading. The cache never decides whether the site answers: if it
cannot be written, the features are computed in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.storage import file_lock
from noisewise.training.features import Features

__all__ = ["cached_rows", "check_private"]

_BLOCK = 64  # rows that are read or written at once
_PROGRESS = 10.0  # seconds between two lines in the log
_log = logging.getLogger("noisewise.site")


def cached_rows(
    features: Features, inputs: NDArray[np.float32], folder: Path, source: str
) -> NDArray[np.float32]:
    """The features of all records: [N, d], with a row of NaN for a record that has none.

    An interrupted call is resumed. Of several processes one computes and the others wait.

    Args:
        features: the map.
        inputs: [N, ...] records, in C order.
        folder: of the cache; it is created for the own account alone.
        source: where the records come from. Records of another source have another file.

    Raises:
        InvalidValueError: the folder is a link, or other accounts can open it; or the map changes
            while records are mapped (`Features.check_fixed`).
    """
    table = _Table(features, inputs)
    name = hashlib.sha256(f"{features.identity}:{source}".encode()).hexdigest()[:32]
    try:
        _make_private(folder)
        path, lock = folder / f"{name}.rows", folder / f"{name}.lock"
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        with file_lock(lock, lambda: _log.info("another process computes these features; waiting")):
            with _opened(path) as file:
                if table.read(file) < os.fstat(file).st_size:
                    _replace(path, table.done())
            if table.missing:
                with _opened(path) as file:
                    os.lseek(file, 0, os.SEEK_END)
                    table.compute(lambda rows: _write(file, rows))
                    os.fsync(file)
                _log.info("features of %d records are stored in %s", len(inputs), folder)
    except OSError as error:
        _log.warning(
            "features are not stored (%s: %s): they are computed again in every round until the "
            "cache can be written",
            folder,
            error.strerror or type(error).__name__,
        )
        table.compute(lambda rows: None)
    return table.rows


def check_private(folder: Path) -> None:
    """Check that no other account can open a folder.

    Raises:
        InvalidValueError: it is a link or a file, belongs to another account, or is open to others.
        OSError: it does not exist.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidValueError("features: cache", str(folder), "must be a folder, not a link")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        allowed = "must belong to the account that runs the site; delete it; it is recreated"
        raise InvalidValueError("features: cache", str(folder), allowed)
    if os.name == "posix" and status.st_mode & 0o077:
        allowed = f"must be closed to other accounts: `chmod 700 {folder}`"
        raise InvalidValueError("features: cache", str(folder), allowed)


class _Table:
    """The rows of all records, some of them still missing."""

    def __init__(self, features: Features, inputs: NDArray[np.float32]) -> None:
        self._features, self._inputs = features, inputs
        self._form = np.dtype(
            [("record", "V32"), ("check", "V16"), ("values", "<f4", (features.width,))]
        )
        self._numbers: dict[bytes, list[int]] = {}
        for number, record in enumerate(inputs):
            key = hashlib.sha256(np.ascontiguousarray(record).data).digest()
            self._numbers.setdefault(key, []).append(number)
        self.missing = dict.fromkeys(self._numbers)  # in the order of the records
        self.rows = np.full((len(inputs), features.width), np.nan, np.float32)

    def read(self, file: int) -> int:
        """Take what is valid from a file; returns the number of its bytes that are used."""
        used, size = 0, self._form.itemsize
        while block := _read(file, _BLOCK * size):
            for row in np.frombuffer(block[: len(block) // size * size], self._form):
                key = row["record"].tobytes()
                if key in self.missing and row["check"].tobytes() == self._check(key, row):
                    self._take(key, row["values"])
                    used += size
        return used

    def compute(self, write: Callable[[bytes], None]) -> None:
        """Compute what is missing; ``write`` receives whole rows."""
        total, said = len(self.missing), time.monotonic()
        while waiting := [*self.missing][:_BLOCK]:
            new_rows = [row for row in map(self._computed, waiting) if row is not None]
            self._features.check_fixed()
            write(b"".join(new_rows))
            if time.monotonic() > said + _PROGRESS:
                said = time.monotonic()
                _log.info("features: %d of %d records", total - len(self.missing), total)

    def done(self) -> Iterator[bytes]:
        """All rows that are not missing, as they are stored."""
        for key, numbers in self._numbers.items():
            if key not in self.missing:
                yield self._stored(key, self.rows[numbers[0]])

    def _computed(self, key: bytes) -> bytes | None:
        """Compute a record's row; None for an error that may not occur again."""
        vector: NDArray[np.float32] | float = np.nan
        try:
            vector = self._features.of_record(self._inputs[self._numbers[key][0]])
        except InvalidValueError:
            pass  # no finite features, now and later
        except Exception:
            self._take(key, vector)
            return None
        self._take(key, vector)
        return self._stored(key, self.rows[self._numbers[key][0]])

    def _take(self, key: bytes, vector: Any) -> None:
        self.rows[self._numbers[key]] = vector
        del self.missing[key]

    def _stored(self, key: bytes, vector: NDArray[np.float32]) -> bytes:
        row = np.zeros((), self._form)
        row["record"], row["values"] = np.void(key), vector
        row["check"] = np.void(self._check(key, row))
        return row.tobytes()

    def _check(self, key: bytes, row: Any) -> bytes:
        """The checksum of a row: of the map, the record and the features."""
        content = self._features.identity.encode() + key + row["values"].tobytes()
        return hashlib.sha256(content).digest()[:16]


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int, size: int) -> bytes:
    """Read this many bytes, or fewer at the end of the file."""
    parts = []
    while size and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(file: int, content: bytes) -> None:
    """Append all of it or, on a full disk, nothing."""
    before = os.lseek(file, 0, os.SEEK_CUR)
    try:
        while content:
            written = os.write(file, content)
            content = content[written:]
    except OSError:
        os.ftruncate(file, before)
        raise


def _replace(path: Path, rows: Iterator[bytes]) -> None:
    """Replace a file; after a crash either the old or the new file exists."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        with _opened(temporary) as file:
            for row in rows:
                _write(file, row)
            os.fsync(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
