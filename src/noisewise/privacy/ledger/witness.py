"""A second file that remembers how far a ledger had come: a database put back from a copy shows.

The witness is written after every commit and before anything is granted or returned, and read
before the database is. So the database is never behind it, unless someone restored an older one,
lost its write-ahead log or put a fresh one in its place. Two slots are written in turn: a power cut
in the middle of a write spoils one of them at most.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from noisewise.errors import LedgerError
from noisewise.privacy.ledger.chain import History

__all__ = ["Seen", "Witness"]

_SLOT = 512  # what disks write at once
_LINE = re.compile(
    rb"noisewise-ledger-witness 1 ([0-9a-f]{32}) ([0-9]{20}) ([0-9a-f]{64}) ([0-9a-f]{16})\n"
)


@dataclass(frozen=True)
class Seen:
    """The last event that a witness saw: its number and hash."""

    ledger_id: str
    seq: int
    hash: str


class Witness:
    """The witness of one ledger file, at the same path with ``-witness`` appended."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + "-witness")

    def create(self, ledger_id: str, head: str) -> None:
        """Make the file; one that never saw an event may be replaced."""
        slots = self._slots(self._bytes()) if self.path.exists() else []
        latest = max((seen.seq for seen in slots), default=0)
        if latest > 0:
            raise LedgerError(
                f"{self.path} has seen {latest} events of a ledger that is gone: a new ledger in "
                "its place would forget what is spent; restore the old one, or remove the witness "
                "by hand if that dataset exists no more"
            )
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            line = _encode(Seen(ledger_id, 0, head))
            os.pwrite(descriptor, line * 2, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> Seen:
        """The latest event that was seen.

        Raises:
            LedgerError: the file is missing or spoilt.
        """
        slots = self._slots(self._bytes())
        if not slots:
            raise LedgerError(f"{self.path} is corrupt; restore it together with the ledger")
        return max(slots, key=lambda seen: seen.seq)

    def record(self, seen: Seen, *, durable: bool) -> None:
        """Note an event that is committed, in place of the older of the two noted ones.

        Args:
            seen: the event.
            durable: whether to wait for the disk: for charges. A seal that the witness loses in a
                power cut could at most be charged again.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                content = os.pread(descriptor, 2 * _SLOT, 0)
                noted = [self._slots(content[place : place + _SLOT]) for place in (0, _SLOT)]
                numbers = [slots[0].seq if slots else -1 for slots in noted]
                if max(numbers) < seen.seq:  # else a process that committed later was quicker
                    place = _SLOT * numbers.index(min(numbers))
                    if os.pwrite(descriptor, _encode(seen), place) != _SLOT:
                        raise OSError("short write")
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be written: {error}; nothing is granted"
            ) from error

    def check(self, seen: Seen, ledger_id: str, history: History) -> None:
        """Compare what was seen with the database, which must have been read later.

        Raises:
            LedgerError: the witness belongs to another ledger, or the database lacks what it saw.
        """
        if seen.ledger_id != ledger_id:
            raise LedgerError(f"{self.path} belongs to another ledger ({seen.ledger_id})")
        if seen.seq > history.seq or history.hashes[seen.seq] != seen.hash:
            raise LedgerError(
                f"the ledger went back in time: its witness saw {seen.seq} events, the database "
                f"holds {min(seen.seq, history.seq)} of them; an old copy was put back or its "
                "write-ahead log (-wal) was lost. What was spent since is unknown: refused"
            )

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be read ({error.strerror}); it belongs to the ledger: keep "
                "and restore the two together"
            ) from error

    @staticmethod
    def _slots(content: bytes) -> list[Seen]:
        found = []
        for start in (0, _SLOT):
            match = _LINE.match(content[start : start + _SLOT])
            if match is not None:
                seen = Seen(match[1].decode(), int(match[2]), match[3].decode())
                if _encode(seen) == content[start : start + _SLOT]:
                    found.append(seen)
        return found


def _encode(seen: Seen) -> bytes:
    text = f"noisewise-ledger-witness 1 {seen.ledger_id} {seen.seq:020d} {seen.hash} "
    check = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text}{check}\n".encode().ljust(_SLOT, b"\n")
