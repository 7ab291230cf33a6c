"""`LogLimit`: a flood of requests can neither fill the disk nor hide what others did.

Every source of lines (a federation, the foreign accounts at its socket, everything else) has its
own count. A line about a charge always passes: the ledger bounds their number.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["CHARGED", "LogLimit", "lines_of"]

_LINES_A_MINUTE = 60
_SOURCE: ContextVar[str] = ContextVar("source", default="")

CHARGED = {"charged": True}
"""`extra` of a line about a charge."""


@contextlib.contextmanager
def lines_of(source: str) -> Iterator[None]:
    """Count the lines of this thread for a source until the block ends."""
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


@dataclass
class _Minute:
    """The lines of one source since the minute began."""

    began: float
    passed: int = 0
    repeats: dict[str, int] = field(default_factory=dict)


class LogLimit(logging.Filter):
    """Lets a bounded number of lines a minute of each source through.

    Of a line that repeats in the same minute, the 1st, 10th, 100th, ... pass, with their number.

    Args:
        lines: a minute of one source.
    """

    def __init__(self, lines: int = _LINES_A_MINUTE) -> None:
        super().__init__()
        self._lines = lines
        self._minutes: dict[str, _Minute] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if getattr(record, "charged", False):
            return True
        source, text, now = _SOURCE.get(), _text(record), time.monotonic()
        with self._lock:
            minute = self._minutes.get(source)
            if minute is None or now - minute.began > 60:
                minute = self._minutes[source] = _Minute(now)
            count = minute.repeats.get(text, 0) + 1
            if count > 1 or len(minute.repeats) < self._lines:
                minute.repeats[text] = count
            if minute.passed >= self._lines or not math.log10(count).is_integer():
                return False
            minute.passed += 1
            last = minute.passed == self._lines
        if count > 1:
            record.msg = f"{record.msg} ({count} times in this minute)"
        if last:
            record.msg = f"{record.msg} (more lines of this minute are left out)"
        return True


def _text(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return f"{record.getMessage()} {error!r}"
