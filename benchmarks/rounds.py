"""Time rounds of the paper's MNIST setting (CNN, 20 clients) with one and several processes.

    python benchmarks/rounds.py [--rounds 3] [--workers N] [--accountant pld] [--json FILE]

Both executors compute the same rounds in turn, so a busy machine slows both in the same way. The
table has rounds per minute and the overhead: the share of the time that is not local training.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import table, write_json

from noisewise.experiments.config import load_config
from noisewise.experiments.prepare import prepare
from noisewise.federation.checkpoint import RunFolder, Snapshot
from noisewise.federation.executors import Execution, Workload, one_thread
from noisewise.federation.rounds import Federation, play_round
from noisewise.federation.stopwatch import PARTS, Stopwatch
from noisewise.privacy.spending import epsilon_spent

ROOT = Path(__file__).parents[1]


def measure(repeats: int, workers: int, folder: Path, accountant: str) -> list[dict[str, Any]]:
    config = load_config(ROOT / "configs" / "mnist.toml", {"training.accountant": accountant})
    prepared = prepare(config, "RobustHDP", 0)
    clients, plans, model = tuple(prepared.clients), tuple(prepared.plans), prepared.model
    began = time.perf_counter()
    for plan in plans:
        epsilon_spent(plan, 1)  # computes the spending of all 200 rounds at once
    accounting = (time.perf_counter() - began) / 200  # share of each round
    theta, rate = prepared.initial_parameters, prepared.settings.learning_rate
    workload = Workload(model, torch.nn.functional.cross_entropy, clients, plans, rate, 0)
    start = Snapshot(0, theta, {}, dict.fromkeys([c.spec.id for c in clients], 0))
    names = {"serial": 1, f"processes ({workers})": workers}
    with one_thread():
        sides = {}
        for name, n_workers in names.items():
            executor = Execution(n_workers).start(workload, theta)
            federation = Federation(prepared, executor, Stopwatch(), {})
            federation.executor.evaluate(
                theta, range(len(clients))
            )  # starts the workers and scales the records
            sides[name] = federation, RunFolder(folder / f"{name}", "benchmark")
        snapshots = dict.fromkeys(sides, start)
        for _ in range(repeats):
            for name, (federation, files) in sides.items():
                federation.clock.seconds["accounting"] += accounting
                federation.clock.total += accounting
                with federation.clock.round():
                    members = range(len(clients))
                    snapshots[name], record = play_round(federation, snapshots[name], members)
                    with federation.clock.part("checkpoint"):
                        files.save(snapshots[name], record)
            same = [snapshot.theta for snapshot in snapshots.values()]
            assert all(torch.equal(same[0], other) for other in same), "executors disagree"
        for federation, _ in sides.values():
            federation.executor.close()
    clocks = {name: federation.clock for name, (federation, _) in sides.items()}
    return [
        {
            "executor": name,
            "s a round": clock.total / clock.rounds,
            "rounds a minute": 60 * clock.rounds / clock.total,
            "minutes for 200": 200 * clock.total / clock.rounds / 60,
            "speed-up": clocks["serial"].total / clock.total,
            "overhead %": 100 * clock.overhead,
            **{f"{part} s": clock.seconds[part] / clock.rounds for part in PARTS},
        }
        for name, clock in clocks.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds with each executor")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument("--accountant", default="pld", help="pld, rdp or moments")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/rounds.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.rounds, options.workers, Path(folder), options.accountant)
    print(table(rows))
    write_json(options.json, {"rounds": rows})
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
