"""The time and the code of the training behind an artefact, stored with each run.

Training a run may take several sessions, by several calls and long before the artefact is written.
So the time of the call that writes the artefact is not the time of the training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noisewise.paper.provenance import code_name
from noisewise.storage import to_json, write_atomic

__all__ = [
    "TrainingTime",
    "duration",
    "read_run_time",
    "read_update_time",
    "recorded",
    "write_update_time",
]

_RECORD = "made.json"
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrainingTime:
    """Training time, summed over runs or first rounds.

    Attributes:
        count: number of runs, or of first rounds.
        seconds: wall time from before the first round to after the last, added up over the runs,
            also over runs that trained at the same time.
        complete: False if some of the time was not recorded; ``seconds`` is a lower bound then.
        code: commits (or versions) of the code that trained; ``unknown`` if not recorded.

    Example:
        >>> both = TrainingTime(1, 60.0, True, ("a",)) + TrainingTime(1, 30.0, True, ("b",))
        >>> both.count, both.seconds, both.code
        (2, 90.0, ('a', 'b'))
    """

    count: int = 0
    seconds: float = 0.0
    complete: bool = True
    code: tuple[str, ...] = ()

    def __add__(self, other: TrainingTime) -> TrainingTime:
        """Add the times of both."""
        return TrainingTime(
            self.count + other.count,
            self.seconds + other.seconds,
            self.complete and other.complete,
            tuple(sorted({*self.code, *other.code})),
        )

    def data(self) -> dict[str, Any]:
        """Return the fields as data for JSON."""
        return asdict(self)


def duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration(45), duration(5040), duration(3.04e8)
        ('45 s', '84 min', '9.63 years')
    """
    years = seconds / (365.25 * 86_400)
    if years >= 2:
        return f"{years:,.0f} years" if years >= 100 else f"{years:.3g} years"
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds >= 1 else "1 s"


@contextmanager
def recorded(runs: Sequence[Path]) -> Iterator[None]:
    """Record in each run's folder the training inside the ``with`` block: rounds, seconds, code.

    Training that ends by an interrupt or an error is recorded as well. A killed process leaves its
    session unrecorded; `read_run_time` notices that from the number of rounds.
    """
    before = {run: (_time(run / "run.json"), _rounds(run)) for run in runs}
    try:
        yield
    finally:
        started = [run for run in runs if _time(run / "run.json") != before[run][0]]
        code = code_name() if started else ""
        for run in started:  # a finished run is only read, so its run.json does not change
            session = {
                "code": code,
                "rounds": _rounds(run) - before[run][1],
                "seconds": _last_session(run),
            }
            content = to_json([*_sessions(run), session], indent=1) + "\n"
            write_atomic(run / _RECORD, content.encode())


def read_run_time(run: Path) -> TrainingTime:
    """Return the training time of a run.

    If nothing was recorded, it is the time of the last session, from the times of the run's files.
    """
    sessions = _sessions(run)
    if not sessions:
        return TrainingTime(1, _last_session(run), False, (_UNKNOWN,))
    complete = sum(s["rounds"] for s in sessions) >= _rounds(run)
    code = {s["code"] for s in sessions} | (set() if complete else {_UNKNOWN})
    return TrainingTime(1, sum(s["seconds"] for s in sessions), complete, tuple(sorted(code)))


def write_update_time(path: Path, seconds: float) -> TrainingTime:
    """Record the training time of stored first-round updates, in a file next to them."""
    content = to_json({"code": code_name(), "seconds": seconds}, indent=1) + "\n"
    write_atomic(path.with_suffix(".json"), content.encode())
    return TrainingTime(1, seconds, True, (code_name(),))


def read_update_time(path: Path) -> TrainingTime:
    """Return the training time of stored first-round updates."""
    try:
        content = json.loads(path.with_suffix(".json").read_text())
        return TrainingTime(1, float(content["seconds"]), True, (str(content["code"]),))
    except (OSError, ValueError, KeyError, TypeError):
        return TrainingTime(1, 0.0, False, (_UNKNOWN,))


def _sessions(run: Path) -> list[dict[str, Any]]:
    """The recorded sessions; none if the record is missing or damaged."""
    try:
        sessions = json.loads((run / _RECORD).read_text())
        return [{k: s[k] for k in ("code", "rounds", "seconds")} for s in sessions]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _time(file: Path) -> int:
    """When a file was written [ns]; 0 if it is missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _last_session(run: Path) -> float:
    """Seconds from before the last session's first round (run.json) to after its last round."""
    start = _time(run / "run.json")
    end = max(_time(run / name) for name in ("rounds.jsonl", "result.json"))
    return max(0.0, (end - start) / 1e9) if start else 0.0


def _rounds(run: Path) -> int:
    """Number of rounds in a run's record."""
    try:
        return (run / "rounds.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
