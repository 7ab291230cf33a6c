"""What a ledger says to people: the statement, and the result of checking a ledger anew."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noisewise.checks import non_negative_int
from noisewise.errors import InvalidValueError, LedgerError, NoisewiseError
from noisewise.privacy.composition import composed_epsilon
from noisewise.privacy.ledger.chain import Header, History
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Witness
from noisewise.privacy.limit import SpendingLimit

__all__ = ["Entry", "Statement", "Verification", "make_statement", "verify_ledger"]

State = Literal["reserved", "sealed"]
Noted = Literal["not asked", "found", "unknown", "rewritten"]

FEWEST_DIGITS = 16
"""Digits of a noted hash: with fewer, someone could make a new history that begins alike."""


@dataclass(frozen=True)
class Entry:
    """One charge. It counts from its reservation on, whether or not a reply was ever made.

    Attributes:
        number: of the reservation.
        purpose: ``training`` or ``metrics``.
        state: ``reserved`` (charged, no reply left the site) or ``sealed`` (a reply could leave).
        instruction: hash of the instruction.
        sample_rate: q.
        noise_multiplier: z.
        steps: charged.
        reserved_at: time in UTC, for people.
        sealed_at: time in UTC, for people.
        reply_sha256: of the reply.
        reply_size: in bytes.
        reply_kept: whether the ledger still holds the reply.
        hash: of the reservation, as the chain has it.
    """

    number: int
    purpose: str
    state: State
    instruction: str
    sample_rate: float
    noise_multiplier: float
    steps: int
    reserved_at: str
    sealed_at: str | None
    reply_sha256: str | None
    reply_size: int | None
    reply_kept: bool
    hash: str


@dataclass(frozen=True)
class Statement:
    """A dataset's promise and its spending, all of it computed from the entries.

    Attributes:
        path: of the ledger.
        ledger_id: random name of the ledger.
        dataset_id: whose records are protected.
        epsilon: promised.
        delta: promised.
        accountant: by which epsilon is computed.
        created: when the ledger was made, in UTC.
        spent: epsilon of all entries together, an upper bound.
        left: epsilon minus spent.
        rounds_left: how many more rounds like the last one fit; None before the first.
        entries: in the order of their reservations.
        head: hash of the last event; whoever notes it down can tell later whether history changed.
        events: reservations and seals together.
    """

    path: str
    ledger_id: str
    dataset_id: str
    epsilon: float
    delta: float
    accountant: str
    created: str
    spent: float
    left: float
    rounds_left: int | None
    entries: tuple[Entry, ...]
    head: str
    events: int

    @property
    def share(self) -> float:
        """Spent part of the promised epsilon."""
        return self.spent / self.epsilon

    @property
    def sealed(self) -> int:
        """Entries whose reply could leave the site."""
        return sum(entry.state == "sealed" for entry in self.entries)


def make_statement(
    header: Header, history: History, limit: SpendingLimit, kept: frozenset[int], path: str
) -> Statement:
    """The statement of a checked history.

    Args:
        header: of the ledger.
        history: its events.
        limit: the budget.
        kept: reservations whose reply is still stored.
        path: for people.
    """
    budget = header.budget
    spent = composed_epsilon(history.counts, budget.delta, header.accountant)
    return Statement(
        path=path,
        ledger_id=header.ledger_id,
        dataset_id=header.dataset_id,
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=header.accountant,
        created=header.created,
        spent=spent,
        left=max(0.0, budget.epsilon - spent),
        rounds_left=_rounds_left(history, limit),
        entries=tuple(_entry(history, number, kept) for number in sorted(history.reservations)),
        head=history.head,
        events=history.seq,
    )


def _rounds_left(history: History, limit: SpendingLimit) -> int | None:
    for number in sorted(history.reservations, reverse=True):
        charge = history.reservations[number].charge
        if charge is not None and charge.purpose == "training":
            cost = (charge.sample_rate, charge.noise_multiplier, charge.steps)
            return limit.room(history.counts, *cost)
    return None


def _entry(history: History, number: int, kept: frozenset[int]) -> Entry:
    event, seal = history.reservations[number], history.seals.get(number)
    charge = event.charge
    assert charge is not None
    return Entry(
        number=number,
        purpose=charge.purpose,
        state="reserved" if seal is None else "sealed",
        instruction=event.instruction,
        sample_rate=charge.sample_rate,
        noise_multiplier=charge.noise_multiplier,
        steps=charge.steps,
        reserved_at=event.time,
        sealed_at=None if seal is None else seal.time,
        reply_sha256=None if seal is None else seal.reply_sha256,
        reply_size=None if seal is None else seal.reply_size,
        reply_kept=number in kept,
        hash=event.hash,
    )


@dataclass(frozen=True)
class Verification:
    """The outcome of checking a ledger from its first byte to its last.

    Attributes:
        problems: none if the ledger is sound.
        events: that were checked.
        head: hash of the last event that is sound; empty if nothing could be read.
        noted: what became of the noted hash: ``not asked``, ``found``, ``unknown`` (it is not in
            this ledger: mistyped, another ledger's, or of a history that was rewritten) or
            ``rewritten`` (the number of events beside it shows that the history changed).
        remark: on the noted hash, in words; empty if there is nothing to say.
    """

    problems: tuple[str, ...]
    events: int
    head: str
    noted: Noted = "not asked"
    remark: str = ""

    @property
    def ok(self) -> bool:
        """Whether the ledger is sound, and holds the noted hash if there is one."""
        return not self.problems and self.noted in ("not asked", "found")


def verify_ledger(
    path: str | Path, head: str | None = None, *, events: int | None = None
) -> Verification:
    """Check pages, header, chain, witness, stored replies and the sum; report all that is wrong.

    Args:
        path: of the ledger.
        head: a last hash noted from an earlier statement, or its first digits, 16 at least.
        events: the number of events noted beside it. With it a history that was rewritten can be
            told from a hash that was never in this ledger.

    Raises:
        InvalidValueError: ``head`` is no such hash, or ``events`` no such number.
    """
    if head is not None:
        head = _noted_hash(head)
    if events is not None and head is None:
        raise InvalidValueError("events", events, "belongs to a noted hash: give --head, too")
    if events is not None:
        non_negative_int("events", events)
    try:
        witness = Witness(Path(path).resolve())
        seen = witness.read()
        store = Store(Path(path), writable=False)
    except LedgerError as error:
        return Verification((str(error),), 0, "")
    try:
        history = History.begin(store.header)
        problems = _problems(store, history)
        try:
            witness.check(seen, store.header.ledger_id, history)
        except LedgerError as error:
            problems.append(str(error))
    finally:
        store.close()
    noted: Noted = "not asked"
    remark = ""
    if head is not None:
        noted, remark = _find(head, events, history)
    if noted == "rewritten":
        problems.append(remark)
    return Verification(tuple(problems), history.seq, history.head, noted, remark)


def _noted_hash(head: str) -> str:
    """The digits of a noted hash; the dots after a shortened one do not matter."""
    digits = head.strip().rstrip(".\N{HORIZONTAL ELLIPSIS}").lower()
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}", digits):
        raise InvalidValueError(
            "head", head, f"must be the first {FEWEST_DIGITS} to 64 hexadecimal digits of a hash"
        )
    return digits


def _find(head: str, events: int | None, history: History) -> tuple[Noted, str]:
    """Whether a noted hash is part of the history, and what to tell if it is not."""
    places = [place for place, hash_ in enumerate(history.hashes) if hash_.startswith(head)]
    if len(places) > 1:
        return "unknown", f"{head} begins {len(places)} hashes of this ledger: give more digits"
    if places and events in (None, places[0]):
        return "found", f"the noted hash is that of event {places[0]} of {history.seq}"
    if places:
        return "unknown", (
            f"the noted hash is that of event {places[0]}, not of event {events}: the noted number "
            "is wrong, the history holds the hash"
        )
    if events is None:
        return "unknown", (
            f"the noted hash {head} is not in this ledger. It may be mistyped or another ledger's, "
            "or the history was rewritten: give the number of events noted beside it (--events) "
            "to find out"
        )
    if events > history.seq:
        return "rewritten", (
            f"the ledger had {events} events when the hash was noted, now it has {history.seq}: "
            "it was rewritten or put back from an old copy, or the note is another ledger's"
        )
    now = history.hashes[events][: len(head)]
    return "rewritten", (
        f"event {events} had the hash {head} when it was noted and now has {now}: the history was "
        "rewritten, or the note is mistyped or another ledger's"
    )


def _problems(store: Store, history: History) -> list[str]:
    problems: list[str] = []
    try:
        problems += store.problems()
        for event in store.events():
            history.extend([event])
        for reservation in store.replies_kept():
            reply, seal = store.reply(reservation), history.seals.get(reservation)
            if seal is None or reply is None:
                problems.append(f"a reply is stored for reservation {reservation}, never sealed")
            elif hashlib.sha256(reply).hexdigest() != seal.reply_sha256:
                problems.append(f"the stored reply {reservation} was changed")
        budget = store.header.budget
        spent = composed_epsilon(history.counts, budget.delta, store.header.accountant)
        if spent > budget.epsilon:
            problems.append(f"epsilon {spent:.6g} is spent of {budget.epsilon:g}: overspent")
    except (NoisewiseError, ArithmeticError, ValueError, MemoryError) as error:
        problems.append(str(error) or type(error).__name__)
    return problems
