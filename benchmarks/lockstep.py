"""Time several methods on softmax regression in one process: in lock step and one after the other.

    python benchmarks/lockstep.py [--rounds 5]

Each way is timed three times, alternately. The output is the medians and their ratio. Requires
MNIST.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from noisewise.experiments.config import MethodConfig, load_config
from noisewise.experiments.runner import find_methods, run
from noisewise.federation.executors import one_thread
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Time both ways and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each run")
    rounds = parser.parse_args().rounds
    fields = {"training.rounds": rounds, "population.planned_rounds": 100}
    config = load_config(ROOT / "configs" / "study" / "softmax_iid.toml", fields)
    methods = find_methods(config)
    for method in methods:
        run(config, method)  # fills the cache of calibrations

    def play(method: MethodConfig) -> Callable[[MakeExecutor], RunResult]:
        return lambda make: run(config, method, executor=make)

    times: dict[str, list[float]] = {"one by one": [], "lock step": []}
    with one_thread():
        for _ in range(3):
            for name, seconds in times.items():
                start = time.perf_counter()
                if name == "lock step":
                    in_lock_step([play(method) for method in methods])
                else:
                    for method in methods:
                        run(config, method)
                seconds.append(time.perf_counter() - start)
    one_by_one, lock_step = (statistics.median(seconds) / rounds for seconds in times.values())
    print(f"{len(methods)} methods, seconds per round including preparation, median of 3:")
    ratio = one_by_one / lock_step
    print(f"  one by one {one_by_one:.2f}, lock step {lock_step:.2f}, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
