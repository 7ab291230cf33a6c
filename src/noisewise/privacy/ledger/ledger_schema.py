"""The tables of a ledger's SQLite file, and the upgrade of files that an older version wrote.

| version | change |
|---|---|
| 1 | the first |
| 2 | ``events.software``: which software made an entry. Entries of version 1 have none |
| 3 | ``header.unit``: what the budget protects. Ledgers of older versions protect records |
"""

from __future__ import annotations

import sqlite3

from noisewise.errors import LedgerError

__all__ = ["SCHEMA_VERSION", "check_tables", "create_tables", "schema", "upgrade_tables"]

SCHEMA_VERSION = 3
"""The version that this software writes. It reads older ones."""

_APPLICATION = 0x6E6F6977  # "noiw": lets programs such as `file` recognise a ledger
# As SQLite adds columns to an older table, so that the texts are equal:
_SOFTWARE = ", software TEXT"
_UNIT = ", unit TEXT NOT NULL DEFAULT 'record'"


def schema(version: int) -> tuple[str, ...]:
    """The statements that create the tables of a version, in order."""
    return (
        f"""CREATE TABLE header (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    ledger_id TEXT NOT NULL,
    dataset_id TEXT NOT NULL,
    epsilon REAL NOT NULL,
    delta REAL NOT NULL,
    accountant TEXT NOT NULL,
    created TEXT NOT NULL,
    software TEXT NOT NULL,
    hash TEXT NOT NULL
{_UNIT if version > 2 else ""})""",
        f"""CREATE TABLE events (
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
    hash TEXT NOT NULL{_SOFTWARE if version > 1 else ""},
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


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file, inside of a transaction."""
    for statement in schema(SCHEMA_VERSION):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id={_APPLICATION}")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def check_tables(connection: sqlite3.Connection, path: object) -> int:
    """Check that the file is a ledger with exactly the tables and triggers of its version.

    Returns:
        The version.

    Raises:
        LedgerError: it is not.
    """
    if connection.in_transaction:
        return _check_tables(connection, path)
    connection.execute("BEGIN")  # one state of the file, even while another process upgrades it
    try:
        return _check_tables(connection, path)
    finally:
        connection.execute("ROLLBACK")


def _check_tables(connection: sqlite3.Connection, path: object) -> int:
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise LedgerError(f"{path} is not a noisewise ledger")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 1 <= version <= SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema version {version}, this software reads versions up to "
            f"{SCHEMA_VERSION}; use the software that wrote it"
        )
    rows = connection.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    ).fetchall()
    if tuple(row[0] for row in rows) != schema(version):  # a trigger could undo every entry
        raise LedgerError(f"{path}: its tables or triggers were changed")
    return version


def upgrade_tables(connection: sqlite3.Connection, path: object) -> None:
    """Bring a ledger to `SCHEMA_VERSION`, as a whole or not at all. No entry is changed.

    Raises:
        LedgerError: another process changed the tables meanwhile.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = check_tables(connection, path)  # another process may have been faster
        if version < 2:
            connection.execute(f"ALTER TABLE events ADD COLUMN {_SOFTWARE[2:]}")
        if version < 3:
            connection.execute(f"ALTER TABLE header ADD COLUMN {_UNIT[2:]}")
            connection.execute("PRAGMA user_version=3")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
