"""The events of a ledger as a hash chain: a change of any event breaks the chain."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from noisewise.checks import positive_int
from noisewise.data.specs import Unit
from noisewise.errors import InvalidValueError, LedgerError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger.charges import Charge, check_hash, check_software

_encode = json.JSONEncoder(separators=(",", ":")).encode

__all__ = ["Event", "Header", "History", "link"]


@dataclass(frozen=True)
class Header:
    """The fixed part of a ledger, written when it is created.

    Attributes:
        ledger_id: a random name.
        dataset_id: the dataset whose records the budget protects.
        budget: of the dataset, over all federations.
        accountant: computes epsilon from the entries.
        created: time in UTC, for information only.
        software: name and version of the software that created the ledger.
        unit: what the budget protects; ledgers of older versions protect records.
    """

    ledger_id: str
    dataset_id: str
    budget: PrivacyBudget
    accountant: str
    created: str
    software: str
    unit: Unit = "record"

    def digest(self) -> str:
        """The first hash of the chain."""
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
            *(() if self.unit == "record" else (self.unit,)),  # older ledgers have no such part
        )


@dataclass(frozen=True)
class Event:
    """One event of the ledger: a reservation with its charge, or the seal of a reservation.

    Attributes:
        seq: 1, 2, 3, ...; the order of events does not depend on the clock.
        instruction: hash of the instruction.
        charge: of a reservation; None for a seal.
        reservation: number of the reservation that is sealed; None for a reservation.
        reply_sha256: hash of the sealed reply.
        reply_size: of the sealed reply, in bytes.
        time: in UTC, for information only.
        hash: of the previous event's hash and all other fields.
        software: that made a reservation; None if unknown, as for entries of older versions.
    """

    seq: int
    instruction: str
    charge: Charge | None
    reservation: int | None
    reply_sha256: str | None
    reply_size: int | None
    time: str
    hash: str = ""
    software: str | None = None


def link(previous: str, event: Event) -> str:
    """The hash of an event that follows the event with the hash ``previous``."""
    charge = event.charge
    return _sha256(
        previous,
        event.seq,
        event.instruction,
        None
        if charge is None
        else [
            charge.label,
            charge.sample_rate.hex(),
            charge.noise_multiplier.hex(),
            charge.steps,
        ],
        event.reservation,
        event.reply_sha256,
        event.reply_size,
        event.time,
        *(() if event.software is None else (event.software,)),  # older entries have no such part
    )


def _sha256(*parts: object) -> str:
    return hashlib.sha256(_encode(parts).encode()).hexdigest()


@dataclass
class History:
    """All events so far, each checked, and what is computed from them.

    Attributes:
        head: hash of the last event.
        reservations: events by number.
        seals: events by the number of the reservation that they seal.
        counts: steps by (sample_rate, noise_multiplier).
        granted: how often each charge was granted.
        hashes: of the header and of all events.
    """

    head: str
    reservations: dict[int, Event] = field(default_factory=dict)
    seals: dict[int, Event] = field(default_factory=dict)
    counts: dict[tuple[float, float], int] = field(default_factory=dict)
    granted: Counter[Charge] = field(default_factory=Counter)
    hashes: list[str] = field(default_factory=list)
    _sealed: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    @classmethod
    def begin(cls, header: Header) -> History:
        """The history of a ledger without events."""
        head = header.digest()
        return cls(head, hashes=[head])

    @property
    def seq(self) -> int:
        """Number of the last event; 0 before the first."""
        return len(self.hashes) - 1

    def sealed_for(self, label: str, instruction: str) -> tuple[int, ...]:
        """Numbers of the sealed reservations of an instruction, in order; see `Charge.label`."""
        return tuple(self._sealed.get((label, instruction), ()))

    def extend(self, events: Iterable[Event]) -> None:
        """Add events in order.

        Raises:
            LedgerError: an event is missing, changed, out of order or invalid.
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
            key = (reserved.charge.label, event.instruction)
            self._sealed.setdefault(key, []).append(event.reservation)

    def _check(self, event: Event) -> None:
        number = self.seq + 1
        if event.seq != number:
            raise LedgerError(f"entry {number} is missing: the next entry has number {event.seq}")
        if link(self.head, event) != event.hash:
            raise LedgerError(f"entry {number} was changed: its hash does not match its content")
        try:
            check_hash("instruction", event.instruction)
            if event.software is not None:
                check_software(event.software)
            if event.charge is None:
                check_hash("reply_sha256", event.reply_sha256)
                positive_int("reservation", event.reservation)
        except InvalidValueError as error:
            raise LedgerError(f"entry {number} is invalid: {error}") from error
        if event.charge is not None:
            if (event.reservation, event.reply_sha256, event.reply_size) != (None, None, None):
                raise LedgerError(f"entry {number} is invalid: it is a reservation and a seal")
            return
        reserved = self.reservations.get(event.reservation or 0)
        if reserved is None or reserved.instruction != event.instruction:
            raise LedgerError(f"entry {number} is invalid: it seals a missing reservation")
        if event.reservation in self.seals:
            raise LedgerError(f"entry {number} is invalid: it repeats a seal")
