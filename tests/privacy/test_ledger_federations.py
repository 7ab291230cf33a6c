"""One ledger for several federations: who is charged, what counts towards a limit, old ledgers."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import BUDGET, CHARGE, DATASET, instruction, reopen

from noisewise.errors import BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy.ledger import Charge, Ledger, Reservation, SealedReply, verify_ledger

WARD, REGISTRY = replace(CHARGE, federation="ward"), replace(CHARGE, federation="registry")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A fresh ledger of ten rounds."""
    Ledger.create(tmp_path / "ledger.sqlite", BUDGET, DATASET)
    return tmp_path / "ledger.sqlite"


def test_all_federations_spend_one_budget(path: Path) -> None:
    with reopen(path) as ledger:
        for number in range(10):
            charge = [CHARGE, WARD, REGISTRY][number % 3]
            granted = ledger.reserve(instruction(number), charge)
            assert isinstance(granted, Reservation)
            ledger.seal(granted, b"reply")
        for charge in (CHARGE, WARD, REGISTRY):
            with pytest.raises(BudgetSpentError):
                ledger.reserve(instruction("more"), charge)
            assert ledger.remaining(charge, at_most=100) == 0
        entries = ledger.statement().entries
    assert [entry.federation for entry in entries[:4]] == ["", "ward", "registry", ""]
    assert {entry.purpose for entry in entries} == {"training"}
    assert verify_ledger(path).problems == ()


def test_a_stored_reply_belongs_to_its_federation(path: Path) -> None:
    with reopen(path) as ledger:
        granted = ledger.reserve(instruction(1), WARD)
        assert isinstance(granted, Reservation)
        ledger.seal(granted, b"reply")
        assert isinstance(ledger.reserve(instruction(1), WARD), SealedReply)
        assert isinstance(ledger.reserve(instruction(1), REGISTRY), Reservation)
        assert isinstance(ledger.reserve(instruction(1), CHARGE), Reservation)


def test_a_limit_counts_the_federations_that_it_names(path: Path) -> None:
    with reopen(path) as ledger:
        for number in range(2):
            ledger.reserve(
                instruction(number), WARD, at_most=2, counted=lambda name: name == "ward"
            )
        with pytest.raises(BudgetSpentError, match="all 2 rounds"):
            ledger.reserve(instruction(3), WARD, at_most=2, counted=lambda name: name == "ward")
        ledger.reserve(instruction(3), REGISTRY, at_most=1, counted=lambda name: name != "ward")
        with pytest.raises(BudgetSpentError):
            ledger.reserve(instruction(4), CHARGE, at_most=1, counted=lambda name: name != "ward")
        with pytest.raises(BudgetSpentError):  # by default every federation counts
            ledger.reserve(instruction(4), CHARGE, at_most=3)
        assert ledger.remaining(CHARGE, at_most=4) == 1


def test_a_changed_federation_is_noticed(path: Path) -> None:
    with reopen(path) as ledger:
        ledger.reserve(instruction(1), WARD)
    with sqlite3.connect(path) as file:
        file.execute("DROP TRIGGER events_update")
        file.execute("UPDATE events SET purpose = 'training@registry'")
    with pytest.raises(LedgerError):
        reopen(path)


@pytest.mark.parametrize("label", ["training@", "training@A", "other@ward", "training@a@b", ""])
def test_labels_on_disk_are_checked(label: str) -> None:
    with pytest.raises(InvalidValueError):
        Charge.of_label(label, 0.5, 1.0, 1)


@pytest.mark.parametrize("name", ["Ward", "-ward", "a b", "a@b", "x" * 33, "\x1b[31m"])
def test_names_of_federations_are_plain(name: str) -> None:
    with pytest.raises(InvalidValueError, match="federation"):
        replace(CHARGE, federation=name)
