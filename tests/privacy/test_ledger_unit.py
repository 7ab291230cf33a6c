"""What a ledger counts, records or persons; ledgers of versions that counted records only."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from dpsgd import make_test_plan
from ledger_cases import BUDGET, DATASET, instruction, play

from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.ledger import Ledger, Reservation, verify_ledger
from noisewise.privacy.ledger.chain import Header
from noisewise.privacy.ledger.ledger_schema import SCHEMA_VERSION, schema

OLD = Path(__file__).parents[1] / "site" / "old_site" / "site.ledger"
OLD_HEAD = "451f4d01bdf5db29121cac602e4a2ba4385009a58001278b89389a8ab4e13fa4"
RECORDS = make_test_plan(z=50.0)
PERSONS = replace(RECORDS, unit="person", max_records=2)


@pytest.fixture
def persons(tmp_path: Path) -> Path:
    """A ledger that counts persons, with two entries."""
    path = tmp_path / "persons.ledger"
    Ledger.create(path, BUDGET, DATASET, unit="person")
    with Ledger.open(path, dataset_id=DATASET, budget=BUDGET, unit="person") as ledger:
        play(ledger, 2)
    return path


def test_the_unit_is_in_the_header_and_in_the_statement(persons: Path, tmp_path: Path) -> None:
    with Ledger.inspect(persons) as ledger:
        assert ledger.header.unit == ledger.statement().unit == "person"
    assert verify_ledger(persons).problems == ()
    Ledger.create(tmp_path / "records.ledger", BUDGET, DATASET)
    with Ledger.inspect(tmp_path / "records.ledger") as ledger:
        assert ledger.header.unit == ledger.statement().unit == "record"


def test_the_unit_is_in_the_chain() -> None:
    header = Header("0" * 32, DATASET, BUDGET, "pld", "2026-01-01T00:00:00.000Z", "noisewise 1")
    assert header.digest() != replace(header, unit="person").digest()


def test_a_changed_unit_is_noticed(persons: Path) -> None:
    with sqlite3.connect(persons) as file:
        found = file.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        triggers = found.fetchall()
        for name, _ in triggers:
            file.execute(f"DROP TRIGGER {name}")
        file.execute("UPDATE header SET unit = 'record'")
        for _, text in triggers:
            file.execute(text)
    assert "header was changed" in verify_ledger(persons).problems[0]
    for unit in ("record", "person"):
        with pytest.raises(LedgerError, match="changed"):
            Ledger.open(persons, dataset_id=DATASET, budget=BUDGET, unit=unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["people", "", None, 1])
def test_other_units_are_refused(tmp_path: Path, unit: object) -> None:
    with pytest.raises(InvalidValueError, match="unit"):
        Ledger.create(tmp_path / "l", BUDGET, DATASET, unit=unit)  # type: ignore[arg-type]
    assert not (tmp_path / "l").exists()


def test_a_ledger_of_the_other_unit_is_refused_in_one_line(persons: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.ledger"
    Ledger.create(records, BUDGET, DATASET)
    with pytest.raises(LedgerError, match="unit = 'person', expected 'record'") as caught:
        Ledger.open(persons, dataset_id=DATASET, budget=BUDGET)
    assert "\n" not in str(caught.value)
    with pytest.raises(LedgerError, match="unit = 'record', expected 'person'"):
        Ledger.open(records, dataset_id=DATASET, budget=BUDGET, unit="person")


def test_a_plan_of_the_other_unit_reserves_nothing(persons: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.ledger"
    Ledger.create(records, BUDGET, DATASET)
    for path, unit, own, other in (
        (persons, "person", PERSONS, RECORDS),
        (records, "record", RECORDS, PERSONS),
    ):
        with Ledger.open(path, dataset_id=DATASET, budget=BUDGET, unit=unit) as ledger:  # type: ignore[arg-type]
            before = ledger.statement()
            with pytest.raises(LedgerError, match="nothing was reserved") as caught:
                ledger.reserve(instruction(7), other)
            assert "\n" not in str(caught.value)
            assert ledger.statement() == before
            assert isinstance(ledger.reserve(instruction(7), own), Reservation)


# ---------------------------------------------------------------- older ledgers


def older(folder: Path, version: int) -> Path:
    """A ledger of an older version with two entries; version 1 is a file that commit f7782e9 wrote.

    Version 2 had one more column, which entries of version 1 leave empty.
    """
    for name in ("site.ledger", "site.ledger-witness"):
        shutil.copy(OLD.with_name(name), folder / name)
    path = folder / "site.ledger"
    if version == 2:
        with sqlite3.connect(path) as file:
            file.execute("ALTER TABLE events ADD COLUMN software TEXT")
            file.execute("PRAGMA user_version=2")
            texts = [row[0] for row in file.execute("SELECT sql FROM sqlite_master ORDER BY rowid")]
        assert tuple(text for text in texts if text) == schema(2)
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_ledger_counts_records_and_keeps_its_hashes(tmp_path: Path, version: int) -> None:
    path = older(tmp_path, version)
    before = path.read_bytes()
    with Ledger.inspect(path) as ledger:
        header, statement = ledger.header, ledger.statement()
    assert (header.unit, statement.unit, statement.head) == ("record", "record", OLD_HEAD)
    assert verify_ledger(path, OLD_HEAD).ok
    assert path.read_bytes() == before  # reading does not change a file
    with Ledger.open(path, dataset_id=header.dataset_id, budget=header.budget) as ledger:
        assert ledger.header == header
        assert ledger.statement() == statement
        play(ledger, 1, start=7)
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        tables = file.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        assert tuple(row[0] for row in tables) == schema(SCHEMA_VERSION)
    assert verify_ledger(path, OLD_HEAD).ok
    with pytest.raises(LedgerError, match="unit = 'record', expected 'person'"):
        Ledger.open(path, dataset_id=header.dataset_id, budget=header.budget, unit="person")
