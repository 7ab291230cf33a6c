"""Progress of downloads: a callback, and a bar for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "progress_bar", "silent"]

Progress = Callable[[str, int, int | None], None]
"""Called with (what is being done, amount done, total amount or None if unknown)."""


def silent(what: str, done: int, total: int | None) -> None:
    """Report nothing."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar for each reported task on the error stream, if it is a terminal.

    Example:
        >>> with progress_bar() as report:
        ...     report("mnist", 5, 10)
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with RichProgress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        tasks = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
