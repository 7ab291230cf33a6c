"""Seven methods on softmax regression: in lock step against one after the other, in one process.

    python benchmarks/lockstep.py [--rounds 5]

Both are timed in turn, three times; the table has the medians and their ratio. Needs MNIST.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from noisewise.experiments.comparison import comparison_jobs
from noisewise.experiments.config import load_config
from noisewise.experiments.runner import Job, run
from noisewise.federation.executors import one_thread
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Time both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    fields = {"training.rounds": rounds, "population.planned_rounds": 100}
    config = load_config(ROOT / "configs" / "study" / "softmax_iid.toml", fields)
    jobs = comparison_jobs(config, None, 1)
    for job in jobs:
        run(config, job)  # calibrates every plan

    def play(job: Job) -> Callable[[MakeExecutor], RunResult]:
        return lambda make: run(config, job, executor=make)

    times: dict[str, list[float]] = {"one by one": [], "lock step": []}
    with one_thread():
        for _ in range(3):
            for name, spent in times.items():
                began = time.perf_counter()
                if name == "lock step":
                    in_lock_step([play(job) for job in jobs])
                else:
                    for job in jobs:
                        run(config, job)
                spent.append(time.perf_counter() - began)
    slow, fast = (statistics.median(spent) / rounds for spent in times.values())
    print(f"{len(jobs)} methods, seconds a round with preparation, median of 3:")
    print(f"  one by one {slow:.2f}, lock step {fast:.2f}, ratio {slow / fast:.1f}")


if __name__ == "__main__":
    main()
