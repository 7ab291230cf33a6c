"""How a ledger lies on disk: one SQLite file to which events are only ever added.

WAL with ``synchronous=FULL``: a commit is on the disk before it returns. Writers go one by one
(``BEGIN IMMEDIATE``), in threads and processes alike.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger.chain import Event, Header
from noisewise.privacy.ledger.charges import Charge

__all__ = ["SCHEMA_VERSION", "Store"]

SCHEMA_VERSION = 1
_APPLICATION = 0x6E6F6977  # "noiw": `file` and other programs can tell what this is
_SECONDS_TO_WAIT = 60.0

_SCHEMA = (
    """CREATE TABLE header (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    ledger_id TEXT NOT NULL,
    dataset_id TEXT NOT NULL,
    epsilon REAL NOT NULL,
    delta REAL NOT NULL,
    accountant TEXT NOT NULL,
    created TEXT NOT NULL,
    software TEXT NOT NULL,
    hash TEXT NOT NULL
)""",
    """CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    instruction TEXT NOT NULL,
    purpose TEXT,
    sample_rate REAL,
    noise_multiplier REAL,
    steps INTEGER,
    reservation INTEGER UNIQUE,
    reply_sha256 TEXT,
    reply_size INTEGER,
    time TEXT NOT NULL,
    hash TEXT NOT NULL,
    CHECK ((purpose IS NULL) = (reservation IS NOT NULL))
)""",
    """CREATE TABLE replies (
    reservation INTEGER PRIMARY KEY,
    reply BLOB NOT NULL
)""",
    *(
        f"""CREATE TRIGGER {table}_{action.lower()} BEFORE {action} ON {table}
BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"""
        for table in ("header", "events")
        for action in ("UPDATE", "DELETE")
    ),
)

_COLUMNS = (
    "seq, instruction, purpose, sample_rate, noise_multiplier, steps, reservation, reply_sha256, "
    "reply_size, time, hash"
)


class Store:
    """An open ledger file.

    Args:
        path: of an existing ledger.
        writable: False to look only.

    Raises:
        LedgerError: missing, empty, no ledger, of another version, or damaged.
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
                self._check_kind()
                if writable:
                    _durable(self._connection, self.path)
                self.header = self._read_header()
            except BaseException:
                self._connection.close()
                raise

    @classmethod
    def create(cls, path: Path, header: Header, beforehand: Callable[[], None]) -> None:
        """Write a new, empty ledger; it appears under its name complete or not at all.

        Args:
            path: where nothing is yet.
            header: of the ledger.
            beforehand: called when the name is ours and before the ledger appears.
        """
        path = path.absolute()
        logs = [log for log in _companions(path) if log.exists() and log.stat().st_size > 0]
        if path.exists() or path.is_symlink() or logs:
            raise LedgerError(f"{[*logs, path][0]} exists already; a ledger is never replaced")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _claim(temporary)
            _fill(temporary, header)
            _claim(path)
            try:
                beforehand()
                os.replace(temporary, path)
            except BaseException:
                path.unlink()
                raise
            _sync_folder(path.parent)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{path}: the ledger cannot be made: {error}") from error
        finally:
            for ending in ("", "-wal", "-shm"):
                temporary.with_name(temporary.name + ending).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        if os.getpid() == self._process:
            self._connection.close()

    def events(self, after: int = 0) -> list[Event]:
        """Events with numbers above ``after``, in order."""
        with self._errors():
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq", (after,)
            ).fetchall()
        return [self._event(row) for row in rows]

    def hash_of(self, seq: int) -> str | None:
        """The stored hash of one event."""
        with self._errors():
            row = self._connection.execute(
                "SELECT hash FROM events WHERE seq = ?", (seq,)
            ).fetchone()
        return None if row is None else str(row[0])

    def reply(self, reservation: int) -> bytes | None:
        """The stored reply of a sealed reservation; None if it is not kept any more."""
        with self._errors():
            row = self._connection.execute(
                "SELECT reply FROM replies WHERE reservation = ?", (reservation,)
            ).fetchone()
        if row is not None and not isinstance(row[0], bytes):
            raise LedgerError(f"{self.path}: the stored reply {reservation} was changed")
        return None if row is None else bytes(row[0])

    def replies_kept(self) -> list[int]:
        """Reservations whose reply is still stored."""
        with self._errors():
            rows = self._connection.execute("SELECT reservation FROM replies").fetchall()
        return [int(row[0]) for row in rows]

    def problems(self) -> list[str]:
        """What SQLite's own check of every page finds."""
        with self._errors():
            rows = self._connection.execute("PRAGMA integrity_check(10)").fetchall()
        return [str(row[0]) for row in rows if row[0] != "ok"]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time; everything inside is committed together, durably, or not at all."""
        with self._errors():
            self._check_place()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_place()
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def append(self, event: Event, reply: bytes | None = None) -> None:
        """Add one event, and the reply that it seals; only inside of `writing`."""
        charge = event.charge
        values = (
            event.seq,
            event.instruction,
            charge and charge.purpose,
            charge and charge.sample_rate,
            charge and charge.noise_multiplier,
            charge and charge.steps,
            event.reservation,
            event.reply_sha256,
            event.reply_size,
            event.time,
            event.hash,
        )
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO events ({_COLUMNS}) VALUES ({marks})", values)
        if reply is not None:
            self._connection.execute(
                "INSERT INTO replies VALUES (?, ?)", (event.reservation, reply)
            )

    def forget_replies(self, keep: int) -> None:
        """Delete all but the latest ``keep`` replies; the events that tell of them stay."""
        self._connection.execute(
            "DELETE FROM replies WHERE reservation NOT IN "
            "(SELECT reservation FROM replies ORDER BY reservation DESC LIMIT ?)",
            (keep,),
        )

    # ------------------------------------------------------------ checks

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Whatever SQLite says becomes one line, and nothing is granted."""
        if os.getpid() != self._process:
            raise LedgerError(f"{self.path}: open the ledger in the process that uses it")
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise LedgerError(f"{self.path}: {error}; nothing is granted") from error

    def _check_place(self) -> None:
        """Entries in a file that was moved away or replaced would be lost."""
        status = _regular_file(self.path)
        if (status.st_dev, status.st_ino) != self._inode:
            raise LedgerError(f"{self.path} was replaced by another file; open it again")

    def _check_kind(self) -> None:
        application = self._pragma("application_id")
        version = self._pragma("user_version")
        if application != _APPLICATION:
            raise LedgerError(f"{self.path} is not a noisewise ledger")
        if version != SCHEMA_VERSION:
            raise LedgerError(
                f"{self.path} has schema version {version}, this software knows {SCHEMA_VERSION}; "
                "use the software that made it"
            )
        found = self._connection.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
        ).fetchall()
        if tuple(row[0] for row in found) != _SCHEMA:  # a foreign trigger could undo every entry
            raise LedgerError(f"{self.path}: its tables or triggers are not those of a ledger")

    def _pragma(self, name: str) -> Any:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    def _read_header(self) -> Header:
        rows = self._connection.execute(
            "SELECT ledger_id, dataset_id, epsilon, delta, accountant, created, software, hash "
            "FROM header"
        ).fetchall()
        if len(rows) != 1:
            raise LedgerError(f"{self.path} has {len(rows)} headers; a ledger has one")
        ledger_id, dataset_id, epsilon, delta, accountant, created, software, digest = rows[0]
        try:
            _no_bytes(rows[0])
            budget = PrivacyBudget(epsilon, delta)
            header = Header(ledger_id, dataset_id, budget, accountant, created, software)
        except InvalidValueError as error:
            raise LedgerError(f"{self.path}: its header was changed: {error}") from error
        if header.digest() != digest:
            raise LedgerError(f"{self.path}: its header was changed: the hash does not fit")
        return header

    def _event(self, row: tuple[Any, ...]) -> Event:
        """An event as it was written; whatever has another type was not written by us."""
        seq, instruction, purpose, rate, noise, steps, sealed, sha256, size, time, digest = row
        try:
            _no_bytes(row)
            charge = None if purpose is None else Charge(purpose, rate, noise, steps)
            return Event(seq, instruction, charge, sealed, sha256, size, time, digest)
        except InvalidValueError as error:
            raise LedgerError(f"{self.path}: entry {seq} was changed: {error}") from error


# ---------------------------------------------------------------- files


def _companions(path: Path) -> tuple[Path, ...]:
    """SQLite's logs beside a database. A stale one would be replayed into a new ledger."""
    return tuple(path.with_name(path.name + ending) for ending in ("-wal", "-journal"))


def _check_length(path: Path) -> None:
    """A file that was cut off can look sound as long as nobody asks for its last pages.

    While there is a log, the file may be behind its own header: SQLite mends that by itself.
    """
    for _ in range(3):  # another process may just be moving its log into the file
        if any(log.exists() and log.stat().st_size for log in _companions(path)):
            return
        with open(path, "rb") as file:
            head = file.read(100)
        size = int.from_bytes(head[16:18], "big")
        wanted = int.from_bytes(head[28:32], "big") * (65536 if size == 1 else size)
        if len(head) == 100 and path.stat().st_size >= wanted:
            return
        time.sleep(0.05)
    raise LedgerError(f"{path} is corrupt: the file was cut off, or is no ledger")


def _no_bytes(row: tuple[Any, ...]) -> None:
    """Text and numbers are all that we write outside of replies."""
    if any(isinstance(value, bytes) for value in row):
        raise InvalidValueError("column", "bytes", "must be text or a number")


def _regular_file(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise LedgerError(
            f"{path}: there is no ledger ({error.strerror}); `noisewise ledger init` makes one, "
            "once for each dataset"
        ) from error
    if not path.is_file():
        raise LedgerError(f"{path} is not a file")
    if status.st_nlink > 1:
        raise LedgerError(f"{path} has a second name; two names make two logs of one ledger")
    if status.st_size == 0:
        raise LedgerError(
            f"{path} is empty: `ledger init` was interrupted (remove it and init again), or the "
            "file was cut off (restore it)"
        )
    return status


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # isolation_level=None: no transaction that we did not begin ourselves.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=_SECONDS_TO_WAIT,
        isolation_level=None,
        check_same_thread=False,  # `Ledger` has a lock of its own
    )
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def _durable(connection: sqlite3.Connection, path: Path) -> None:
    """Commits reach the disk, or the ledger is not used."""
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # macOS keeps plain syncs in the disk's memory
    if mode != "wal" or connection.execute("PRAGMA synchronous").fetchone()[0] != 2:
        raise LedgerError(f"{path}: this disk cannot keep a write-ahead log; use a local one")


def _claim(path: Path) -> None:
    """Make an empty file that only its owner reads; an error if there is one."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _fill(path: Path, header: Header) -> None:
    connection = _connect(path, "rw")
    try:
        _durable(connection, path)
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={_APPLICATION}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        budget = header.budget
        connection.execute(
            "INSERT INTO header VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                header.ledger_id,
                header.dataset_id,
                float(budget.epsilon),
                float(budget.delta),
                header.accountant,
                header.created,
                header.software,
                header.digest(),
            ),
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
