"""A whole round of the paper's MNIST setting (CNN, 20 clients): serial against processes.

Both play the same rounds in turn, within one run, so that a busy machine slows both. Prints a table
with rounds per minute and the share of all that is not local training; writes JSON.
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

from noisewise.aggregation.methods import make_method
from noisewise.aggregation.policy import plan_noise
from noisewise.experiments.config import load_config
from noisewise.experiments.setup import make_initial_model, make_plans, make_population
from noisewise.federation.checkpoint import RunFolder, Snapshot
from noisewise.federation.executors import Workload, make_executor, one_thread
from noisewise.federation.rounds import Federation, play_round
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.timing import PARTS, Stopwatch
from noisewise.privacy.spending import epsilon_spent
from noisewise.training.parameters import ParameterLayout

ROOT = Path(__file__).parents[1]


def measure(repeats: int, workers: int, folder: Path, accountant: str) -> list[dict[str, Any]]:
    config = load_config(ROOT / "configs" / "mnist.toml", {"training.accountant": accountant})
    clients, method = make_population(config, 0), make_method("RobustHDP")
    plans = make_plans(config, clients, method)
    began = time.perf_counter()
    for plan in plans:
        epsilon_spent(plan, 1)  # computes the spending of all 200 rounds, once
    accounting = (time.perf_counter() - began) / 200  # its share of each round
    model, rate = make_initial_model(config, 0), config.training.learning_rate
    theta = ParameterLayout.of(model).flatten(model)
    workload = Workload(model, torch.nn.functional.cross_entropy, clients, plans, rate, 0)
    noise = torch.tensor([plan_noise(p, len(theta), rate) for p in plans]).double().numpy()
    start = Snapshot(0, theta, {}, dict.fromkeys([c.spec.id for c in clients], 0))
    names = {"serial": 1, f"processes ({workers})": workers}
    with one_thread():
        sides = {}
        for name, hands in names.items():
            federation = Federation(
                clients=clients,
                plans=plans,
                method=method,
                settings=TrainingSettings(200, rate),
                seed=0,
                executor=make_executor(workload, hands, theta),
                true_noise=noise,
                reference_noise=noise,
                clock=Stopwatch(),
            )
            federation.executor.evaluate(theta)  # workers start and records are scaled
            sides[name] = federation, RunFolder(folder / f"{name}", "benchmark")
        snapshots = dict.fromkeys(sides, start)
        for _ in range(repeats):
            for name, (federation, files) in sides.items():
                federation.clock.seconds["accounting"] += accounting
                federation.clock.total += accounting
                with federation.clock.round():
                    outcome = play_round(federation, snapshots[name], range(len(clients)))
                    with federation.clock.part("checkpoint"):
                        files.save(outcome.snapshot, outcome.record)
                snapshots[name] = outcome.snapshot
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each executor")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--accountant", default="pld", help="pld, rdp or moments")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/rounds.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.rounds, options.workers, Path(folder), options.accountant)
    print(table(rows))
    write_json(options.json, {"rounds": rows})
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
