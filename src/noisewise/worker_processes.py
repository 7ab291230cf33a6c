"""Worker processes: how many there can be, and how they end, by their parent or after it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

__all__ = ["available_cores", "end_workers", "follow_parent"]


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def follow_parent() -> None:
    """In a worker: ignore Ctrl-C, and end when the parent process has ended.

    Ctrl-C reaches all processes of a terminal, but the parent ends its workers. A parent that was
    killed cannot end them; they would continue and write at the same time as the workers of a
    resumed run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(target=_end_without, args=(parent.pid,), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool at once, in the middle of its work: checkpoints hold what is done."""
    workers = list((pool._processes or {}).values())  # no public name before Python 3.14
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
