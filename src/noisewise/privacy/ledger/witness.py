"""The witness: a second file with a ledger's last event, which detects an older copy of the ledger.

The witness is written after every commit and before a grant or a reply is returned, and it is read
before the database. So the database always has the witness's event, unless someone restored an
older database, lost its write-ahead log or replaced it with a new one. The file has two slots that
are written in turn: a power failure during a write can damage only one of them.
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

_SLOT = 512  # bytes that disks write at once
_LINE = re.compile(
    rb"noisewise-ledger-witness 1 ([0-9a-f]{32}) ([0-9]{20}) ([0-9a-f]{64}) ([0-9a-f]{16})\n"
)


@dataclass(frozen=True)
class Seen:
    """The last event that a witness has recorded: its number and hash."""

    ledger_id: str
    seq: int
    hash: str


class Witness:
    """The witness of one ledger file, at the same path with ``-witness`` appended."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + "-witness")

    def create(self, ledger_id: str, head: str) -> None:
        """Create the file, or replace one that has recorded no event.

        Raises:
            LedgerError: the file has recorded events of another ledger.
        """
        slots = self._slots(self._bytes()) if self.path.exists() else []
        latest = max((seen.seq for seen in slots), default=0)
        if latest > 0:
            raise LedgerError(
                f"{self.path} has recorded {latest} events of a ledger that is missing: a new "
                "ledger would forget what is spent; restore the old ledger, or delete the witness "
                "if the dataset no longer exists"
            )
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            line = _encode(Seen(ledger_id, 0, head))
            os.pwrite(descriptor, line * 2, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> Seen:
        """The latest event that was recorded.

        Raises:
            LedgerError: the file is missing or damaged.
        """
        slots = self._slots(self._bytes())
        if not slots:
            raise LedgerError(f"{self.path} is damaged; restore it together with the ledger")
        return max(slots, key=lambda seen: seen.seq)

    def record(self, seen: Seen, *, durable: bool) -> None:
        """Record a committed event in the slot with the older event.

        Args:
            seen: the event.
            durable: whether to wait for the disk, which charges need. If the witness loses a seal
                in a power failure, the instruction can at most be charged again.

        Raises:
            LedgerError: the file cannot be written.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                content = os.pread(descriptor, 2 * _SLOT, 0)
                recorded = [self._slots(content[start : start + _SLOT]) for start in (0, _SLOT)]
                numbers = [slots[0].seq if slots else -1 for slots in recorded]
                if max(numbers) < seen.seq:  # else another process recorded a later event
                    start = _SLOT * numbers.index(min(numbers))
                    if os.pwrite(descriptor, _encode(seen), start) != _SLOT:
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
        """Compare the recorded event with the database, which must have been read later.

        Raises:
            LedgerError: the witness belongs to another ledger, or the database lacks its event.
        """
        if seen.ledger_id != ledger_id:
            raise LedgerError(f"{self.path} belongs to another ledger ({seen.ledger_id})")
        if seen.seq > history.seq or history.hashes[seen.seq] != seen.hash:
            raise LedgerError(
                f"the ledger lost events: its witness has recorded {seen.seq} events, the database "
                f"has {min(seen.seq, history.seq)} of them. An old copy was restored, or the "
                "write-ahead log (-wal) was lost, so the amount spent is unknown; restore the "
                "latest ledger, its -wal file and its witness together"
            )

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be read ({error.strerror}); it belongs to the ledger: copy "
                "and restore the two files together"
            ) from error

    @staticmethod
    def _slots(content: bytes) -> list[Seen]:
        slots = []
        for start in (0, _SLOT):
            match = _LINE.match(content[start : start + _SLOT])
            if match is not None:
                seen = Seen(match[1].decode(), int(match[2]), match[3].decode())
                if _encode(seen) == content[start : start + _SLOT]:
                    slots.append(seen)
        return slots


def _encode(seen: Seen) -> bytes:
    text = f"noisewise-ledger-witness 1 {seen.ledger_id} {seen.seq:020d} {seen.hash} "
    check = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text}{check}\n".encode().ljust(_SLOT, b"\n")
