"""What a ledger says to people: the statement, and the result of checking a ledger anew."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noisewise.errors import LedgerError, NoisewiseError
from noisewise.privacy.composition import composed_epsilon
from noisewise.privacy.ledger.chain import Header, History
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Witness
from noisewise.privacy.limit import SpendingLimit

__all__ = ["Entry", "Statement", "Verification", "make_statement", "verify_ledger"]

State = Literal["reserved", "sealed"]


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
    """

    problems: tuple[str, ...]
    events: int
    head: str

    @property
    def ok(self) -> bool:
        """Whether the ledger is sound."""
        return not self.problems


def verify_ledger(path: str | Path, head: str | None = None) -> Verification:
    """Check pages, header, chain, witness, stored replies and the sum; report all that is wrong.

    Args:
        path: of the ledger.
        head: a hash noted from an earlier statement; it must still be part of the history.
    """
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
    if head is not None and head not in history.hashes:
        problems.append(f"the noted hash {head} is not part of this history: it was rewritten")
    return Verification(tuple(problems), history.seq, history.head)


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
    except NoisewiseError as error:
        problems.append(str(error))
    return problems
