"""Ledgers with 10,000 rounds, and charges that no accountant can compute."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from ledger_cases import DATASET, DELTA, instruction, reserve

from noisewise.errors import BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy import PrivacyBudget
from noisewise.privacy.ledger import Charge, Ledger, instruction_hash, verify_ledger
from noisewise.privacy.ledger.chain import Event, link
from noisewise.privacy.ledger.ledger_schema import SCHEMA_VERSION, schema
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Seen, Witness

BUDGET = PrivacyBudget(8.0, DELTA)
ROUND = Charge("training", 0.01, 5.0, 30)
TIME = "2026-11-17T00:00:00.000Z"


def write(path: Path, charges: list[Charge], *, seal: bool = True) -> None:
    """A ledger with these entries, all hashes right, in one transaction."""
    Ledger.create(path, BUDGET, DATASET)
    store = Store(path)
    head, number = store.header.digest(), 0
    with store.writing():
        for place, charge in enumerate(charges):
            digest = instruction_hash(place.to_bytes(8, "little"))
            events = [Event(number + 1, digest, charge, None, None, None, TIME)]
            if seal:
                events.append(Event(number + 2, digest, None, number + 1, digest, 10, TIME))
            for event in events:
                head = link(head, event)
                store.append(Event(**{**vars(event), "hash": head}))
                number += 1
    Witness(path).record(Seen(store.header.ledger_id, number, head), durable=True)
    store.close()


@pytest.fixture(scope="module")
def long_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 rounds."""
    path = tmp_path_factory.mktemp("long") / "ledger"
    write(path, [ROUND] * 10_000)
    return path


def opened(path: Path) -> Ledger:
    return Ledger.open(path, dataset_id=DATASET, budget=BUDGET)


def busy(work: Callable[[], object]) -> float:
    """Processor seconds, the least of three tries: other processes can only add to it."""
    tries = []
    for _ in range(3):
        start = time.process_time()
        work()
        tries.append(time.process_time() - start)
    return min(tries)


def test_opening_takes_linear_time_and_checks_each_of_10_000_rounds(
    long_path: Path, tmp_path: Path
) -> None:
    """Ten times the rounds; quadratic work would take 100 times as long."""
    write(tmp_path / "short", [ROUND] * 1000)
    short = busy(lambda: opened(tmp_path / "short").close())
    assert busy(lambda: opened(long_path).close()) < 30 * short
    for seq in (1, 9_999, 20_000):
        change(long_path, "time = 'x'", seq)
        with pytest.raises(LedgerError, match=f"entry {seq} was changed"):
            opened(long_path)
        change(long_path, f"time = '{TIME}'", seq)
    assert verify_ledger(long_path).ok


def change(path: Path, assignment: str, seq: int) -> None:
    """Change one entry behind the ledger's back; its triggers are put back in their order."""
    triggers = [sql for sql in schema(SCHEMA_VERSION) if sql.startswith("CREATE TRIGGER")]
    with sqlite3.connect(path) as connection:
        for sql in triggers:
            connection.execute(f"DROP TRIGGER {sql.split()[2]}")
        connection.execute(f"UPDATE events SET {assignment} WHERE seq = ?", (seq,))
        for sql in triggers:
            connection.execute(sql)


def test_a_round_costs_the_same_at_10_000_as_at_10(long_path: Path, tmp_path: Path) -> None:
    write(tmp_path / "short", [ROUND] * 10)

    def cost(path: Path) -> float:
        with opened(path) as ledger:

            def rounds() -> None:
                for _ in range(10):
                    granted = ledger.reserve(instruction(next(numbers)), ROUND, at_most=20_000)
                    ledger.seal(granted, b"x")  # type: ignore[arg-type]

            numbers = count()
            rounds()  # the accountant is asked
            return busy(rounds)

    short, long = cost(tmp_path / "short"), cost(long_path)
    assert long < 3 * short + 0.05


def test_an_open_ledger_reads_only_what_others_added(
    long_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    made = Store._event
    with opened(long_path) as ledger, opened(long_path) as other:
        ledger.statement()
        for number in range(3):
            other.seal(reserve(other, f"other {number}", ROUND), b"x")
        monkeypatch.setattr(
            Store, "_event", lambda self, row: read.append(row[0]) or made(self, row)
        )
        reserve(ledger, "mine", ROUND)
        assert len(read) == 6
        assert read == sorted(read)


# ---------------------------------------------------------------- what no accountant answers


WEIRD = {
    "tiny rate": Charge("training", 1e-12, 1.0, 10),
    "rate below the bound": Charge("training", 9e-7, 1.0, 10),
    "2^62 steps": Charge("training", 0.01, 1.0, 2**62),
    "10^400 steps": Charge("training", 0.01, 1.0, 10**400),
    "no noise": Charge("training", 0.01, 5e-324, 10),
    "endless noise": Charge("training", 0.01, 1e308, 10),
    "all of it": Charge("metrics", 1.0, 1e-300, 2**40),
    "a rate next to 1": Charge("training", 1 - 1e-16, 1e-3, 10**8),
}


@contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """End work that takes this many processor seconds: here it takes less than one, or years."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"still at work after {seconds} processor seconds")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_the_limit_ends_endless_work() -> None:
    with pytest.raises(TimeoutError, match="still at work"), processor_limit(0.1):
        for _ in count():  # in Python: C code such as sum() looks at no signal
            pass


@pytest.mark.parametrize("accountant", ["pld", "rdp", "moments"])
@pytest.mark.parametrize("name", WEIRD)
def test_a_weird_charge_is_a_ledger_error_at_once(
    tmp_path: Path, name: str, accountant: str
) -> None:
    Ledger.create(tmp_path / "l", BUDGET, DATASET, accountant)
    with opened(tmp_path / "l") as ledger:
        with processor_limit(60), pytest.raises(LedgerError, match="nothing was reserved"):
            ledger.reserve(instruction(1), WEIRD[name])
        assert ledger.statement().events == 0
        reserve(ledger, 2, ROUND)


@pytest.mark.parametrize("name", ["tiny rate", "2^62 steps", "no noise", "all of it"])
def test_a_weird_stored_entry_is_a_ledger_error_at_once(tmp_path: Path, name: str) -> None:
    write(tmp_path / "l", [ROUND, WEIRD[name]], seal=False)
    with processor_limit(60), opened(tmp_path / "l") as ledger:
        with pytest.raises(LedgerError):
            ledger.reserve(instruction(1), ROUND)
        with pytest.raises(LedgerError, match="nothing was reserved"):
            ledger.statement()
        assert not verify_ledger(tmp_path / "l").ok


def test_sums_of_stored_steps_stay_in_bounds(tmp_path: Path) -> None:
    write(tmp_path / "l", [Charge("training", 0.01, 5000.0, 2**25)] * 3, seal=False)
    with opened(tmp_path / "l") as ledger, pytest.raises(LedgerError, match="steps = "):
        ledger.reserve(instruction(1), Charge("training", 0.01, 5000.0, 10))


@pytest.mark.parametrize("cost", [None, 3, "training", {"steps": 1}, ROUND.__dict__])
def test_what_is_no_charge_is_named(tmp_path: Path, cost: object) -> None:
    Ledger.create(tmp_path / "l", BUDGET, DATASET)
    with opened(tmp_path / "l") as ledger:
        with pytest.raises(InvalidValueError, match="cost = "):
            ledger.reserve(instruction(1), cost)  # type: ignore[arg-type]
        tampered = Charge("training", 0.01, 5.0, 30)
        object.__setattr__(tampered, "steps", -30)
        with pytest.raises(InvalidValueError, match="steps = -30"):
            ledger.reserve(instruction(1), tampered)
        assert ledger.statement().events == 0


def test_spent_is_still_told_apart(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "l", BUDGET, DATASET)
    with opened(tmp_path / "l") as ledger, pytest.raises(BudgetSpentError, match="would make"):
        ledger.reserve(instruction(1), Charge("training", 0.5, 0.5, 1000))
