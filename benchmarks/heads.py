"""Time whole runs of a softmax head on features, beside the bound given by flops and normals.

    python benchmarks/heads.py [--rounds 200] [--workers 2] [--records 2500] [--features 1280]
                               [--settings mixed one-step lock-step] [--json FILE]
    python benchmarks/heads.py --whole table|features [--minutes 60]    (see whole_table.py)

20 clients with the authors' epsilons (Dist1) train on synthetic features of norm 1 in 10 classes;
NoiseWise, evaluation every 10 rounds, without a folder. Settings:

- mixed: the authors' batch sizes, one local epoch a round;
- one-step: one step a round with all records;
- lock-step: several methods in lock step (`--methods`), with the batches of one-step.

The bound is flops / (speed of a large float32 matrix product) + normals * (seconds for a normal),
both measured on one thread immediately before the run. CPU seconds add up all processes, so their
ratio to the bound hardly depends on what else the machine does. Each setting runs in a new process,
whose peak memory is that of its largest process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import seconds, table, write_json
from whole_table import TABLE_METHODS, add_options, feature_pass, table_pass

from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.data.examples import Examples
from noisewise.data.partition import ClientData
from noisewise.data.populations import authors_population
from noisewise.data.specs import ClientSpec
from noisewise.federation import Prepared, TrainingSettings, make_clients, simulate
from noisewise.federation.clients import Client
from noisewise.federation.executors import Execution, one_thread
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.privacy.spending import epsilon_spent
from noisewise.randomness import SeededRandom
from noisewise.training.models import make_model

CLASSES, HELD_OUT = 10, 500
SETTINGS = ("mixed", "one-step", "lock-step")
METHODS = ("NoiseWise", "WeiAvg", "DPFedAvg", "MinEpsilon", "Oracle")


def features(n: int, d: int, seed: int) -> Examples:
    """Synthetic records of norm 1 around a centre for each class."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, CLASSES, n)
    centres = np.random.default_rng(0).standard_normal((CLASSES, d), dtype=np.float32)
    inputs = rng.standard_normal((n, d), dtype=np.float32)
    inputs += centres[targets]
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    return Examples(inputs, targets)


def clients(n: int, d: int, one_step: bool, dist: str = "Dist1") -> tuple[Client, ...]:
    """The authors' 20 clients with synthetic records."""
    drawn = authors_population(dist, 20)
    specs = [
        ClientSpec(f"client-{i:02}", n, n if one_step else batch, epsilon, 1e-4)
        for i, (epsilon, batch) in enumerate(zip(drawn.epsilons, drawn.batch_sizes, strict=True))
    ]
    data = [
        ClientData(features(n, d, 2 * i), features(HELD_OUT, d, 2 * i + 1))
        for i in range(len(specs))
    ]
    return make_clients(specs, data)


def prepared(
    options: argparse.Namespace, method_name: str, members: Sequence[Client], seed: int = 0
) -> Prepared:
    method = make_method(method_name)
    plans = plan_clients([c.spec for c in members], method, rounds=options.rounds, clip_norm=1.0)
    for plan in plans:
        epsilon_spent(plan, 1)  # computes the spending of all rounds
    model = make_model("softmax", (options.features,), CLASSES, seed=0)
    settings = TrainingSettings(options.rounds, 0.5, evaluate_every=10)
    return Prepared(members, plans, method, model, settings, seed=seed)


def table_part(options: argparse.Namespace, dist: str, seed: int) -> dict[str, Any]:
    """Train the methods of the table in lock step on one population with one seed."""
    before = _cpu_seconds()
    members = clients(options.records, options.features, options.setting != "mixed", dist)
    runs = [prepared(options, name, members, seed) for name in TABLE_METHODS]
    _train_together(runs, options.workers)
    return {"runs": len(runs), "workers": options.workers, "cpu": _cpu_seconds() - before}


def _train_together(runs: Sequence[Prepared], workers: int) -> None:
    def play(run: Prepared) -> Callable[[MakeExecutor], object]:
        return lambda make: simulate(run, execution=Execution(executor=make))

    in_lock_step([play(run) for run in runs], workers=workers)


def bound(options: argparse.Namespace, runs: Sequence[Prepared]) -> dict[str, float]:
    """Seconds of one core for the products and for the normals of all runs."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((1024, 1280), dtype=np.float32)
    two = rng.standard_normal((1280, 512), dtype=np.float32)
    size = CLASSES * (options.features + 1)
    with one_thread():
        speed = 2 * one.size * two.shape[1] / seconds(lambda: one @ two, 10)
        draws = SeededRandom(0, 1, "benchmark")
        normal = seconds(lambda: [draws.normal(0, size) for _ in range(200)], 5) / 200 / size
    plans = runs[0].plans
    steps = options.rounds * sum(plan.steps_per_round for plan in plans)
    records = (
        options.rounds * options.records * sum(p.steps_per_round * p.sample_rate for p in plans)
    )
    flops = len(runs) * 4.0 * records * options.features * CLASSES  # two products
    return {
        "GFLOP": flops / 1e9,
        "GFLOP/s": speed / 1e9,
        "1e9 normals": steps * size / 1e9,
        "ns a normal": 1e9 * normal,
        "bound core-s": flops / speed + steps * size * normal,
    }


def measure(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    """One row: a setting in this process."""
    members = clients(options.records, options.features, setting != "mixed")
    names = options.methods if setting == "lock-step" else ["NoiseWise"]
    runs = [prepared(options, name, members) for name in names]
    limits = bound(options, runs)
    begun, cpu = time.perf_counter(), _cpu_seconds()
    if setting == "lock-step":
        _train_together(runs, options.workers)
    else:
        simulate(runs[0], execution=Execution(options.workers))
    wall, cpu = time.perf_counter() - begun, _cpu_seconds() - cpu
    per_core = limits["bound core-s"] / options.workers
    return {
        "setting": setting,
        "runs": len(runs),
        "workers": options.workers,
        "seconds": wall,
        "bound s": per_core,
        "seconds / bound": wall / per_core,
        "CPU s": cpu,
        "CPU / bound": cpu / limits["bound core-s"],
        "peak MB": max(resource.getrusage(who).ru_maxrss for who in _PROCESSES) / 1024,
        **limits,
    }


_PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _cpu_seconds() -> float:
    """Processor time of this process and of the workers that have ended."""
    usages = [resource.getrusage(who) for who in _PROCESSES]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def whole(options: argparse.Namespace) -> str:
    """Run the missing parts of a goal as a whole."""
    folder, minutes = options.json.parent, options.minutes
    if options.whole == "features":
        return feature_pass(options.images, options.workers, minutes, folder)
    name = "_".join(map(str, (options.setting, options.rounds, options.records, options.features,
                              options.workers)))  # fmt: skip
    return table_pass(name, lambda dist, seed: table_part(options, dist, seed), minutes, folder)


def main() -> None:
    """Run each setting in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument("--records", type=int, default=2500, help="training records of a client")
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="of lock-step")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/heads.json"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.whole is not None:
        print(whole(options))
        return
    if options.here:
        with contextlib.redirect_stdout(sys.stderr):
            row = measure(options, options.settings[0])
        print(json.dumps(row))
        return
    rows = []
    for setting in options.settings:
        command = [sys.executable, __file__, *sys.argv[1:], "--here", "--settings", setting]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    for start in range(0, len(rows[0]), 9):
        columns = ["setting", *list(rows[0])[max(1, start) : start + 9]]
        print(table([{name: row[name] for name in columns} for row in rows]), end="\n\n")
    write_json(options.json, {"heads": rows})
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
