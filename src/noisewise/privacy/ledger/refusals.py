"""Why a site did not take part: the last refusals, in a small file next to the ledger.

A refusal tells the server only "not taking part". The reason stays at the site, in a separate file
that can be read even if the ledger is missing or damaged. No decision depends on this file.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from noisewise.errors import InvalidValueError, LedgerError
from noisewise.text import printable

__all__ = ["Refusal", "note_refusal", "read_refusals", "refusals_file"]

_KEPT = 50
_LONGEST = 600
_LARGEST_FILE = 128 * 1024

_REMEDIES = {
    "BudgetSpentError": "The budget allows no further round, so the site no longer takes part. "
    "Nothing needs to be repaired; `noisewise ledger show` prints what is spent.",
    "LedgerError": "Run `noisewise ledger verify` on this ledger; restore the ledger and its "
    "witness together if they are damaged.",
    "AccountingError": "Change the plan in the site's file; `noisewise flower check` tests it.",
    "InvalidValueError": "The message names the value and what is allowed. If the value is in the "
    "site's file, correct it and run `noisewise flower check`; if the server sent it, ask the "
    "server's operator.",
    "UnsupportedModelError": "Use the model that the message names.",
}
_OTHER = "An error in the software or on this machine; the client's log has the details."


@dataclass(frozen=True)
class Refusal:
    """One refusal.

    Attributes:
        time: in UTC.
        round: the server's round; None if it is unknown.
        kind: class of the error.
        reason: message of the error, printable.
        remedy: what the site can do.
    """

    time: str
    round: int | None
    kind: str
    reason: str
    remedy: str


def refusals_file(beside: str | Path) -> Path:
    """The path of the file with the refusals of a ledger, or of a site's file."""
    path = Path(beside)
    return path.with_name(path.name + "-refusals")


def note_refusal(
    beside: str | Path, reason: BaseException | str, *, round_number: int | None = None
) -> None:
    """Record why the site does not take part. It never raises and never waits for the disk.

    The file keeps at most the latest 50 refusals, each of at most 600 characters.

    Args:
        beside: path of the ledger; path of the site's file if that could not be read.
        reason: the error, or a text.
        round_number: the server's round.
    """
    try:
        kind = type(reason).__name__ if isinstance(reason, BaseException) else ""
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "round": round_number if type(round_number) is int else None,
            "kind": kind,
            "reason": printable(str(reason) or kind)[:_LONGEST],
        }
        _append(refusals_file(beside), json.dumps(entry))
    except Exception:  # the site refuses in any case, with or without this record
        return


def _append(path: Path, line: str) -> None:
    """Append in one write, so that processes can share the file; shorten a long file first."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size > _LARGEST_FILE:
            _shorten(path)
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o600)
        # A line break comes first too: if the last line is incomplete, this line is still separate.
        os.write(descriptor, f"\n{line}\n".encode())
    finally:
        os.close(descriptor)


def _shorten(path: Path) -> None:
    latest = _lines(path)[-_KEPT // 2 :]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, "".join(f"{line}\n" for line in latest).encode())
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(path: Path) -> list[str]:
    """The last lines of the file, from a bounded part of it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return []
        size = os.fstat(descriptor).st_size
        file.seek(max(0, size - 2 * _LARGEST_FILE))
        content = file.read(2 * _LARGEST_FILE)
    lines = content.decode(errors="replace").split("\n")
    return [line for line in lines if line.strip()][-_KEPT:]


def read_refusals(beside: str | Path, last: int = 1) -> tuple[Refusal, ...]:
    """Read the latest refusals, the newest first; invalid lines are skipped.

    Args:
        beside: path of the ledger, or of the site's file.
        last: the largest number of refusals to return.

    Returns:
        The refusals; none if there is no file.

    Raises:
        InvalidValueError: ``last`` is below 1.
        LedgerError: the file exists and cannot be read.
    """
    if last < 1:
        raise InvalidValueError("last", last, "must be at least 1")
    path = refusals_file(beside)
    try:
        lines = _lines(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
    refusals = [refusal for line in lines if (refusal := _parsed(line)) is not None]
    return tuple(refusals[: -last - 1 : -1])


def _parsed(line: str) -> Refusal | None:
    try:
        entry = json.loads(line)
        number, kind = entry["round"], printable(str(entry["kind"]))[:100]
        return Refusal(
            time=printable(str(entry["time"]))[:40],
            round=number if type(number) is int else None,
            kind=kind,
            reason=printable(str(entry["reason"]))[:_LONGEST],
            remedy=_REMEDIES.get(kind, _OTHER),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
