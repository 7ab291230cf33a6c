"""Events of a ledger, each hashed together with the one before: a history that shows any change."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger.charges import Charge, check_hash

_encode = json.JSONEncoder(separators=(",", ":")).encode

__all__ = ["Event", "Header", "History", "link"]


@dataclass(frozen=True)
class Header:
    """What a ledger is about, fixed when it is made.

    Attributes:
        ledger_id: random, so that no two ledgers are alike.
        dataset_id: the dataset whose records the budget protects.
        budget: what those records were promised.
        accountant: by which epsilon is computed from the entries.
        created: time in UTC, for people.
        software: that made the ledger.
    """

    ledger_id: str
    dataset_id: str
    budget: PrivacyBudget
    accountant: str
    created: str
    software: str

    def digest(self) -> str:
        """The hash that the first event builds on."""
        budget = self.budget
        return _sha256(
            "noisewise-ledger-1",
            self.ledger_id,
            self.dataset_id,
            float(budget.epsilon).hex(),
            float(budget.delta).hex(),
            self.accountant,
            self.created,
            self.software,
        )


@dataclass(frozen=True)
class Event:
    """One line of the ledger: a reservation with its charge, or the sealing of one.

    Attributes:
        seq: 1, 2, 3, ...; this orders events, the clock does not.
        instruction: hash of the instruction.
        charge: of a reservation; None when sealing.
        reservation: which one is sealed; None when reserving.
        reply_sha256: of the sealed reply.
        reply_size: of the sealed reply, in bytes.
        time: UTC, for people.
        hash: over the hash of the event before and all of the above.
    """

    seq: int
    instruction: str
    charge: Charge | None
    reservation: int | None
    reply_sha256: str | None
    reply_size: int | None
    time: str
    hash: str = ""


def link(previous: str, event: Event) -> str:
    """The hash of an event that follows on ``previous``."""
    charge = event.charge
    return _sha256(
        previous,
        event.seq,
        event.instruction,
        None
        if charge is None
        else [
            charge.purpose,
            charge.sample_rate.hex(),
            charge.noise_multiplier.hex(),
            charge.steps,
        ],
        event.reservation,
        event.reply_sha256,
        event.reply_size,
        event.time,
    )


def _sha256(*parts: object) -> str:
    return hashlib.sha256(_encode(parts).encode()).hexdigest()


@dataclass
class History:
    """All events so far, checked one by one, and what follows from them.

    Attributes:
        head: hash of the last event.
        reservations: by number.
        seals: by the number of the reservation.
        counts: steps by (sample_rate, noise_multiplier).
        granted: how often each charge was granted.
        hashes: of the header and all events.
    """

    head: str
    reservations: dict[int, Event] = field(default_factory=dict)
    seals: dict[int, Event] = field(default_factory=dict)
    counts: dict[tuple[float, float], int] = field(default_factory=dict)
    granted: Counter[Charge] = field(default_factory=Counter)
    hashes: list[str] = field(default_factory=list)
    _answered: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    @classmethod
    def begin(cls, header: Header) -> History:
        """The history of a ledger without events."""
        head = header.digest()
        return cls(head, hashes=[head])

    @property
    def seq(self) -> int:
        """Number of the last event; 0 before the first."""
        return len(self.hashes) - 1

    def sealed_for(self, purpose: str, instruction: str) -> tuple[int, ...]:
        """Reservations of this instruction that were sealed, the first one first."""
        return tuple(self._answered.get((purpose, instruction), ()))

    def extend(self, events: Iterable[Event]) -> None:
        """Add events in order.

        Raises:
            LedgerError: an event is missing, changed, out of order or makes no sense.
        """
        for event in events:
            self._check(event)
            self.hashes.append(event.hash)
            self.head = event.hash
            if event.charge is not None:
                self.reservations[event.seq] = event
                charge = event.charge
                kind = (charge.sample_rate, charge.noise_multiplier)
                self.counts[kind] = self.counts.get(kind, 0) + charge.steps
                self.granted[charge] += 1
                continue
            assert event.reservation is not None
            self.seals[event.reservation] = event
            reserved = self.reservations[event.reservation]
            assert reserved.charge is not None
            key = (reserved.charge.purpose, event.instruction)
            self._answered.setdefault(key, []).append(event.reservation)

    def _check(self, event: Event) -> None:
        number = self.seq + 1
        if event.seq != number:
            raise LedgerError(f"entry {number} is missing: the next one has number {event.seq}")
        if link(self.head, event) != event.hash:
            raise LedgerError(f"entry {number} was changed: its hash does not fit its content")
        try:
            check_hash("instruction", event.instruction)
            if event.charge is None:
                check_hash("reply_sha256", event.reply_sha256)
                positive_int("reservation", event.reservation)
        except InvalidValueError as error:
            raise LedgerError(f"entry {number} makes no sense: {error}") from error
        if event.charge is not None:
            if (event.reservation, event.reply_sha256, event.reply_size) != (None, None, None):
                raise LedgerError(f"entry {number} reserves and seals at once")
            return
        reserved = self.reservations.get(event.reservation or 0)
        if reserved is None or reserved.instruction != event.instruction:
            raise LedgerError(f"entry {number} seals a reservation that is not there")
        if event.reservation in self.seals:
            raise LedgerError(f"entry {number} seals reservation {event.reservation} again")
