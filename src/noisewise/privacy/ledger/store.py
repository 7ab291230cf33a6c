"""The SQLite file of a ledger: events can be added, never changed or deleted.

The file uses a write-ahead log with ``synchronous=FULL``: a commit is on the disk before it
returns. One thread or process writes at a time (``BEGIN IMMEDIATE``).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from noisewise.data.specs import check_unit_name
from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger.chain import Event, Header
from noisewise.privacy.ledger.charges import Charge
from noisewise.privacy.ledger.ledger_schema import (
    SCHEMA_VERSION,
    check_tables,
    create_tables,
    upgrade_tables,
)
from noisewise.storage import sync_folder

__all__ = ["Store"]

_SECONDS_TO_WAIT = 60.0


class Store:
    """An open ledger file.

    Args:
        path: of an existing ledger.
        writable: False to open it for reading only. True upgrades a file of an older version.

    Raises:
        LedgerError: the file is missing, empty, damaged, no ledger or of another version.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self.path = path.resolve()
        status = _regular_file(self.path)
        self._inode = (status.st_dev, status.st_ino)
        self._process = os.getpid()
        _check_length(self.path)
        with self._errors():
            self._connection = _connect(self.path, "rw" if writable else "ro")
            try:
                version = check_tables(self._connection, self.path)
                if writable:
                    _durable(self._connection, self.path)
                    if version < SCHEMA_VERSION:
                        upgrade_tables(self._connection, self.path)
                self.header = self._read_header()
            except BaseException:
                self._connection.close()
                raise

    @classmethod
    def create(cls, path: Path, header: Header, beforehand: Callable[[], None]) -> None:
        """Write a new, empty ledger. It appears at its path complete or not at all.

        Args:
            path: of the ledger; no file must exist there.
            header: of the ledger.
            beforehand: called when the path is reserved and before the ledger appears there.

        Raises:
            LedgerError: a file exists at the path, or the ledger cannot be written.
        """
        path = path.absolute()
        logs = [log for log in _companions(path) if log.exists() and log.stat().st_size > 0]
        if path.exists() or path.is_symlink() or logs:
            raise LedgerError(f"{[*logs, path][0]} exists; a ledger is never replaced")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create_file(temporary)
            _fill(temporary, header)
            _create_file(path)
            try:
                beforehand()
                os.replace(temporary, path)
            except BaseException:
                path.unlink()
                raise
            sync_folder(path.parent)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{path}: the ledger cannot be created: {error}") from error
        finally:
            for ending in ("", "-wal", "-shm"):
                temporary.with_name(temporary.name + ending).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if os.getpid() == self._process:
            self._connection.close()

    def events(self, after: int = 0) -> list[Event]:
        """Events with numbers above ``after``, in order."""
        with self._errors():
            rows = self._connection.execute(  # all columns that this version of the file has
                "SELECT * FROM events WHERE seq > ? ORDER BY seq", (after,)
            ).fetchall()
        return [self._event(row) for row in rows]

    def hash_of(self, seq: int) -> str | None:
        """The stored hash of one event; None if there is no such event."""
        with self._errors():
            row = self._connection.execute(
                "SELECT hash FROM events WHERE seq = ?", (seq,)
            ).fetchone()
        return None if row is None else str(row[0])

    def reply(self, reservation: int) -> bytes | None:
        """The stored reply of a sealed reservation; None if it is no longer stored."""
        with self._errors():
            row = self._connection.execute(
                "SELECT reply FROM replies WHERE reservation = ?", (reservation,)
            ).fetchone()
        if row is not None and not isinstance(row[0], bytes):
            raise LedgerError(f"{self.path}: the stored reply {reservation} was changed")
        return None if row is None else bytes(row[0])

    def replies_kept(self) -> list[int]:
        """Numbers of the reservations whose reply is still stored."""
        with self._errors():
            rows = self._connection.execute("SELECT reservation FROM replies").fetchall()
        return [int(row[0]) for row in rows]

    def problems(self) -> list[str]:
        """The problems that SQLite's check of all pages reports."""
        with self._errors():
            rows = self._connection.execute("PRAGMA integrity_check(10)").fetchall()
        return [str(row[0]) for row in rows if row[0] != "ok"]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction of one writer at a time: committed as a whole, durably, or not at all."""
        with self._errors():
            self._check_file()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_file()
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def append(self, event: Event, reply: bytes | None = None) -> None:
        """Add one event and, if it is a seal, its reply; only inside of `writing`."""
        charge = event.charge
        values = (
            event.seq,
            event.instruction,
            charge and charge.label,
            charge and charge.sample_rate,
            charge and charge.noise_multiplier,
            charge and charge.steps,
            event.reservation,
            event.reply_sha256,
            event.reply_size,
            event.time,
            event.hash,
            event.software,
        )
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO events VALUES ({marks})", values)
        if reply is not None:
            self._connection.execute(
                "INSERT INTO replies VALUES (?, ?)", (event.reservation, reply)
            )

    def forget_replies(self, keep: int) -> None:
        """Delete all but the latest ``keep`` replies; their events stay."""
        self._connection.execute(
            "DELETE FROM replies WHERE reservation NOT IN "
            "(SELECT reservation FROM replies ORDER BY reservation DESC LIMIT ?)",
            (keep,),
        )

    # ------------------------------------------------------------ checks

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn every error of SQLite into a `LedgerError`, which grants nothing."""
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self.path} was opened by another process; open it in the process that uses it"
            )
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise LedgerError(f"{self.path}: {error}; nothing is granted") from error

    def _check_file(self) -> None:
        """Check that the open file is still at its path: otherwise entries would be lost."""
        status = _regular_file(self.path)
        if (status.st_dev, status.st_ino) != self._inode:
            raise LedgerError(f"{self.path} was replaced by another file; open it again")

    def _read_header(self) -> Header:
        rows = self._connection.execute(  # all columns that this version of the file has
            "SELECT * FROM header"
        ).fetchall()
        if len(rows) != 1:
            raise LedgerError(f"{self.path} has {len(rows)} headers; a ledger must have one")
        _, ledger_id, dataset_id, epsilon, delta, *rest, digest = rows[0][:9]
        try:
            _no_bytes(rows[0])
            budget = PrivacyBudget(epsilon, delta)
            header = Header(ledger_id, dataset_id, budget, *rest, *rows[0][9:])
            check_unit_name(header.unit)
        except InvalidValueError as error:
            raise LedgerError(f"{self.path}: its header was changed: {error}") from error
        if header.digest() != digest:
            raise LedgerError(f"{self.path}: its header was changed: the hash does not match")
        return header

    def _event(self, row: tuple[Any, ...]) -> Event:
        """The event of a row; a value of another type shows that the row was changed."""
        seq, instruction, label, rate, noise, steps, *rest = row
        try:
            _no_bytes(row)
            charge = None if label is None else Charge.of_label(label, rate, noise, steps)
            return Event(seq, instruction, charge, *rest)
        except InvalidValueError as error:
            raise LedgerError(f"{self.path}: entry {seq} was changed: {error}") from error


# ---------------------------------------------------------------- files


def _companions(path: Path) -> tuple[Path, ...]:
    """SQLite's logs next to a database. An old log would be replayed into a new ledger."""
    return tuple(path.with_name(path.name + ending) for ending in ("-wal", "-journal"))


def _check_length(path: Path) -> None:
    """Reject a truncated file, which SQLite would notice only when it reads the missing pages.

    While there is a log, the file may be shorter than its header says; SQLite handles this case.
    """
    for _ in range(3):  # another process may be copying its log into the file at this moment
        if any(log.exists() and log.stat().st_size for log in _companions(path)):
            return
        with open(path, "rb") as file:
            head = file.read(100)
        size = int.from_bytes(head[16:18], "big")
        expected_size = int.from_bytes(head[28:32], "big") * (65536 if size == 1 else size)
        if len(head) == 100 and path.stat().st_size >= expected_size:
            return
        time.sleep(0.05)
    raise LedgerError(f"{path} is damaged: the file is truncated, or it is not a ledger")


def _no_bytes(row: tuple[Any, ...]) -> None:
    """Reject bytes: outside of replies, a ledger has only text and numbers."""
    if any(isinstance(value, bytes) for value in row):
        raise InvalidValueError("column", "bytes", "must be text or a number")


def _regular_file(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise LedgerError(
            f"{path}: there is no ledger ({error.strerror}); create it with `noisewise ledger "
            "init`, once for each dataset"
        ) from error
    if not path.is_file():
        raise LedgerError(f"{path} is not a regular file")
    if status.st_nlink > 1:
        raise LedgerError(f"{path} has a second hard link; remove that link")
    if status.st_size == 0:
        raise LedgerError(
            f"{path} is empty: if `ledger init` was interrupted, delete the file and run it again; "
            "otherwise restore the ledger"
        )
    return status


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # isolation_level=None: the sqlite3 module begins no transaction by itself.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=_SECONDS_TO_WAIT,
        isolation_level=None,
        check_same_thread=False,  # `Ledger` has a lock
    )
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def _durable(connection: sqlite3.Connection, path: Path) -> None:
    """Make commits wait for the disk; reject a file system that cannot."""
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # macOS: flush the disk's cache too
    if mode != "wal" or connection.execute("PRAGMA synchronous").fetchone()[0] != 2:
        raise LedgerError(f"{path}: this file system has no write-ahead log; use a local disk")


def _create_file(path: Path) -> None:
    """Create an empty file that only its owner can read; an error if the file exists."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _fill(path: Path, header: Header) -> None:
    connection = _connect(path, "rw")
    try:
        _durable(connection, path)
        connection.execute("BEGIN IMMEDIATE")
        create_tables(connection)
        budget = header.budget
        connection.execute(
            "INSERT INTO header VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                header.ledger_id,
                header.dataset_id,
                float(budget.epsilon),
                float(budget.delta),
                header.accountant,
                header.created,
                header.software,
                header.digest(),
                header.unit,
            ),
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
