"""Notes about refusals are bounded and readable, and never cause a failure."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from noisewise.errors import BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy.ledger import note_refusal, read_refusals
from noisewise.privacy.ledger.refusals import refusals_file


def many(path: Path, number: int) -> None:
    for round_number in range(number):
        note_refusal(path, LedgerError("x" * 5000), round_number=round_number)


def test_the_latest_come_first_and_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    many(path, 1000)
    note_refusal(path, BudgetSpentError("spent"))
    assert refusals_file(path).stat().st_size < 200_000
    assert [path.name for path in tmp_path.iterdir()] == ["ledger-refusals"]
    found = read_refusals(path, 20)
    assert [refusal.round for refusal in found] == [None, *range(999, 980, -1)]
    assert all(len(refusal.reason) <= 600 for refusal in found)
    assert os.stat(refusals_file(path)).st_mode & 0o777 == 0o600


def test_processes_share_the_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=many, args=(tmp_path / "l", 100)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert read_refusals(tmp_path / "l", 50)[0].round == 99
    assert len(read_refusals(tmp_path / "l", 50)) >= 20


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("obstacle", ["no folder", "a folder", "a pipe", "a link", "read-only"])
def test_a_note_never_fails_and_never_waits(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "l"
    target = refusals_file(path)
    if obstacle == "no folder":
        path = tmp_path / "gone" / "l"
    elif obstacle == "a folder":
        target.mkdir()
    elif obstacle == "a pipe":
        os.mkfifo(target)
    elif obstacle == "a link":
        (tmp_path / "other").write_text("mine")
        target.symlink_to(tmp_path / "other")
    else:
        tmp_path.chmod(0o500)
    start = time.monotonic()
    for reason in (LedgerError("a"), "b", UnspeakableError(), LedgerError("\ud800"), None):
        note_refusal(path, reason, round_number="7")  # type: ignore[arg-type]
    note_refusal(None, "x")  # type: ignore[arg-type]
    note_refusal("\0", "x")
    assert time.monotonic() - start < 5
    tmp_path.chmod(0o700)
    if obstacle == "a link":
        assert (tmp_path / "other").read_text() == "mine"


def test_no_content_breaks_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "l"
    assert read_refusals(path) == ()
    junk = [b"\xff\xfe", b"{", b"[" * 100_000, b"null", b'{"round": 1}', b'"x"', b"1" * 5000]
    refusals_file(path).write_bytes(b"\n".join(junk))
    assert read_refusals(path, 50) == ()
    note_refusal(path, "\x1b]0;title\x07 \r\n\u202e sound", round_number=3)
    (found,) = read_refusals(path, 50)
    assert found.reason.isprintable()
    assert "sound" in found.reason
    with pytest.raises(InvalidValueError, match="last"):
        read_refusals(path, 0)
    refusals_file(path).unlink()
    refusals_file(path).mkdir()
    with pytest.raises(LedgerError, match="cannot be read"):
        read_refusals(path)
