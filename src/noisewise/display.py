"""Progress for people: bars in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from noisewise.experiments.runner import Job
from noisewise.federation.results import RoundRecord

__all__ = ["ComparisonDisplay", "comparison_display", "run_display"]

_SECONDS_BETWEEN_LINES = 10.0


def _console() -> Console:
    return Console(stderr=True)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
    )


@dataclass
class ComparisonDisplay:
    """Shows the rounds of all jobs of a comparison."""

    jobs: Sequence[Job]
    rounds: int
    bars: Progress | None
    quiet: bool
    _done: int = 0
    _last_line: float = field(default_factory=time.monotonic)
    _task: int | None = None

    def planning(self, done: int, total: int) -> None:
        """Budgets are being turned into noise."""
        self._show("planning budgets", done, total, "")

    def on_round(self, job: Job, record: RoundRecord) -> None:
        """A round of some job is over."""
        self._done += 1
        note = f"{job.label}, seed {job.seed}: round {record.round}"
        if record.accuracy is not None:
            note += f", accuracy {100 * record.mean_accuracy:.1f} %"
        self._show("training", self._done, len(self.jobs) * self.rounds, note)

    def _show(self, what: str, done: int, total: int, note: str) -> None:
        if self.quiet:
            return
        if self.bars is not None:
            if self._task is None or self.bars.tasks[self._task].description != what:
                self._task = int(self.bars.add_task(what, total=total, note=note))
            self.bars.update(self.bars.task_ids[self._task], completed=done, note=note)
        elif done == total or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{what}: {done} of {total} {note}".rstrip(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def comparison_display(
    jobs: Sequence[Job], rounds: int, *, quiet: bool = False
) -> Iterator[ComparisonDisplay]:
    """A display for the time of a comparison; plain lines where there is no terminal."""
    console = _console()
    if quiet or not console.is_terminal:
        yield ComparisonDisplay(jobs, rounds, None, quiet)
        return
    with _bars(console) as bars:
        yield ComparisonDisplay(jobs, rounds, bars, quiet)


@contextlib.contextmanager
def run_display(
    job: Job, rounds: int, *, quiet: bool = False
) -> Iterator[Callable[[RoundRecord], None]]:
    """The same for a single run."""
    with comparison_display([job], rounds, quiet=quiet) as display:
        yield lambda record: display.on_round(job, record)
