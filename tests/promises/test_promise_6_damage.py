"""Guarantee 6 of docs/privacy.md: a damaged, changed or rolled-back ledger grants nothing."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import (
    BUDGET,
    CHARGE,
    DATASET,
    instruction,
    play,
    reopen,
    reserve,
)

from noisewise.errors import LedgerError
from noisewise.privacy.ledger import (
    Ledger,
    SealedReply,
    verify_ledger,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A fresh ledger of ten rounds."""
    Ledger.create(tmp_path / "ledger.sqlite", BUDGET, DATASET)
    return tmp_path / "ledger.sqlite"


# ---------------------------------------------------------------- damage and tampering


def tamper(path: Path, *statements: str) -> None:
    """Change a closed ledger behind its back, past its own triggers."""
    connection = sqlite3.connect(path)
    triggers = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type='trigger'"
    ).fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, sql in triggers:
        connection.execute(sql)
    connection.commit()
    connection.close()


def test_triggers_forbid_changes(path: Path) -> None:
    with reopen(path) as ledger:
        play(ledger, 1)
    with sqlite3.connect(path) as connection:
        for words in (
            "DELETE FROM events",
            "UPDATE events SET steps = 1",
            "UPDATE header SET epsilon = 9",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="only ever added to"):
                connection.execute(words)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET steps = 1 WHERE seq = 3",
        "UPDATE events SET noise_multiplier = 51 WHERE seq = 1",
        "UPDATE events SET instruction = hex(zeroblob(32)) WHERE seq = 1",
        "UPDATE events SET time = '1970-01-01T00:00:00.000Z' WHERE seq = 2",
        "UPDATE events SET hash = (SELECT hash FROM events WHERE seq = 1) WHERE seq = 4",
        "UPDATE events SET reply_sha256 = NULL WHERE seq = 2",
        "UPDATE events SET instruction = zeroblob(64) WHERE seq = 1",
        "DELETE FROM events WHERE seq = 6",
        "DELETE FROM events WHERE seq = 3",
        "DELETE FROM events",
        "UPDATE header SET epsilon = 100",
        "UPDATE header SET delta = 0.5",
        "UPDATE header SET dataset_id = 'ward 8'",
        "DELETE FROM header",
        "DROP TRIGGER events_delete",
        "CREATE TRIGGER undo AFTER INSERT ON events BEGIN DELETE FROM replies; END",
        "DROP TABLE replies",
    ],
)
def test_tampering_is_seen(path: Path, statement: str) -> None:
    with reopen(path) as ledger:
        play(ledger, 3)
    before = path.with_name("copy")
    shutil.copy(path, before)
    if "TRIGGER" in statement:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.close()
    else:
        tamper(path, statement)
    assert path.read_bytes() != before.read_bytes()
    with pytest.raises(LedgerError):
        reopen(path)
    assert not verify_ledger(path).ok


def test_a_changed_reply_is_not_sent(path: Path) -> None:
    with reopen(path) as ledger:
        play(ledger, 2)
    tamper(path, "UPDATE replies SET reply = 'without noise' WHERE reservation = 1")
    with reopen(path) as ledger, pytest.raises(LedgerError, match="was changed"):
        ledger.reserve(instruction(0), CHARGE)
    assert "reply 1 was changed" in verify_ledger(path).problems[0]


def test_a_rewritten_history_shows_against_a_noted_hash(path: Path) -> None:
    """Whoever rewrites all hashes, and the witness too, is caught by an old statement."""
    with reopen(path) as ledger:
        play(ledger, 3)
        noted, events = ledger.statement().head, ledger.statement().events
        play(ledger, 1, start=5)
    assert verify_ledger(path, noted, events=events).ok
    for file in (path, path.with_name(path.name + "-witness")):
        file.unlink()
    Ledger.create(path, BUDGET, DATASET)
    with reopen(path) as ledger:
        play(ledger, 4)
    assert verify_ledger(path).ok
    outcome = verify_ledger(path, noted)
    assert (outcome.ok, outcome.noted) == (False, "unknown")  # it may be another ledger's
    for digits in (64, 16):
        outcome = verify_ledger(path, noted[:digits], events=events)
        assert (outcome.ok, outcome.noted) == (False, "rewritten")
        assert "rewritten" in outcome.problems[0]
    outcome = verify_ledger(path, noted, events=100)
    assert (outcome.noted, "now it has 8" in outcome.problems[0]) == ("rewritten", True)


def test_an_old_copy_put_back_is_refused(path: Path) -> None:
    with reopen(path) as ledger:
        play(ledger, 2)
    shutil.copy(path, path.with_name("backup"))
    with reopen(path) as ledger:
        play(ledger, 3, start=10)
    shutil.copy(path.with_name("backup"), path)
    with pytest.raises(LedgerError, match="the ledger lost events"):
        reopen(path)
    assert "lost events" in verify_ledger(path).problems[0]


def test_a_lost_write_ahead_log_is_refused(path: Path, tmp_path: Path) -> None:
    """A copy of the database file alone lacks what is still in the log."""
    ledger = reopen(path)
    play(ledger, 3)
    copied = tmp_path / "elsewhere" / path.name
    copied.parent.mkdir()
    for ending in ("", "-witness"):
        shutil.copy(f"{path}{ending}", f"{copied}{ending}")
    ledger.close()
    with pytest.raises(LedgerError, match="-wal"):
        reopen(copied)


@pytest.mark.parametrize("content", [None, b"", b"x" * 1024])
def test_a_missing_or_spoilt_witness_is_refused(path: Path, content: bytes | None) -> None:
    with reopen(path) as ledger:
        play(ledger, 1)
    witness = path.with_name(path.name + "-witness")
    witness.unlink() if content is None else witness.write_bytes(content)
    with pytest.raises(LedgerError, match="witness"):
        reopen(path)


def test_half_a_witness_will_do(path: Path) -> None:
    """A power cut in the middle of a write spoils one slot."""
    with reopen(path) as ledger:
        play(ledger, 2)
    witness = path.with_name(path.name + "-witness")
    sound = witness.read_bytes()
    for start in (0, 512):
        witness.write_bytes(sound[:start] + bytes(100) + sound[start + 100 :])
        reopen(path).close()


def test_a_file_replaced_under_an_open_ledger_is_noticed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    Ledger.create(other, BUDGET, DATASET)
    with reopen(path) as ledger:
        play(ledger, 1)
        os.replace(other, path)
        with pytest.raises(LedgerError, match="replaced"):
            reserve(ledger, 2)


@pytest.mark.parametrize("seed", range(4))
def test_bit_flips_never_grant_more(path: Path, seed: int) -> None:
    """Whatever bit is flipped: refused, or the same entries as before (the bit lies in free space,
    or in a stored reply, which is refused when it is asked for)."""
    with reopen(path) as ledger:
        play(ledger, 4)
        expected = ledger.statement().entries
    sound = path.read_bytes()
    rng = random.Random(seed)
    refused = 0
    for _ in range(120):
        flipped = bytearray(sound)
        flipped[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            with reopen(path) as ledger:
                assert ledger.statement().entries == expected
                for number in range(4):
                    granted = ledger.reserve(instruction(number), CHARGE)
                    assert isinstance(granted, SealedReply)
                    assert granted.reply == f"reply {number}".encode()
        except LedgerError:
            refused += 1
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
    assert refused > 10


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_off_file_is_refused(path: Path, share: float) -> None:
    with reopen(path) as ledger:
        play(ledger, 4)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(LedgerError):
        reopen(path)
    assert not verify_ledger(path).ok
