"""A live view of training: bars in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

from noisewise.experiments.runner import Job
from noisewise.federation.results import RoundRecord
from noisewise.text import printable

__all__ = ["ComparisonDisplay", "comparison_display", "run_display"]

_SECONDS_BETWEEN_LINES = 10.0
_WINDOW = 10  # rounds of each job that the time left is judged by
_RUSH = 0.01  # of the longest pause: rounds that follow each other faster were not trained now


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


def _note(record: RoundRecord) -> str:
    """What a round brought: accuracy, and the aggregate's noise as a multiple of the oracle's."""
    parts = []
    if record.accuracy is not None:
        parts.append(f"accuracy {100 * record.mean_accuracy:.1f} %")
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
    """How long the rest takes, by the last steps.

    The stored rounds of a resumed run come all at once and say nothing about those to be trained:
    a window that begins with such a rush is read from the first real pause on.
    """

    def __init__(self, window: int) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def left(self, done: int, total: int) -> str:
        """Note that `done` of `total` steps are over; the time left, empty while unknown."""
        self._seen.append((time.monotonic(), done))
        times, counts = zip(*self._seen, strict=True)
        pauses = [after - before for before, after in pairwise(times)]
        longest = max(pauses, default=0.0)
        if done >= total or longest <= 0:
            return ""
        first = next(i for i, pause in enumerate(pauses) if pause > _RUSH * longest)
        pace = (times[-1] - times[first]) / (counts[-1] - counts[first])
        return f"about {_clock(pace * (total - done))} left"


@dataclass
class ComparisonDisplay:
    """Shows the rounds of all jobs of a comparison: one bar for the whole, one for each that runs.

    Attributes:
        jobs: all jobs.
        rounds: of each.
        bars: of a terminal; None prints lines.
        quiet: show nothing.
        title: of the whole.
    """

    jobs: Sequence[Job]
    rounds: int
    bars: Progress | None
    quiet: bool
    title: str = "training"
    _done: int = 0
    _last_line: float = field(default_factory=lambda: time.monotonic())
    _tasks: dict[str, TaskID] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)
    _paces: dict[str, _Pace] = field(default_factory=dict)

    def planning(self, done: int, total: int) -> None:
        """Budgets are being turned into noise."""
        self._show("planning budgets", done, total, "")

    def on_round(self, job: Job, record: RoundRecord) -> None:
        """A round of some job is over."""
        self._done += 1
        name = printable(f"{job.label}, seed {job.seed}")
        # Rounds without an evaluation keep the last accuracy in view.
        self._notes[name] = note = _note(record) if record.accuracy else self._notes.get(name, "")
        total = len(self.jobs) * self.rounds
        if self.bars is None or len(self.jobs) == 1:
            words = f"{name}: round {record.round}" + (f", {note}" if note else "")
            self._show(self.title, self._done, total, words)
            return
        self._show(self.title, self._done, total, "")
        self._bar(f"  {name}", record.round, self.rounds, note)
        if record.round == self.rounds:
            self.bars.update(self._tasks[f"  {name}"], visible=False)

    def _left(self, what: str, done: int, total: int) -> str:
        window = _WINDOW * max(1, total // self.rounds)  # one job's steps or those of all
        return self._paces.setdefault(what, _Pace(window)).left(done, total)

    def _bar(self, what: str, done: int, total: int, note: str) -> None:
        assert self.bars is not None
        left = self._left(what, done, total)
        if what not in self._tasks:
            self._tasks[what] = self.bars.add_task(what, total=total, note=note, left=left)
        self.bars.update(self._tasks[what], completed=done, note=note, left=left)

    def _show(self, what: str, done: int, total: int, note: str) -> None:
        if self.quiet:
            return
        what = printable(what)
        if self.bars is not None:
            self._bar(what, done, total, note)
            return
        left = self._left(what, done, total)
        if done == total or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            words = f"{what}: {done} of {total} {note}".rstrip()
            print("; ".join(part for part in (words, left) if part), file=sys.stderr, flush=True)


@contextlib.contextmanager
def comparison_display(
    jobs: Sequence[Job],
    rounds: int,
    *,
    quiet: bool = False,
    title: str = "training",
    console: Console | None = None,
) -> Iterator[ComparisonDisplay]:
    """A display for the time of a comparison; plain lines where there is no terminal."""
    console = console or Console(stderr=True)
    if quiet or not console.is_terminal:
        yield ComparisonDisplay(jobs, rounds, None, quiet, title)
        return
    with _bars(console) as bars:
        yield ComparisonDisplay(jobs, rounds, bars, quiet, title)


@contextlib.contextmanager
def run_display(
    job: Job, rounds: int, *, quiet: bool = False
) -> Iterator[Callable[[RoundRecord], None]]:
    """The same for a single run."""
    with comparison_display([job], rounds, quiet=quiet) as display:
        yield lambda record: display.on_round(job, record)
