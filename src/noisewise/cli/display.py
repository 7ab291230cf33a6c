"""Progress of training: bars in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from itertools import pairwise

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

from noisewise.federation.round_record import RoundRecord
from noisewise.federation.task_info import TaskInfo
from noisewise.text import printable
from noisewise.training.metrics import MetricInfo

__all__ = ["TrainingDisplay"]

_SECONDS_BETWEEN_LINES = 10.0
_WINDOW = 10  # rounds of each run from which the remaining time is estimated
_RUSH = 0.01  # of the longest pause: rounds that follow each other faster were read, not trained


def _note(record: RoundRecord, metric: MetricInfo) -> str:
    """The main metric after a round, and the aggregate's noise as a multiple of the oracle's."""
    parts = []
    if record.by_client(metric.name):
        parts.append(f"{metric.name} {metric.text(record.figure(metric.name))}")
    if record.noise_ratio > 0 and math.isfinite(record.noise_ratio):
        parts.append(f"noise {record.noise_ratio:.2f} x oracle's")
    if record.train_loss is not None and not math.isfinite(record.mean_train_loss):
        parts.append("diverged")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Pace:
    """Estimates the remaining time from the last steps.

    The stored rounds of a resumed run arrive all at once and say nothing about the time of rounds
    that are trained, so the estimate starts at the first real pause.
    """

    def __init__(self, window: int) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def left(self, done: int, total: int) -> str:
        """Record that `done` of `total` steps are done; return the time left, empty if unknown."""
        self._seen.append((time.monotonic(), done))
        times, counts = zip(*self._seen, strict=True)
        pauses = [after - before for before, after in pairwise(times)]
        longest = max(pauses, default=0.0)
        if done >= total or longest <= 0:
            return ""
        first = next(i for i, pause in enumerate(pauses) if pause > _RUSH * longest)
        pace = (times[-1] - times[first]) / (counts[-1] - counts[first])
        return f"about {_clock(pace * (total - done))} left"


class TrainingDisplay:
    """Shows comparisons while they run: one bar for all runs, and one for each that is training.

    It is the `progress` of `noisewise.compare`. Without a terminal it prints lines instead.

    Args:
        quiet: show nothing but the titles of a sweep's comparisons.
        console: where bars go; by default stderr.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet, self._console = quiet, console or Console(stderr=True)
        self._last_line = time.monotonic()
        self.bars: Progress | None = None
        self._metric = TaskInfo().main
        self._begin("", 1, 1)

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(self, *details: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def _begin(self, title: str, runs: int, rounds: int) -> None:
        self._title = title.partition(":")[0].replace(" of ", "/") or "training"
        self._runs, self._rounds, self._done = runs, rounds, 0
        self._tasks: dict[str, TaskID] = {}
        self._notes: dict[str, str] = {}
        self._paces: dict[str, _Pace] = {}

    def start(self, title: str, runs: int, rounds: int, metric: MetricInfo | None = None) -> None:
        """Start a comparison; print its title if it has one, as in sweeps."""
        self.__exit__()
        self._metric = metric or TaskInfo().main
        self._begin(title, runs, rounds)
        if title:
            print(printable(title), file=sys.stderr, flush=True)
        if self._console.is_terminal and not self._quiet:
            self.bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
            self.bars.start()

    def planned(self, done: int, total: int) -> None:
        """Show how many plans are made."""
        self._show("planning budgets", done, total, "")

    def on_round(self, method: str, seed: int, record: RoundRecord) -> None:
        """Show that a round of a run has ended."""
        self._done += 1
        name = printable(f"{method}, seed {seed}")
        # Rounds without an evaluation show the last figure.
        note = _note(record, self._metric) if record.evaluated else self._notes.get(name, "")
        self._notes[name] = note
        total = self._runs * self._rounds
        if self.bars is None or self._runs == 1:
            text = f"{name}: round {record.round}" + (f", {note}" if note else "")
            self._show(self._title, self._done, total, text)
            return
        self._show(self._title, self._done, total, "")
        self._bar(f"  {name}", record.round, self._rounds, note)
        if record.round == self._rounds:
            self.bars.update(self._tasks[f"  {name}"], visible=False)

    def _left(self, name: str, done: int, total: int) -> str:
        window = _WINDOW * max(1, total // self._rounds)  # the steps of one run or of all
        return self._paces.setdefault(name, _Pace(window)).left(done, total)

    def _bar(self, name: str, done: int, total: int, note: str) -> None:
        assert self.bars is not None
        left = self._left(name, done, total)
        if name not in self._tasks:
            self._tasks[name] = self.bars.add_task(name, total=total, note=note, left=left)
        self.bars.update(self._tasks[name], completed=done, note=note, left=left)

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if self._quiet:
            return
        if self.bars is not None:
            self._bar(printable(name), done, total, note)
            return
        left = self._left(name, done, total)
        if done == total or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            line = f"{printable(name)}: {done} of {total} {note}".rstrip()
            print("; ".join(part for part in (line, left) if part), file=sys.stderr, flush=True)
