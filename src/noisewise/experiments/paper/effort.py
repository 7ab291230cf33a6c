"""What the training behind an artefact took, and which code did it: a record beside each run.

A run may be trained in several sittings, by several calls and long before the artefact is written,
so the time of the call that writes it says nothing about the training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noisewise.experiments.paper.provenance import code_name
from noisewise.federation.results import to_json
from noisewise.storage import write_atomic

__all__ = [
    "Effort",
    "duration",
    "read_run_effort",
    "read_update_effort",
    "recorded",
    "write_update_effort",
]

_RECORD = "made.json"
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Effort:
    """Training, summed over what was trained.

    Attributes:
        count: of runs, or of first rounds.
        seconds: wall time from before the first round to after the last, run by run; runs side by
            side count in full.
        complete: False where some of it was not recorded: then ``seconds`` are a lower bound.
        code: commits (or versions) that trained; ``unknown`` where that was not recorded.

    Example:
        >>> both = Effort(1, 60.0, True, ("a",)) + Effort(1, 30.0, True, ("b",))
        >>> both.count, both.seconds, both.code
        (2, 90.0, ('a', 'b'))
    """

    count: int = 0
    seconds: float = 0.0
    complete: bool = True
    code: tuple[str, ...] = ()

    def __add__(self, other: Effort) -> Effort:
        """Both."""
        return Effort(
            self.count + other.count,
            self.seconds + other.seconds,
            self.complete and other.complete,
            tuple(sorted({*self.code, *other.code})),
        )

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def duration(seconds: float) -> str:
    """A time in words.

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
    """Note in each run's folder what is trained of it meanwhile: rounds, seconds, code.

    An interrupt or an error is noted as well; a killed process leaves its sitting unrecorded, which
    `read_run_effort` notices by the rounds.
    """
    before = {run: (_time(run / "run.json"), _rounds(run)) for run in runs}
    try:
        yield
    finally:
        begun = [run for run in runs if _time(run / "run.json") != before[run][0]]
        code = code_name() if begun else ""
        for run in begun:  # a finished run is only read, and its run.json left alone
            sitting = {
                "code": code,
                "rounds": _rounds(run) - before[run][1],
                "seconds": _last_sitting(run),
            }
            content = to_json([*_sittings(run), sitting], indent=1) + "\n"
            write_atomic(run / _RECORD, content.encode())


def read_run_effort(run: Path) -> Effort:
    """What a run took; if nothing was recorded, its last sitting by the times of its files."""
    sittings = _sittings(run)
    if not sittings:
        return Effort(1, _last_sitting(run), False, (_UNKNOWN,))
    known = sum(s["rounds"] for s in sittings) >= _rounds(run)
    code = {s["code"] for s in sittings} | (set() if known else {_UNKNOWN})
    return Effort(1, sum(s["seconds"] for s in sittings), known, tuple(sorted(code)))


def write_update_effort(path: Path, seconds: float) -> Effort:
    """Note beside stored first-round updates what they took."""
    content = to_json({"code": code_name(), "seconds": seconds}, indent=1) + "\n"
    write_atomic(path.with_suffix(".json"), content.encode())
    return Effort(1, seconds, True, (code_name(),))


def read_update_effort(path: Path) -> Effort:
    """What stored first-round updates took."""
    try:
        content = json.loads(path.with_suffix(".json").read_text())
        return Effort(1, float(content["seconds"]), True, (str(content["code"]),))
    except (OSError, ValueError, KeyError, TypeError):
        return Effort(1, 0.0, False, (_UNKNOWN,))


def _sittings(run: Path) -> list[dict[str, Any]]:
    """The sittings that were recorded; none if the record is missing or damaged."""
    try:
        found = json.loads((run / _RECORD).read_text())
        return [{k: s[k] for k in ("code", "rounds", "seconds")} for s in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _time(file: Path) -> int:
    """When a file was written [ns]; 0 if it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _last_sitting(run: Path) -> float:
    """Seconds from before a sitting's first round (run.json) to after its last."""
    begun = _time(run / "run.json")
    ended = max(_time(run / name) for name in ("rounds.jsonl", "result.json"))
    return max(0.0, (ended - begun) / 1e9) if begun else 0.0


def _rounds(run: Path) -> int:
    """Rounds that a run has on record."""
    try:
        return (run / "rounds.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
