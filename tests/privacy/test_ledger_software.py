"""Which software made an entry; ledgers of the version that did not say so."""

from __future__ import annotations

import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from ledger_cases import BUDGET, DATASET, instruction, play, reopen

from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.ledger import Ledger, metrics_charge, verify_ledger
from noisewise.privacy.ledger.ledger_schema import SCHEMA_VERSION, check_tables
from noisewise.site.core_files import core_hash, running_software

OLD = Path(__file__).parents[1] / "site" / "old_site" / "site.ledger"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "ledger.sqlite", BUDGET, DATASET)
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger with two entries that commit f7782e9 wrote."""
    for name in ("site.ledger", "site.ledger-witness"):
        shutil.copy(OLD.with_name(name), tmp_path / name)
    return tmp_path / "site.ledger"


def open_old(path: Path, software: str | None = None) -> Ledger:
    with Ledger.inspect(path) as ledger:
        header = ledger.header
    return Ledger.open(path, dataset_id=header.dataset_id, budget=header.budget, software=software)


def version(path: Path) -> int:
    with sqlite3.connect(path) as file:
        return int(file.execute("PRAGMA user_version").fetchone()[0])


def test_entries_name_the_software_that_made_them(path: Path) -> None:
    for number, software in enumerate(["noisewise 1 core ab", "noisewise 2 core cd", None]):
        with reopen(path, software=software) as ledger:
            play(ledger, 1, start=number)
            found = [entry.software for entry in ledger.statement().entries]
    assert found == ["noisewise 1 core ab", "noisewise 2 core cd", None]
    assert verify_ledger(path).problems == ()


@pytest.mark.parametrize("change", ["'noisewise 9'", "NULL"])
def test_a_changed_name_is_noticed(path: Path, change: str) -> None:
    with reopen(path, software="noisewise 1 core ab") as ledger:
        play(ledger, 2)
    with sqlite3.connect(path) as file:
        [trigger] = file.execute("SELECT sql FROM sqlite_master WHERE name = 'events_update'")
        file.execute("DROP TRIGGER events_update")
        file.execute(f"UPDATE events SET software = {change} WHERE seq = 1")
        file.execute(trigger[0])
    assert verify_ledger(path).problems != ()
    with pytest.raises(LedgerError):
        reopen(path)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x1b[31m", "café", 3])
def test_names_of_software_are_plain(path: Path, name: object) -> None:
    with pytest.raises(InvalidValueError, match="software"):
        reopen(path, software=name)


def test_an_old_ledger_is_read_without_a_change(old: Path) -> None:
    before = old.read_bytes()
    assert version(old) == 1
    with Ledger.inspect(old) as ledger:
        assert [entry.software for entry in ledger.statement().entries] == [None, None]
    assert verify_ledger(old).problems == ()
    assert old.read_bytes() == before


def test_an_old_ledger_is_upgraded_when_it_is_opened_to_write(old: Path) -> None:
    with Ledger.inspect(old) as reader:  # as `ledger show` beside a vault that starts
        head = reader.statement().head
        with open_old(old, "noisewise 2 core cd") as ledger:
            assert ledger.statement().head == head
            ledger.reserve(instruction(1), metrics_charge(20.0))
        assert [entry.software for entry in reader.statement().entries] == [
            None, None, "noisewise 2 core cd",
        ]  # fmt: skip
    assert version(old) == SCHEMA_VERSION
    assert verify_ledger(old, head).ok
    with open_old(old) as ledger:
        assert len(ledger.statement().entries) == 3


def test_an_upgraded_ledger_has_the_tables_of_a_new_one(old: Path, path: Path) -> None:
    open_old(old).close()
    texts = []
    for one in (old, path):
        with sqlite3.connect(one) as file:
            texts.append(file.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall())
    assert texts[0] == texts[1]


def test_a_changed_old_ledger_is_not_upgraded(old: Path) -> None:
    with sqlite3.connect(old) as file:
        file.execute("CREATE TRIGGER undo AFTER INSERT ON events BEGIN DELETE FROM replies; END")
    with pytest.raises(LedgerError, match="tables or triggers were changed"):
        open_old(old)
    assert version(old) == 1


def test_a_check_sees_one_state_of_a_file_that_is_upgraded_meanwhile(old: Path) -> None:
    upgraded = []

    def upgrade_before_the_tables_are_read(statement: str) -> None:
        if "sqlite_master" in statement and not upgraded:
            upgraded.append(statement)
            open_old(old).close()

    with closing(sqlite3.connect(old, isolation_level=None)) as file:
        file.set_trace_callback(upgrade_before_the_tables_are_read)
        assert check_tables(file, old) == 1
        assert upgraded
        assert check_tables(file, old) == SCHEMA_VERSION


def test_several_writers_upgrade_one_ledger_once(old: Path) -> None:
    barrier = Barrier(4)

    def write(number: int) -> None:
        barrier.wait()
        with open_old(old, f"writer {number}") as ledger:
            ledger.reserve(instruction(number), metrics_charge(20.0))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with Ledger.inspect(old) as ledger:
        made = [entry.software for entry in ledger.statement().entries]
    assert made[:2] == [None, None]
    assert set(made[2:]) == {f"writer {number}" for number in range(4)}
    assert len(made) == 6
    assert verify_ledger(old).problems == ()


def test_a_site_names_the_hash_of_its_core() -> None:
    assert running_software().split()[-1] == core_hash()
