"""The statement of a ledger for a privacy officer, and `verify_ledger`, which checks a ledger."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noisewise.checks import non_negative_int
from noisewise.errors import InvalidValueError, LedgerError, NoisewiseError
from noisewise.privacy.composition import composed_epsilon
from noisewise.privacy.ledger.chain import Header, History
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Witness
from noisewise.privacy.spending_limit import SpendingLimit

__all__ = ["Entry", "Statement", "Verification", "make_statement", "verify_ledger"]

EntryState = Literal["reserved", "sealed"]
Noted = Literal["not asked", "found", "unknown", "rewritten"]

FEWEST_DIGITS = 16
"""Fewest digits of a noted hash: with fewer, an attacker could forge a history with such a hash."""


@dataclass(frozen=True)
class Entry:
    """One charge. It is charged when it is reserved, whether or not a reply follows.

    Attributes:
        number: of the reservation.
        purpose: ``training`` or ``metrics``.
        state: ``reserved`` (charged, no reply left the site) or ``sealed`` (a reply could leave).
        instruction: hash of the instruction.
        sample_rate: q.
        noise_multiplier: z.
        steps: number of steps charged.
        reserved_at: time of the reservation in UTC.
        sealed_at: time of the seal in UTC; None if there is none.
        reply_sha256: hash of the reply.
        reply_size: in bytes.
        reply_kept: whether the ledger still stores the reply.
        hash: of the reservation's event.
        federation: that asked, as the site names it; empty if the site serves only one.
        software: that made the entry: its version and the hash of its trusted core; None if
            unknown, as for entries of older versions.
    """

    number: int
    purpose: str
    state: EntryState
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
    federation: str = ""
    software: str | None = None


@dataclass(frozen=True)
class Statement:
    """The budget of a dataset and what is spent of it, computed from the entries.

    Attributes:
        path: of the ledger.
        ledger_id: random name of the ledger.
        dataset_id: the dataset whose records are protected.
        unit: what the budget protects, one of `noisewise.data.specs.UNITS`.
        epsilon: of the budget.
        delta: of the budget.
        accountant: computes epsilon.
        created: when the ledger was created, in UTC.
        spent: epsilon of all entries together, an upper bound.
        left: epsilon minus spent.
        rounds_left: how many more rounds like the last one fit; None before the first round.
        entries: in the order of their reservations.
        head: hash of the last event. A privacy officer who notes it can check later with
            `verify_ledger` whether the history was changed.
        events: number of reservations and seals together.
        software: name and version of the software that created the ledger.
    """

    path: str
    ledger_id: str
    dataset_id: str
    unit: str
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
    software: str

    @property
    def share(self) -> float:
        """The spent share of the budget's epsilon."""
        return self.spent / self.epsilon

    @property
    def sealed(self) -> int:
        """Number of entries whose reply could leave the site."""
        return sum(entry.state == "sealed" for entry in self.entries)

    @property
    def counts(self) -> dict[tuple[float, float], int]:
        """All charged steps by (sample_rate, noise_multiplier)."""
        counts: Counter[tuple[float, float]] = Counter()
        for entry in self.entries:
            counts[entry.sample_rate, entry.noise_multiplier] += entry.steps
        return dict(counts)


def make_statement(
    header: Header,
    history: History,
    limit: SpendingLimit,
    stored_replies: frozenset[int],
    path: str,
) -> Statement:
    """Make the statement of a checked history.

    Args:
        header: of the ledger.
        history: its events.
        limit: of the ledger's budget.
        stored_replies: numbers of the reservations whose reply is still stored.
        path: of the ledger.
    """
    budget = header.budget
    spent = composed_epsilon(history.counts, budget.delta, header.accountant)
    return Statement(
        path=path,
        ledger_id=header.ledger_id,
        dataset_id=header.dataset_id,
        unit=header.unit,
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=header.accountant,
        created=header.created,
        spent=spent,
        left=max(0.0, budget.epsilon - spent),
        rounds_left=_rounds_left(history, limit),
        entries=tuple(
            _entry(history, number, stored_replies) for number in sorted(history.reservations)
        ),
        head=history.head,
        events=history.seq,
        software=header.software,
    )


def _rounds_left(history: History, limit: SpendingLimit) -> int | None:
    for number in sorted(history.reservations, reverse=True):
        charge = history.reservations[number].charge
        if charge is not None and charge.purpose == "training":
            return limit.remaining(history.counts, *charge.mechanism)
    return None


def _entry(history: History, number: int, stored_replies: frozenset[int]) -> Entry:
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
        reply_kept=number in stored_replies,
        hash=event.hash,
        federation=charge.federation,
        software=event.software,
    )


@dataclass(frozen=True)
class Verification:
    """The result of checking a whole ledger.

    Attributes:
        problems: what is wrong; empty if the ledger is valid.
        events: number of valid events.
        head: hash of the last valid event; empty if the ledger could not be read.
        noted: result for the noted hash: ``not asked``, ``found``, ``unknown`` (not in this ledger:
            it is mistyped, of another ledger, or the history was rewritten) or ``rewritten`` (the
            number of events shows that the history was changed).
        remark: explains the result for the noted hash; empty if there is none.
    """

    problems: tuple[str, ...]
    events: int
    head: str
    noted: Noted = "not asked"
    remark: str = ""

    @property
    def ok(self) -> bool:
        """Whether the ledger is valid, and contains the noted hash if one was given."""
        return not self.problems and self.noted in ("not asked", "found")


def verify_ledger(
    path: str | Path, head: str | None = None, *, events: int | None = None
) -> Verification:
    """Check the pages, header, hash chain, witness, stored replies and spending of a ledger.

    Args:
        path: of the ledger.
        head: a last hash noted from an earlier statement, or its first digits, at least 16.
        events: the number of events noted with it. It distinguishes a rewritten history from a
            hash that was never in this ledger.

    Returns:
        All problems, and the result for ``head``.

    Raises:
        InvalidValueError: ``head`` is not such a hash, ``events`` is negative, or ``events`` is
            given without ``head``.

    Example:
        >>> verify_ledger("missing.ledger").ok
        False
    """
    if head is not None:
        head = _noted_hash(head)
    if events is not None and head is None:
        raise InvalidValueError("events", events, "must come with a noted hash: give --head too")
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
    """The digits of a noted hash, without the dots after a shortened hash."""
    digits = head.strip().rstrip(".\N{HORIZONTAL ELLIPSIS}").lower()
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}", digits):
        raise InvalidValueError(
            "head", head, f"must be the first {FEWEST_DIGITS} to 64 hexadecimal digits of a hash"
        )
    return digits


def _find(head: str, events: int | None, history: History) -> tuple[Noted, str]:
    """The result for a noted hash, and its explanation."""
    matches = [event for event, hash_ in enumerate(history.hashes) if hash_.startswith(head)]
    if len(matches) > 1:
        return "unknown", f"{len(matches)} hashes of the ledger start with {head}: give more digits"
    if matches and events in (None, matches[0]):
        return "found", f"the noted hash is the hash of event {matches[0]} of {history.seq}"
    if matches:
        return "unknown", (
            f"the noted hash is the hash of event {matches[0]}, not of event {events}: the history "
            "has the hash, the noted number is wrong"
        )
    if events is None:
        return "unknown", (
            f"the noted hash {head} is not in this ledger: it is mistyped or of another ledger, or "
            "the history was rewritten; give the number of events noted with it (--events) to "
            "find out"
        )
    if events > history.seq:
        return "rewritten", (
            f"the ledger had {events} events when the hash was noted, now it has {history.seq}: "
            "it was rewritten or restored from an old copy, or the note is of another ledger"
        )
    now = history.hashes[events][: len(head)]
    return "rewritten", (
        f"event {events} had the hash {head} when it was noted and now has {now}: the history was "
        "rewritten, or the note is mistyped or of another ledger"
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
                problems.append(f"reservation {reservation} has a stored reply and no seal")
            elif hashlib.sha256(reply).hexdigest() != seal.reply_sha256:
                problems.append(f"the stored reply {reservation} was changed")
        budget = store.header.budget
        spent = composed_epsilon(history.counts, budget.delta, store.header.accountant)
        if spent > budget.epsilon:
            problems.append(f"epsilon {spent:.6g} is spent, above the budget's {budget.epsilon:g}")
    except (NoisewiseError, ArithmeticError, ValueError, MemoryError) as error:
        problems.append(str(error) or type(error).__name__)
    return problems
