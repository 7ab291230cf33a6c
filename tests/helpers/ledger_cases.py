"""A ledger with a budget for ten rounds, and functions that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from noisewise.errors import LedgerError
from noisewise.privacy import PrivacyBudget, epsilon_of
from noisewise.privacy.ledger import (
    Charge,
    Ledger,
    Reservation,
    instruction_hash,
)

DELTA = 1e-5
CHARGE = Charge("training", 1.0, 50.0, 3)
DATASET = "ward 7"


def budget_of(rounds: int, charge: Charge = CHARGE) -> PrivacyBudget:
    """Return the budget for exactly this number of rounds."""
    steps = rounds * charge.steps
    return PrivacyBudget(
        epsilon_of(charge.sample_rate, charge.noise_multiplier, steps, DELTA), DELTA
    )


def instruction(number: object) -> str:
    return instruction_hash(str(number).encode())


BUDGET = budget_of(10)


def reopen(path: Path, **changes: object) -> Ledger:
    wanted: dict[str, object] = {"dataset_id": DATASET, "budget": BUDGET, **changes}
    return Ledger.open(path, **wanted)  # type: ignore[arg-type]


def reserve(ledger: Ledger, number: object, charge: Charge = CHARGE) -> Reservation:
    granted = ledger.reserve(instruction(number), charge)
    assert isinstance(granted, Reservation)
    return granted


def play(ledger: Ledger, rounds: int, start: int = 0) -> None:
    for number in range(start, start + rounds):
        ledger.seal(reserve(ledger, number), f"reply {number}".encode())


def grants_until_full(ledger: Ledger, reply: bytes = b"x" * 40_000) -> int:
    """Reserve and seal until the disk is full; return the number of grants.

    All of them must be in the file.
    """
    granted = []

    def until_full() -> None:
        for number in range(1000):
            granted.append(reserve(ledger, number, Charge("training", 1.0, 5000.0, 1)))
            ledger.seal(granted[-1], reply)

    with pytest.raises(LedgerError, match="nothing is granted"):
        until_full()
    for number in range(3):
        with pytest.raises(LedgerError):
            ledger.seal(reserve(ledger, f"again {number}"), reply)
    return len(granted)
