"""`RoundTime`: when each round of a run began and ended, in ``times.jsonl`` of the run's folder.

The times are not in ``rounds.jsonl``: the same run gives the same records at any time of day.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from noisewise.storage import to_json, writing

__all__ = ["TIMES_FILE", "RoundTime", "append_time", "read_times"]

TIMES_FILE = "times.jsonl"


@dataclass(frozen=True)
class RoundTime:
    """When a round took place.

    Attributes:
        round: counted from 1.
        began: seconds since 1970 (UTC), when the previous round ended or the run was (re)started.
        ended: seconds since 1970 (UTC), when the round's record was written.
    """

    round: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Wall-clock time of the round, with waiting and evaluation; at least 0."""
        return max(0.0, self.ended - self.began)


def append_time(folder: Path, time: RoundTime) -> None:
    """Append the time of a round to the run's folder.

    Raises:
        DiskFullError: the disk is full.
    """
    file = folder / TIMES_FILE
    with writing(file), open(file, "a", encoding="utf-8") as out:
        out.write(to_json(asdict(time)) + "\n")


def read_times(folder: Path) -> tuple[RoundTime, ...]:
    """Return the times of a run's rounds in order; a round that was repeated has its last time.

    Lines that cannot be read are left out. Runs of older versions have no times.
    """
    times: dict[int, RoundTime] = {}
    try:
        lines = (folder / TIMES_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            fields = json.loads(line)
            time = RoundTime(int(fields["round"]), float(fields["began"]), float(fields["ended"]))
        except (ValueError, KeyError, TypeError):
            continue
        if math.isfinite(time.began) and math.isfinite(time.ended):
            times[time.round] = time
    return tuple(times[number] for number in sorted(times))
