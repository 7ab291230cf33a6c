"""`Ledger`: reserves budget before training and stores each reply before it is returned."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from noisewise import __version__
from noisewise.checks import positive_int
from noisewise.data.specs import Unit, check_unit_name
from noisewise.errors import AccountingError, BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, check_accountant
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.composition import Counts, add_steps, composed_epsilon
from noisewise.privacy.ledger.chain import Event, Header, History, link
from noisewise.privacy.ledger.charges import Charge, charge_of, check_hash, check_software
from noisewise.privacy.ledger.statement import Statement, make_statement
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Seen, Witness
from noisewise.privacy.plan import LocalPlan
from noisewise.privacy.spending_limit import limit_for
from noisewise.text import short_repr

__all__ = ["WARN_FROM", "Ledger", "Reservation", "SealedReply"]

_log = logging.getLogger(__name__)

WARN_FROM = 0.8
"""Share of the budget from which every reservation logs a warning."""

Clock = Callable[[], datetime]


@dataclass(frozen=True)
class Reservation:
    """Permission to train one round; charged even if no reply follows."""

    ledger_id: str
    seq: int
    instruction: str
    charge: Charge
    hash: str


@dataclass(frozen=True)
class SealedReply:
    """The stored reply to an instruction that was answered before: the same bytes, no charge."""

    reservation: int
    reply: bytes


def _now() -> datetime:
    return datetime.now(UTC)


def _every(federation: str) -> bool:
    return True


class Ledger:
    """The spending of one dataset, shared by all federations that the dataset takes part in.

    Call `create` once and `open` from then on. Several processes and threads can use one file.
    A missing, damaged or read-only ledger raises a `LedgerError` and grants nothing.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ledger.sqlite"
        >>> budget = PrivacyBudget(1.0, 1e-5)
        >>> Ledger.create(path, budget, dataset_id="ward-7-2026")
        >>> with Ledger.open(path, dataset_id="ward-7-2026", budget=budget) as ledger:
        ...     granted = ledger.reserve("0" * 64, Charge("training", 0.01, 2.0, 100))
        ...     reply = ledger.seal(granted, b"noised arrays")
        ...     again = ledger.reserve("0" * 64, Charge("training", 0.01, 2.0, 100))
        >>> again.reply == reply
        True
    """

    def __repr__(self) -> str:
        """Its file and its dataset."""
        return short_repr(self, path=str(self.path), dataset_id=self.header.dataset_id)

    def __init__(
        self,
        path: str | Path,
        *,
        writable: bool = True,
        keep_replies: int | None = None,
        software: str | None = None,
        clock: Clock = _now,
    ) -> None:
        """Use `open`, which checks that the ledger is the dataset's, or `inspect`."""
        if keep_replies is not None:
            positive_int("keep_replies", keep_replies)
        self._keep, self._clock, self._writable = keep_replies, clock, writable
        self._software = None if software is None else check_software(software)
        self._lock = threading.RLock()
        self._store = Store(Path(path), writable=writable)
        self.path, self.header = self._store.path, self._store.header
        self._witness = Witness(self.path)
        budget, accountant = self.header.budget, self.header.accountant
        self._limit = limit_for(budget.epsilon, budget.delta, accountant)
        self._warning = limit_for(WARN_FROM * budget.epsilon, budget.delta, accountant)
        self._history = History.begin(self.header)
        try:
            self._refresh()
        except BaseException:
            self._store.close()
            raise

    @staticmethod
    def create(
        path: str | Path,
        budget: PrivacyBudget,
        dataset_id: str,
        accountant: str = DEFAULT_ACCOUNTANT,
        *,
        unit: Unit = "record",
        clock: Clock = _now,
    ) -> None:
        """Create an empty ledger. A person does this once for each dataset, never a client.

        Args:
            path: of the new file.
            budget: of the dataset, over all rounds and federations.
            dataset_id: a printable name of the dataset.
            accountant: computes epsilon from the entries.
            unit: what the budget protects, a record or a person with all of their records.
            clock: gives the time, which is recorded for information only.

        Raises:
            InvalidValueError: ``accountant``, ``dataset_id`` or ``unit`` is invalid.
            LedgerError: the path has a ledger, or a witness of a used ledger.
        """
        check_accountant(accountant)
        check_unit_name(unit)
        is_text = isinstance(dataset_id, str) and dataset_id.isprintable()
        if not is_text or not dataset_id.strip():
            raise InvalidValueError("dataset_id", dataset_id, "must be a non-empty printable name")
        header = Header(
            secrets.token_hex(16),
            dataset_id,
            PrivacyBudget(float(budget.epsilon), float(budget.delta)),
            accountant,
            _text(clock()),
            f"noisewise {__version__}",
            unit,
        )
        file = Path(path).resolve()
        witness = Witness(file)
        Store.create(file, header, lambda: witness.create(header.ledger_id, header.digest()))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        dataset_id: str,
        budget: PrivacyBudget,
        accountant: str | None = None,
        unit: Unit = "record",
        keep_replies: int | None = None,
        software: str | None = None,
        clock: Clock = _now,
    ) -> Ledger:
        """Open the ledger of this dataset and budget, after checking every entry.

        Args:
            path: of a ledger that `create` made.
            dataset_id: must be that of the ledger.
            budget: must be that of the ledger.
            accountant: must be that of the ledger; None accepts any.
            unit: must be that of the ledger.
            keep_replies: how many of the latest replies to store. A repeated instruction whose
                reply is no longer stored is charged again. None stores all replies.
            software: that every entry names as the one that made it; None names none.
            clock: gives the time, which is recorded for information only.

        Raises:
            LedgerError: the ledger is missing, damaged, or of another dataset, budget or
                unit.
        """
        ledger = cls(path, keep_replies=keep_replies, software=software, clock=clock)
        header = ledger.header
        fields: dict[str, tuple[object, object]] = {
            "dataset_id": (dataset_id, header.dataset_id),
            "epsilon": (float(budget.epsilon), header.budget.epsilon),
            "delta": (float(budget.delta), header.budget.delta),
            "accountant": (accountant or header.accountant, header.accountant),
            "unit": (unit, header.unit),
        }
        for field, (expected, actual) in fields.items():
            if expected != actual:
                ledger.close()
                reason = f"{field} = {actual!r}, expected {expected!r}"
                raise LedgerError(f"{ledger.path} is another ledger: {reason}")
        return ledger

    @classmethod
    def inspect(cls, path: str | Path) -> Ledger:
        """Open any ledger for reading; it grants nothing.

        Raises:
            LedgerError: the ledger is missing or damaged.
        """
        return cls(path, writable=False)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def reserve(
        self,
        instruction: str,
        cost: LocalPlan | Charge,
        *,
        at_most: int | None = None,
        counted: Callable[[str], bool] = _every,
        at_most_in_all: int | None = None,
    ) -> Reservation | SealedReply:
        """Charge the budget for an instruction; the charge is on the disk before this returns.

        Args:
            instruction: hash of the whole instruction, see `instruction_hash`.
            cost: the plan whose round is to be trained, or a charge.
            at_most: the largest number of entries with this cost, with or without a reply, even if
                the budget would allow more. None sets no such limit.
            counted: whether the entries of a federation count towards ``at_most``; by default those
                of every federation do.
            at_most_in_all: the same limit for the entries of all federations together. It holds
                even if ``counted`` groups the federations in another way than before.

        Returns:
            The stored reply if this instruction of this federation was answered before, otherwise a
            reservation. An instruction that was reserved and never sealed is charged again.

        Raises:
            BudgetSpentError: the charge does not fit into the budget, or a limit is reached.
            LedgerError: the ledger is damaged or cannot be written, the plan protects another unit
                than the ledger, or the accountant cannot compute epsilon (bounds: sample_rate from
                1e-6, at most 10^8 steps in all, at most 64 kinds of (sample_rate,
                noise_multiplier) with ``pld``).
            InvalidValueError: ``instruction`` is no hash, or ``cost`` no plan with noise or charge.
        """
        check_hash("instruction", instruction)
        charge = charge_of(cost)
        if isinstance(cost, LocalPlan) and cost.unit != self.header.unit:
            raise LedgerError(
                f"{self.path} counts what each {self.header.unit} loses, the plan protects a "
                f"{cost.unit}; nothing was reserved"
            )
        with self._lock:
            self._refresh()
            stored = self._stored(charge.label, instruction)
            if stored is not None:
                return stored
            self._check_fits(charge)  # before the transaction: accounting can take seconds
            with self._appending() as append:
                stored = self._stored(charge.label, instruction)
                if stored is not None:
                    return stored
                self._check_fits(charge)
                self._check_number(charge, at_most, counted)
                self._check_number(charge, at_most_in_all, _every)
                before = dict(self._history.counts)
                event = append(instruction=instruction, charge=charge, software=self._software)
            self._warn(before, charge)
        return Reservation(self.header.ledger_id, event.seq, instruction, charge, event.hash)

    def seal(self, reservation: Reservation, reply: bytes) -> bytes:
        """Store a finished reply durably and return it. Only the returned bytes may leave the site.

        Args:
            reservation: returned by `reserve`.
            reply: the bytes to send.

        Raises:
            InvalidValueError: ``reply`` is not bytes.
            LedgerError: the reservation is not in this ledger, or it was sealed with another reply.
        """
        if not isinstance(reply, bytes):
            raise InvalidValueError("reply", type(reply).__name__, "must be bytes")
        digest, number = hashlib.sha256(reply).hexdigest(), reservation.seq
        with self._lock, self._appending() as append:
            event = self._history.reservations.get(number)
            is_own = reservation.ledger_id == self.header.ledger_id
            if event is None or event.hash != reservation.hash or not is_own:
                raise LedgerError(f"{self.path}: reservation {number} is not in this ledger")
            sealed = self._history.seals.get(number)
            if sealed is not None:
                if sealed.reply_sha256 == digest:
                    return reply
                raise LedgerError(f"{self.path}: reservation {number} has another sealed reply")
            append(
                instruction=event.instruction,
                reservation=number,
                reply_sha256=digest,
                reply_size=len(reply),
                reply=reply,
            )
            if self._keep is not None:
                self._store.forget_replies(self._keep)
        return reply

    def statement(self) -> Statement:
        """The budget, what is spent of it and what left the site, computed from the entries.

        Raises:
            LedgerError: the ledger is damaged, or the accountant cannot compute epsilon.
        """
        with self._lock:
            self._refresh()
            stored_replies = frozenset(self._store.replies_kept())
            with self._accounting():
                return make_statement(
                    self.header, self._history, self._limit, stored_replies, str(self.path)
                )

    def remaining(self, cost: LocalPlan | Charge, *, at_most: int) -> int:
        """How many more times `reserve` would grant this cost now, without any other request.

        Args:
            cost: a plan or a charge.
            at_most: see `reserve`.

        Raises:
            LedgerError: the ledger is damaged, or the accountant cannot compute epsilon.
        """
        charge = charge_of(cost)
        with self._lock:
            self._refresh()
            counts, number = dict(self._history.counts), self._granted(charge, _every)
        with self._accounting():
            fits = self._limit.remaining(counts, *charge.mechanism)
        return max(0, min(fits, at_most - number))

    def _refresh(self) -> None:
        """Read and check the events that other processes have added."""
        seen = self._witness.read()  # before the database, which must have at least its event
        history = self._history
        if history.seq and self._store.hash_of(history.seq) != history.head:
            raise LedgerError(f"{self.path}: entry {history.seq} was changed since it was read")
        try:
            history.extend(self._store.events(after=history.seq))
        except LedgerError as error:
            raise LedgerError(f"{self.path}: {error}") from error
        self._witness.check(seen, self.header.ledger_id, history)

    def _stored(self, label: str, instruction: str) -> SealedReply | None:
        for reservation in self._history.sealed_for(label, instruction):
            reply = self._store.reply(reservation)
            if reply is None:
                continue  # no longer stored
            if hashlib.sha256(reply).hexdigest() != self._history.seals[reservation].reply_sha256:
                raise LedgerError(f"{self.path}: the stored reply {reservation} was changed")
            return SealedReply(reservation, reply)
        return None

    def _granted(self, charge: Charge, counted: Callable[[str], bool]) -> int:
        """How many entries cost the same, among those of the counted federations."""
        same = (charge.purpose, *charge.mechanism)
        return sum(
            number
            for one, number in self._history.granted.items()
            if (one.purpose, *one.mechanism) == same and counted(one.federation)
        )

    def _check_number(
        self, charge: Charge, at_most: int | None, counted: Callable[[str], bool]
    ) -> None:
        if at_most is not None and self._granted(charge, counted) >= at_most:
            unit = "rounds of this plan" if charge.purpose == "training" else "noised figures"
            raise BudgetSpentError(
                f"{self.path}: all {at_most} {unit} that the site allows are charged; nothing was "
                "reserved, even if budget is left"
            )

    def _check_fits(self, charge: Charge) -> None:
        counts, budget = self._history.counts, self.header.budget
        accountant, total = self.header.accountant, add_steps(counts, *charge.mechanism)
        with self._accounting():
            if self._limit.allows(counts, *charge.mechanism):
                return
            after = composed_epsilon(total, budget.delta, accountant)
        raise BudgetSpentError(
            f"{self.path}: the budget does not allow {charge.steps} more steps at z = "
            f"{charge.noise_multiplier:g}, q = {charge.sample_rate:g}: they would make epsilon "
            f"{after:.6g}, more than the budget's {budget.epsilon:g} (delta {budget.delta:g}, "
            f"{accountant}); nothing was reserved"
        )

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        """Turn every error of an accountant into a `LedgerError`, which grants nothing."""
        try:
            yield
        except (AccountingError, ArithmeticError, ValueError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise LedgerError(f"{self.path}: {reason}; nothing was reserved") from error

    @contextmanager
    def _appending(self) -> Iterator[Callable[..., Event]]:
        """A transaction for one event; when it ends, the disk and the witness have the event."""
        if not self._writable:
            raise LedgerError(f"{self.path} was opened for reading; it grants nothing")
        added: list[Event] = []

        def append(*, reply: bytes | None = None, **fields: object) -> Event:
            history = self._history
            empty = Event(history.seq + 1, "", None, None, None, None, _text(self._clock()))
            event = replace(empty, **fields)  # type: ignore[arg-type]
            event = replace(event, hash=link(history.head, event))
            self._store.append(event, reply)
            added.append(event)
            return event

        with self._store.writing():
            self._refresh()
            yield append
        self._history.extend(added)
        for event in added:
            seen = Seen(self.header.ledger_id, event.seq, event.hash)
            self._witness.record(seen, durable=event.charge is not None)

    def _warn(self, before: Counts, charge: Charge) -> None:
        with self._accounting():
            if self._warning.allows(before, *charge.mechanism):
                return
        text = "%s: at least %.0f %% of epsilon = %g (delta %g) is spent"
        budget = self.header.budget
        _log.warning(text, self.path, 100 * WARN_FROM, budget.epsilon, budget.delta)


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
