"""`Ledger`: reserve before training, seal before returning, never above the budget."""

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
from noisewise.errors import AccountingError, BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy.accounting import ACCOUNTANTS, DEFAULT_ACCOUNTANT
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.composition import Counts, add_steps, composed_epsilon
from noisewise.privacy.ledger.chain import Event, Header, History, link
from noisewise.privacy.ledger.charges import Charge, charge_of, check_hash
from noisewise.privacy.ledger.statement import Statement, make_statement
from noisewise.privacy.ledger.store import Store
from noisewise.privacy.ledger.witness import Seen, Witness
from noisewise.privacy.limit import limit_for
from noisewise.privacy.plan import LocalPlan

__all__ = ["WARN_FROM", "Ledger", "Reservation", "SealedReply"]

_log = logging.getLogger(__name__)

WARN_FROM = 0.8
"""Share of the budget from which on every reservation is logged as a warning."""

Clock = Callable[[], datetime]


@dataclass(frozen=True)
class Reservation:
    """Leave to train once. It is charged, whatever becomes of it."""

    ledger_id: str
    seq: int
    instruction: str
    charge: Charge
    hash: str


@dataclass(frozen=True)
class SealedReply:
    """The stored answer to an instruction that was answered before: the same bytes, no charge."""

    reservation: int
    reply: bytes


def _now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """The spending of one dataset, shared by all federations that the dataset takes part in.

    Use `create` once and `open` from then on; several processes and threads may use one file.
    Every doubt is a `LedgerError` and grants nothing.

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

    def __init__(
        self,
        path: str | Path,
        *,
        writable: bool = True,
        keep_replies: int | None = None,
        clock: Clock = _now,
    ) -> None:
        """Use `open`, which checks whose ledger it is, or `inspect`."""
        if keep_replies is not None:
            positive_int("keep_replies", keep_replies)
        self._keep, self._clock, self._writable = keep_replies, clock, writable
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

    # ------------------------------------------------------------ making and opening

    @staticmethod
    def create(
        path: str | Path,
        budget: PrivacyBudget,
        dataset_id: str,
        accountant: str = DEFAULT_ACCOUNTANT,
        *,
        clock: Clock = _now,
    ) -> None:
        """Make an empty ledger: once for each dataset, by a person, never by a client.

        Raises:
            LedgerError: a ledger stands there already, or stood there.
        """
        if accountant not in ACCOUNTANTS:
            allowed = f"must be one of {', '.join(ACCOUNTANTS)}"
            raise InvalidValueError("accountant", accountant, allowed)
        if (
            not isinstance(dataset_id, str)
            or not dataset_id.strip()
            or not dataset_id.isprintable()
        ):
            raise InvalidValueError("dataset_id", dataset_id, "must be a printable name")
        header = Header(
            secrets.token_hex(16),
            dataset_id,
            PrivacyBudget(float(budget.epsilon), float(budget.delta)),
            accountant,
            _text(clock()),
            f"noisewise {__version__}",
        )
        place = Path(path).resolve()
        witness = Witness(place)
        Store.create(place, header, lambda: witness.create(header.ledger_id, header.digest()))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        dataset_id: str,
        budget: PrivacyBudget,
        accountant: str | None = None,
        keep_replies: int | None = None,
        clock: Clock = _now,
    ) -> Ledger:
        """Open the ledger of this dataset and budget, after checking every entry.

        Args:
            path: of a ledger that `create` made.
            dataset_id: as it was created with.
            budget: as it was created with.
            accountant: as it was created with; None takes the ledger's.
            keep_replies: store only the latest so many replies. An instruction whose reply is gone
                is charged anew. None keeps all.
            clock: the time, which is noted for people and decides nothing.

        Raises:
            LedgerError: missing, corrupt, or another dataset's or budget's.
        """
        ledger = cls(path, keep_replies=keep_replies, clock=clock)
        header = ledger.header
        wanted: dict[str, tuple[object, object]] = {
            "dataset_id": (dataset_id, header.dataset_id),
            "epsilon": (float(budget.epsilon), header.budget.epsilon),
            "delta": (float(budget.delta), header.budget.delta),
            "accountant": (accountant or header.accountant, header.accountant),
        }
        for field, (expected, found) in wanted.items():
            if expected != found:
                ledger.close()
                raise LedgerError(
                    f"{ledger.path} is a foreign ledger: {field} = {found!r}, expected {expected!r}"
                )
        return ledger

    @classmethod
    def inspect(cls, path: str | Path) -> Ledger:
        """Open any ledger to look at; it grants nothing."""
        return cls(path, writable=False)

    def close(self) -> None:
        """Let go of the file."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------ reserve and seal

    def reserve(
        self, instruction: str, cost: LocalPlan | Charge, *, at_most: int | None = None
    ) -> Reservation | SealedReply:
        """Ask for leave to carry out an instruction; charged, durably, before this returns.

        Args:
            instruction: hash of the whole instruction, see `instruction_hash`.
            cost: the plan of which one round is to be trained, or a charge.
            at_most: so many entries that cost the same are granted in all, whatever the budget
                allows; those that gave no reply count. None leaves it to the budget.

        Returns:
            The stored reply if this instruction was answered before. Else a reservation: an
            instruction that was reserved and never sealed is charged anew.

        Raises:
            BudgetSpentError: it does not fit into the budget, or ``at_most`` are granted already.
            LedgerError: the ledger cannot be trusted or written, or no accountant answers for the
                cost (bounds: sample_rate from 1e-6, at most 10^8 steps in all, at most 64 kinds of
                (sample_rate, noise_multiplier) with ``pld``).
            InvalidValueError: ``instruction`` or ``cost`` is none.
        """
        check_hash("instruction", instruction)
        charge = charge_of(cost)
        with self._lock:
            self._refresh()
            stored = self._stored(charge.purpose, instruction)
            if stored is not None:
                return stored
            self._check_fits(charge)  # outside of the transaction: accounting takes its time
            with self._appending() as append:
                stored = self._stored(charge.purpose, instruction)
                if stored is not None:
                    return stored
                self._check_fits(charge)
                self._check_number(charge, at_most)
                before = dict(self._history.counts)
                event = append(instruction=instruction, charge=charge)
            self._warn(before, charge)
        return Reservation(self.header.ledger_id, event.seq, instruction, charge, event.hash)

    def seal(self, reservation: Reservation, reply: bytes) -> bytes:
        """Store a finished reply durably and return it: only what this returns may leave the site.

        Raises:
            LedgerError: the reservation is not this ledger's, or was sealed with another reply.
        """
        if not isinstance(reply, bytes):
            raise InvalidValueError("reply", type(reply).__name__, "must be bytes")
        digest = hashlib.sha256(reply).hexdigest()
        with self._lock, self._appending() as append:
            known = self._history.reservations.get(reservation.seq)
            if (
                known is None
                or known.hash != reservation.hash
                or reservation.ledger_id != self.header.ledger_id
            ):
                raise LedgerError(f"{self.path}: reservation {reservation.seq} is not in it")
            sealed = self._history.seals.get(reservation.seq)
            if sealed is not None:
                if sealed.reply_sha256 == digest:
                    return reply
                raise LedgerError(
                    f"{self.path}: reservation {reservation.seq} was sealed with another reply"
                )
            append(
                instruction=known.instruction,
                reservation=reservation.seq,
                reply_sha256=digest,
                reply_size=len(reply),
                reply=reply,
            )
            if self._keep is not None:
                self._store.forget_replies(self._keep)
        return reply

    def statement(self) -> Statement:
        """What was promised, what is spent and what left the site, computed from the entries."""
        with self._lock:
            self._refresh()
            kept = frozenset(self._store.replies_kept())
            with self._accounting():
                return make_statement(self.header, self._history, self._limit, kept, str(self.path))

    def room(self, cost: LocalPlan | Charge, *, at_most: int) -> int:
        """How many more times `reserve` would grant this now, if it were asked for nothing else."""
        charge = charge_of(cost)
        with self._lock:
            self._refresh()
            counts, number = dict(self._history.counts), self._history.granted[charge]
        with self._accounting():
            fits = self._limit.room(
                counts, charge.sample_rate, charge.noise_multiplier, charge.steps
            )
        return max(0, min(fits, at_most - number))

    # ------------------------------------------------------------ inner parts

    def _refresh(self) -> None:
        """Read and check what other processes added since."""
        seen = self._witness.read()  # before the database: it never knows more
        history = self._history
        if history.seq and self._store.hash_of(history.seq) != history.head:
            raise LedgerError(f"{self.path}: entry {history.seq} was changed since it was read")
        try:
            history.extend(self._store.events(after=history.seq))
        except LedgerError as error:
            raise LedgerError(f"{self.path}: {error}") from error
        self._witness.check(seen, self.header.ledger_id, history)

    def _stored(self, purpose: str, instruction: str) -> SealedReply | None:
        for reservation in self._history.sealed_for(purpose, instruction):
            reply = self._store.reply(reservation)
            if reply is None:
                continue  # no longer kept
            if hashlib.sha256(reply).hexdigest() != self._history.seals[reservation].reply_sha256:
                raise LedgerError(f"{self.path}: the stored reply {reservation} was changed")
            return SealedReply(reservation, reply)
        return None

    def _check_number(self, charge: Charge, at_most: int | None) -> None:
        if at_most is not None and self._history.granted[charge] >= at_most:
            what = "rounds of this plan" if charge.purpose == "training" else "noised figures"
            raise BudgetSpentError(
                f"{self.path}: all {at_most} {what} that the site allows are charged, whatever "
                "is left of the budget; nothing was reserved"
            )

    def _check_fits(self, charge: Charge) -> None:
        cost = (charge.sample_rate, charge.noise_multiplier, charge.steps)
        counts, budget = self._history.counts, self.header.budget
        accountant = self.header.accountant
        with self._accounting():
            if self._limit.allows(counts, *cost):
                return
            after = composed_epsilon(add_steps(counts, *cost), budget.delta, accountant)
        raise BudgetSpentError(
            f"{self.path}: the budget does not allow {charge.steps} more steps at z = "
            f"{charge.noise_multiplier:g}, q = {charge.sample_rate:g}: they would make epsilon "
            f"{after:.6g} of {budget.epsilon:g} (delta {budget.delta:g}, {accountant}); "
            "nothing was reserved"
        )

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        """Whatever an accountant cannot answer is one line, and nothing is granted."""
        try:
            yield
        except (AccountingError, ArithmeticError, ValueError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise LedgerError(f"{self.path}: {reason}; nothing was reserved") from error

    @contextmanager
    def _appending(self) -> Iterator[Callable[..., Event]]:
        """A transaction for one event; when it ends, the event is durable and witnessed."""
        if not self._writable:
            raise LedgerError(f"{self.path} was opened to look at; it grants nothing")
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
        cost = (charge.sample_rate, charge.noise_multiplier, charge.steps)
        with self._accounting():
            early = self._warning.allows(before, *cost)
        if not early:
            budget = self.header.budget
            _log.warning(
                "%s: at least %.0f %% of epsilon = %g (delta %g) is spent",
                self.path,
                100 * WARN_FROM,
                budget.epsilon,
                budget.delta,
            )


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
