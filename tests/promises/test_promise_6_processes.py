"""Guarantee 6 of docs/privacy.md: full disks, clocks, threads, many processes and kill -9."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ledger_cases import (
    BUDGET,
    CHARGE,
    DATASET,
    grants_until_full,
    instruction,
    play,
    reopen,
    reserve,
)

from noisewise.errors import BudgetSpentError, LedgerError
from noisewise.privacy.ledger import (
    Ledger,
    verify_ledger,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A fresh ledger of ten rounds."""
    Ledger.create(tmp_path / "ledger.sqlite", BUDGET, DATASET)
    return tmp_path / "ledger.sqlite"


# ---------------------------------------------------------------- disks, clocks, threads, processes


def test_a_full_disk_grants_nothing_by_page_count(path: Path) -> None:
    with reopen(path) as ledger:
        ledger._store._connection.execute("PRAGMA max_page_count=100")
        granted = grants_until_full(ledger)
    with reopen(path) as ledger:
        assert granted <= len(ledger.statement().entries) <= granted + 3
        ledger.seal(reserve(ledger, "room again"), b"x")
    assert verify_ledger(path).ok


HELPERS = str(Path(__file__).parents[1] / "helpers")
FILE_LIMIT = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ledger_cases as t
path = Path(sys.argv[1])
with t.reopen(path) as ledger:
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    print(t.grants_until_full(ledger))
"""


def test_a_full_disk_grants_nothing_by_file_size(path: Path) -> None:
    """The system itself refuses to let the files grow."""
    words = [
        sys.executable,
        "-c",
        FILE_LIMIT,
        str(path),
        HELPERS,
    ]
    out = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr
    granted = int(out.stdout)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert 0 < granted < 100
    with reopen(path) as ledger:
        assert granted <= len(ledger.statement().entries) <= granted + 3
        play(ledger, 1, start=5000)
    assert verify_ledger(path).ok


def test_no_write_permission_grants_nothing(path: Path) -> None:
    with Ledger.inspect(path) as ledger, pytest.raises(LedgerError, match="grants nothing"):
        ledger.reserve(instruction(1), CHARGE)


def test_a_clock_going_backwards_changes_nothing(path: Path) -> None:
    start = datetime(2026, 11, 15, tzinfo=UTC)
    times = iter(start - timedelta(days=k) for k in range(100))
    with reopen(path, clock=lambda: next(times)) as ledger:
        play(ledger, 10)
        with pytest.raises(BudgetSpentError):
            ledger.reserve(instruction("more"), CHARGE)
        entries = ledger.statement().entries
    assert [entry.number for entry in entries] == list(range(1, 20, 2))
    assert [entry.reserved_at for entry in entries] == sorted(
        (entry.reserved_at for entry in entries), reverse=True
    )
    assert verify_ledger(path).ok


def test_threads_share_one_ledger(path: Path) -> None:
    granted: list[int] = []
    with reopen(path) as ledger:

        def work(name: int) -> None:
            for number in range(10):
                try:
                    granted.append(reserve(ledger, (name, number)).seq)
                except BudgetSpentError:
                    return

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(granted) == len(set(granted)) == 10


def test_a_forked_process_must_open_its_own(path: Path) -> None:
    with reopen(path) as ledger:
        child = os.fork()
        if child == 0:
            try:
                ledger.reserve(instruction(1), CHARGE)
            except LedgerError as error:
                os._exit(7 if "in the process that uses it" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def torture(folder: Path, *words: object) -> dict[str, object]:
    script = Path(__file__).parents[1] / "helpers" / "ledger_torture.py"
    command = [sys.executable, str(script), str(words[0]), str(folder), *map(str, words[1:])]
    out = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr
    answer: dict[str, object] = json.loads(out.stdout)
    return answer


@pytest.mark.slow
def test_8_processes_grant_exactly_300(tmp_path: Path) -> None:
    answer = torture(tmp_path, "crowd", "--processes", 8, "--rounds", 300)
    assert (answer["granted"], answer["charged"], answer["failed"]) == (300, 300, 0)
    assert answer["problems"] == []


@pytest.mark.slow
def test_kill_9(tmp_path: Path) -> None:
    """100 kills, or as many as NOISEWISE_LEDGER_KILLS says (1,000 take a minute and a half)."""
    count = int(os.environ.get("NOISEWISE_LEDGER_KILLS", "100"))
    answer = torture(tmp_path, "kills", "--kills", count)
    assert (answer["overspends"], answer["failed"], answer["problems"]) == (0, 0, [])
    assert answer["kills"] >= count  # type: ignore[operator]
    assert answer["charged"] > answer["granted"]  # type: ignore[operator]  # kills hit in between
    assert answer["redelivered"] > 0  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flaw"),
    [
        ("kills", "charges after training"),
        ("kills", "returns before sealing"),
        ("crowd", "checks outside of the transaction"),
    ],
)
def test_torture_finds_planted_flaws(tmp_path: Path, kind: str, flaw: str) -> None:
    size = ("--kills", 40) if kind == "kills" else ("--rounds", 200)
    assert torture(tmp_path, kind, *size, "--flaw", flaw)["problems"] != []


def test_a_crowd_in_short(tmp_path: Path) -> None:
    answer = torture(tmp_path, "crowd", "--processes", 4, "--rounds", 40)
    assert (answer["granted"], answer["failed"], answer["problems"]) == (40, 0, [])
