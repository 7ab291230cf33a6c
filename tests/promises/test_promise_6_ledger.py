"""Guarantee 6 of docs/privacy.md: the ledger never overspends; its rules and its ownership."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ledger_cases import (
    BUDGET,
    CHARGE,
    DATASET,
    DELTA,
    instruction,
    play,
    reopen,
    reserve,
)

from noisewise.data import ClientSpec
from noisewise.errors import BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy import PrivacyBudget, epsilon_of, make_plan, non_private_plan
from noisewise.privacy.ledger import (
    Charge,
    Ledger,
    Reservation,
    SealedReply,
    dataset_fingerprint,
    metrics_charge,
    verify_ledger,
)
from noisewise.privacy.ledger.ledger_schema import SCHEMA_VERSION


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A fresh ledger of ten rounds."""
    Ledger.create(tmp_path / "ledger.sqlite", BUDGET, DATASET)
    return tmp_path / "ledger.sqlite"


# ---------------------------------------------------------------- the rules


def test_pragmas_are_those_of_the_promise(path: Path) -> None:
    with reopen(path) as ledger:
        run = ledger._store._connection.execute
        assert run("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert run("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        said: list[str] = []
        ledger._store._connection.set_trace_callback(said.append)
        reserve(ledger, 1)
    assert "BEGIN IMMEDIATE" in said
    assert said.index("BEGIN IMMEDIATE") < next(i for i, s in enumerate(said) if "INSERT" in s)


def test_reserved_is_charged_before_anything_is_sealed(path: Path) -> None:
    with reopen(path) as ledger:
        reserve(ledger, 1)
    with Ledger.inspect(path) as other:  # as if the first process had died
        statement = other.statement()
    assert statement.entries[0].state == "reserved"
    assert statement.spent == epsilon_of(1.0, 50.0, 3, DELTA)
    assert statement.rounds_left == 9


def test_exactly_what_fits_is_granted(path: Path) -> None:
    with reopen(path) as ledger:
        play(ledger, 10)
        for _ in range(3):
            with pytest.raises(BudgetSpentError, match="nothing was reserved"):
                ledger.reserve(instruction("one more"), CHARGE)
        statement = ledger.statement()
    assert (len(statement.entries), statement.sealed, statement.rounds_left) == (10, 10, 0)
    assert statement.spent == BUDGET.epsilon
    assert statement.left == 0
    assert verify_ledger(path).ok


def test_same_instruction_sealed_gives_the_stored_bytes_for_free(path: Path) -> None:
    with reopen(path) as ledger:
        first = ledger.seal(reserve(ledger, 1), b"noised \x00 arrays")
        play(ledger, 9, start=2)  # spends the rest
    with reopen(path) as ledger:
        again = ledger.reserve(instruction(1), CHARGE)
        assert isinstance(again, SealedReply)
        assert again.reply == first
        assert ledger.statement().events == 20


def test_same_instruction_only_reserved_is_charged_anew(path: Path) -> None:
    with reopen(path) as ledger:
        for _ in range(10):
            reserve(ledger, 1)
        with pytest.raises(BudgetSpentError):
            ledger.reserve(instruction(1), CHARGE)
        assert {entry.state for entry in ledger.statement().entries} == {"reserved"}


def test_the_first_sealed_reply_is_the_one_redelivered(path: Path) -> None:
    with reopen(path) as one, reopen(path) as other:
        early, late = reserve(one, 1), reserve(other, 1)
        other.seal(late, b"late")
        one.seal(early, b"early")
        again = one.reserve(instruction(1), CHARGE)
        assert isinstance(again, SealedReply)
        assert again.reply == b"late"


def test_a_plan_gets_its_rounds(tmp_path: Path) -> None:
    spec = ClientSpec("a", n_examples=2400, batch_size=32, epsilon=2.0, delta=1e-4)
    plan = make_plan(spec, rounds=12, clip_norm=1.0)
    budget = PrivacyBudget(2.0, 1e-4)
    Ledger.create(tmp_path / "l", budget, DATASET)
    with Ledger.open(tmp_path / "l", dataset_id=DATASET, budget=budget) as ledger:
        for number in range(12):
            ledger.seal(ledger.reserve(instruction(number), plan), b"x")  # type: ignore[arg-type]
        with pytest.raises(BudgetSpentError):
            ledger.reserve(instruction("13"), plan)
        entry = ledger.statement().entries[0]
    assert (entry.sample_rate, entry.noise_multiplier, entry.steps) == (
        plan.sample_rate,
        plan.noise_multiplier,
        75,
    )


def test_plans_may_change_and_compose(path: Path) -> None:
    with reopen(path) as ledger:
        reserve(ledger, 1)
        reserve(ledger, 2, Charge("training", 0.1, 9.0, 5))
        reserve(ledger, 3, metrics_charge(60.0))
        statement = ledger.statement()
        with pytest.raises(BudgetSpentError):
            ledger.reserve(instruction(4), Charge("training", 0.5, 0.4, 40))
    alone = epsilon_of(1.0, 50.0, 3, DELTA)
    assert alone < statement.spent < BUDGET.epsilon
    assert [entry.purpose for entry in statement.entries] == ["training", "training", "metrics"]


def test_metrics_never_get_a_training_reply(path: Path) -> None:
    with reopen(path) as ledger:
        ledger.seal(reserve(ledger, 1), b"arrays")
        granted = reserve(ledger, 1, metrics_charge(100.0))
        ledger.seal(granted, b"accuracy")
        assert ledger.reserve(instruction(1), CHARGE).reply == b"arrays"  # type: ignore[union-attr]


def test_warns_from_80_percent_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with reopen(path) as ledger, caplog.at_level(logging.WARNING, logger="noisewise"):
        warned = []
        for number in range(10):
            caplog.clear()
            reserve(ledger, number)
            warned.append(bool(caplog.records))
    shares = [epsilon_of(1.0, 50.0, 3 * k, DELTA) / BUDGET.epsilon for k in range(1, 11)]
    assert warned == [share > 0.8 for share in shares]
    assert 0 < sum(warned) < 10


def test_sealing_is_strict_and_repeatable(path: Path, tmp_path: Path) -> None:
    other_path = tmp_path / "other.sqlite"
    Ledger.create(other_path, BUDGET, DATASET)
    with reopen(path) as ledger, reopen(other_path) as other:
        granted = reserve(ledger, 1)
        reserve(other, 1)
        with pytest.raises(LedgerError, match="not in this ledger"):
            other.seal(granted, b"x")
        assert ledger.seal(granted, b"x") == ledger.seal(granted, b"x")
        with pytest.raises(LedgerError, match="another sealed reply"):
            ledger.seal(granted, b"y")
        with pytest.raises(InvalidValueError, match="reply"):
            ledger.seal(granted, bytearray(b"x"))  # type: ignore[arg-type]
        assert ledger.statement().events == 2


def test_old_replies_can_be_let_go_and_then_cost_again(path: Path) -> None:
    with reopen(path, keep_replies=2) as ledger:
        play(ledger, 4)
        assert [entry.reply_kept for entry in ledger.statement().entries] == [
            False,
            False,
            True,
            True,
        ]
        assert isinstance(ledger.reserve(instruction(3), CHARGE), SealedReply)
        assert isinstance(ledger.reserve(instruction(0), CHARGE), Reservation)
    assert verify_ledger(path).ok


def test_a_plan_without_noise_and_odd_values_are_refused(path: Path) -> None:
    spec = ClientSpec("a", 100, 10, 1.0, 1e-5)
    with reopen(path) as ledger:
        with pytest.raises(InvalidValueError, match="plan"):
            ledger.reserve(instruction(1), non_private_plan(spec, rounds=3))
        for wrong in ("", "ABC", "g" * 64, "A" * 64, None, b"0" * 64):
            with pytest.raises(InvalidValueError, match="instruction"):
                ledger.reserve(wrong, CHARGE)  # type: ignore[arg-type]
        assert ledger.statement().events == 0
    for values in (
        ("training", 0.0, 1.0, 1),
        ("training", 0.1, float("nan"), 1),
        ("training", 0.1, 1.0, True),
        ("training", 0.1, 1.0, 0),
        ("x", 0.1, 1.0, 1),
    ):
        with pytest.raises(InvalidValueError):
            Charge(*values)  # type: ignore[arg-type]


def test_numpy_numbers_are_stored_as_numbers(path: Path) -> None:
    charge = Charge("training", np.float64(1.0), np.float32(50.0), np.int64(3))  # type: ignore[arg-type]
    with reopen(path) as ledger:
        reserve(ledger, 1, charge)
    assert verify_ledger(path).ok


def test_a_fingerprint_sees_values_shapes_and_types() -> None:
    a = np.arange(6.0)
    prints = {dataset_fingerprint(x) for x in (a, a.reshape(2, 3), a.astype("f4"), a[::-1])}
    assert len(prints) == 4
    assert dataset_fingerprint(a, a) != dataset_fingerprint(a)


# ---------------------------------------------------------------- missing, foreign, never replaced


def test_missing_ledger_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="noisewise ledger init"):
        reopen(tmp_path / "none.sqlite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dataset_id": "ward 8"}, "dataset_id"),
        ({"budget": PrivacyBudget(BUDGET.epsilon * 2, DELTA)}, "epsilon"),
        ({"budget": PrivacyBudget(BUDGET.epsilon, DELTA / 2)}, "delta"),
        ({"accountant": "rdp"}, "accountant"),
    ],
)
def test_foreign_ledgers_are_refused(path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(LedgerError, match=f"another ledger: {named}"):
        reopen(path, **changes)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 99])
def test_other_schema_versions_are_refused(path: Path, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={version}")
    with pytest.raises(LedgerError, match=f"schema version {version}"):
        reopen(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    cases: dict[str, Callable[[Path], object]] = {
        "empty": lambda p: p.write_bytes(b""),
        "text": lambda p: p.write_text("not a database, but long enough " * 100),
        "folder": lambda p: p.mkdir(),
        "other database": lambda p: (
            sqlite3.connect(p).execute("CREATE TABLE t (x)").connection.close()
        ),
    }
    for name, make in cases.items():
        path = tmp_path / name
        make(path)
        shutil.copy(_fresh(tmp_path, name), f"{path}-witness")
        with pytest.raises(LedgerError):
            reopen(path)
        assert not verify_ledger(path).ok


def _fresh(folder: Path, name: str) -> Path:
    Ledger.create(folder / f"{name} sound", BUDGET, DATASET)
    return folder / f"{name} sound-witness"


def test_a_ledger_is_never_replaced(path: Path) -> None:
    with pytest.raises(LedgerError, match="never replaced"):
        Ledger.create(path, BUDGET, DATASET)
    with reopen(path) as ledger:
        play(ledger, 2)
    path.unlink()
    with pytest.raises(LedgerError, match="forget what is spent"):
        Ledger.create(path, BUDGET, DATASET)
    assert not path.exists()


def test_a_second_name_is_refused(path: Path) -> None:
    os.link(path, path.with_name("second"))
    with pytest.raises(LedgerError, match="second hard link"):
        reopen(path)


def test_only_the_owner_reads_it(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0
    assert path.with_name(path.name + "-witness").stat().st_mode & 0o077 == 0
