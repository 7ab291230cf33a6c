"""`Progress`: how far the runs in a folder are, read while they train. Nothing is written."""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from noisewise.errors import InvalidValueError
from noisewise.federation.checkpoint import is_training
from noisewise.federation.planned_runs import PLAN_FILE, PlannedRun, read_planned_runs
from noisewise.federation.results import RunResult, load_run
from noisewise.federation.round_times import read_times

__all__ = ["Progress", "ProgressReader", "RunProgress", "RunState"]

RunState = Literal["waiting", "starting", "training", "stopped", "silent", "ended", "unreadable"]
"""``silent``: no round ended lately, and the system cannot detect whether a process trains it.
``unreadable``: its files are damaged, larger than 1 GiB or no ordinary files."""

_RUN_FILES = ("run.json", "rounds.jsonl", "result.json")
_DEPTH = 6
_MOST_FOLDERS = 20_000  # in and below the watched folder
_LARGEST = 1 << 30  # bytes of a run's files; larger runs are not read
_WINDOW = 10  # rounds from which the time of a round is estimated
_SILENCE = 60.0  # seconds without a round, or 10 times the time of a round if that is more
_PAUSE = 30.0  # seconds that a comparison may take between two of its runs


@dataclass(frozen=True)
class RunProgress:
    """How far one run is.

    Attributes:
        folder: relative to the watched folder; ``.`` if it is the watched folder.
        method: its name with its options.
        seed: of the run; None if it is not known yet.
        state: whether it waits, trains, has stopped or has ended.
        done: number of rounds that are complete.
        planned: number of rounds of the whole run.
        result: with the rounds so far; None if the run has not begun.
        seconds: time of a round, from the last ones; NaN if unknown.
        changed: when its files changed last, in seconds since 1970 (UTC); NaN if there are none.
    """

    folder: str
    method: str
    seed: int | None
    state: RunState
    done: int
    planned: int
    result: RunResult | None = None
    seconds: float = math.nan
    changed: float = math.nan

    @property
    def seconds_left(self) -> float:
        """Time of the rounds that are left; NaN if unknown."""
        return self.seconds * (self.planned - self.done)


@dataclass(frozen=True)
class Progress:
    """How far all runs in a folder are.

    Attributes:
        runs: in the order of the comparison.
        version: changes whenever a file of a run changes.
        state: ``waiting`` (no run yet), ``training``, ``stopped`` or ``ended``.
        changed: when a file changed last, in seconds since 1970 (UTC); NaN without runs.
        silent: seconds without a round if they are many, else 0.
    """

    runs: tuple[RunProgress, ...]
    version: str
    state: Literal["waiting", "training", "stopped", "ended"]
    changed: float
    silent: float

    @property
    def done(self) -> int:
        """Number of rounds that are complete, in all runs; an ended run counts as complete."""
        return sum(run.planned if run.state == "ended" else run.done for run in self.runs)

    @property
    def planned(self) -> int:
        """Number of rounds of all runs."""
        return sum(run.planned for run in self.runs)

    @property
    def seconds_left(self) -> float:
        """Time until the last run ends, at the present speed; NaN if unknown."""
        training = [run for run in self.runs if run.state == "training"]
        paces = [run.seconds for run in training if run.seconds > 0]
        if self.state != "training" or not paces:
            return math.nan
        rounds_per_second = sum(1 / pace for pace in paces)
        longest = max(run.seconds_left for run in training if run.seconds > 0)
        return max(longest, (self.planned - self.done) / rounds_per_second)


@dataclass
class ProgressReader:
    """Reads the progress of a folder; runs whose files did not change are not read again.

    Args:
        folder: of a run, a comparison, a sweep or a Flower server, or above them. Links in it are
            not followed.
    """

    folder: Path
    _stored: dict[Path, tuple[object, RunResult | None]] = field(default_factory=dict, init=False)

    def read(self, now: float) -> Progress:
        """Return the progress.

        Args:
            now: seconds since 1970 (UTC).

        Raises:
            InvalidValueError: the folder contains too many folders.
        """
        folders = _run_folders(self.folder)
        planned = self._planned_runs(folders)
        runs = [self._read_run(path, planned.get(path), now) for path in folders]
        runs += [
            RunProgress(self._name(path), plan.method, plan.seed, "waiting", 0, plan.rounds)
            for path, plan in planned.items()
            if path not in folders
        ]
        order = {self._name(path): number for number, path in enumerate(planned)}
        runs.sort(key=lambda run: order.get(run.folder, len(order)))
        changed = max((run.changed for run in runs if run.changed == run.changed), default=math.nan)
        files = repr([(path, self._stored[path][0]) for path in folders])
        version = hashlib.sha256(files.encode()).hexdigest()[:16]
        state, silent = _state(runs, changed, now)
        return Progress(tuple(runs), version, state, changed, silent)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _planned_runs(self, folders: Sequence[Path]) -> dict[Path, PlannedRun]:
        """The planned runs of every comparison and sweep in or below the folder."""
        base_folders = {
            self.folder,
            *(up for path in folders for up in _between(path, self.folder)),
        }
        with_plan = (path.parent for path in self.folder.glob(f"*/{PLAN_FILE}"))
        base_folders |= {folder for folder in with_plan if not folder.is_symlink()}
        return {
            base / run.folder: run
            for base in sorted(base_folders)
            for run in read_planned_runs(base)
        }

    def _read_run(self, path: Path, planned: PlannedRun | None, now: float) -> RunProgress:
        result, changed = self._result(path)
        held = is_training(path)
        name = self._name(path)
        if result is None:
            method = planned.method if planned else path.name
            seed, rounds = (planned.seed, planned.rounds) if planned else (None, 0)
            state: RunState = "starting" if held in (True, None) else "stopped"
            if (path / "result.json").exists() or (path / "rounds.jsonl").exists():
                state = "unreadable"
            return RunProgress(name, method, seed, state, 0, rounds, changed=changed)
        last = [time.seconds for time in read_times(path)[-_WINDOW:]]
        seconds = sum(last) / len(last) if last else math.nan
        if (path / "result.json").exists():
            state = "ended"
        elif held is None:
            state = "silent" if now - changed > _patience(seconds) else "training"
        else:
            state = "training" if held else "stopped"
        done = len(result.rounds)
        rounds = result.settings.get("rounds", done)
        return RunProgress(
            name, result.method, result.seed, state, done, rounds, result, seconds, changed
        )

    def _result(self, path: Path) -> tuple[RunResult | None, float]:
        """The run with the rounds so far, None if it is just beginning; and its last change."""
        key, changed = _file_states(path)
        stored = self._stored.get(path)
        if stored is None or stored[0] != key:
            try:
                stored = (key, load_run(path) if key is not None else None)
            except (InvalidValueError, RecursionError):
                stored = (key, None)  # just begun, damaged, or replaced at this moment
            self._stored[path] = stored
        return stored[1], changed


def _file_states(path: Path) -> tuple[object, float]:
    """Sizes and times of a run's files, None if they must not be read; and the latest time."""
    states, changed, readable = [], [], True
    for name in ("", *_RUN_FILES):
        try:
            status = os.stat(path / name)
        except OSError:
            continue
        changed.append(status.st_mtime)
        if not name:
            continue  # the folder itself: other files in it come and go
        states.append((name, status.st_size, status.st_mtime_ns))
        readable &= stat.S_ISREG(status.st_mode)
    readable &= sum(size for _, size, _ in states) <= _LARGEST
    return tuple(states) if readable else None, max(changed, default=math.nan)


def _run_folders(top: Path) -> list[Path]:
    """Run folders in or below a folder, those that are just beginning included.

    Raises:
        InvalidValueError: there are too many folders below it.
    """
    runs, left, n_read = [], [(top, _DEPTH)], 0
    while left:
        folder, depth = left.pop()
        n_read += 1
        if n_read > _MOST_FOLDERS:
            allowed = f"contains more than {_MOST_FOLDERS} folders: choose the folder of the runs"
            raise InvalidValueError("FOLDER", str(top), allowed)
        try:
            with os.scandir(folder) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue  # removed at this moment, or not readable
        if names.keys() & {"run.json", "rounds.jsonl", ".training.lock"}:
            runs.append(folder)
        elif depth:
            below = [name for name in names if names[name] and not name.startswith(".")]
            left += [(folder / name, depth - 1) for name in below]
    return sorted(runs)


def _between(path: Path, top: Path) -> list[Path]:
    """The folders above a run, up to the top."""
    return [up for up in path.parents if up == top or top in up.parents]


def _patience(seconds: float) -> float:
    return max(_SILENCE, 10 * seconds) if seconds == seconds else _SILENCE


def _state(
    runs: Sequence[RunProgress], changed: float, now: float
) -> tuple[Literal["waiting", "training", "stopped", "ended"], float]:
    """The state of all runs, and for how long no round ended if that is long."""
    states = {run.state for run in runs}
    silent = now - changed
    if not runs:
        return "waiting", 0.0
    if states & {"training", "starting"}:
        paces = [run.seconds for run in runs if run.state == "training" and run.seconds > 0]
        return "training", silent if silent > _patience(max(paces, default=math.nan)) else 0.0
    if states <= {"ended", "unreadable"}:
        return "ended", 0.0
    if states == {"waiting"} and math.isnan(changed):
        return "training", 0.0  # plans are made before the first run begins
    if states <= {"ended", "waiting", "unreadable"} and silent < _PAUSE:
        return "training", 0.0  # between two runs
    return "stopped", silent
