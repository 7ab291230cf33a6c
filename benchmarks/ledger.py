"""How long a ledger takes for a round (reserve and seal), and a thousand kills.

    python benchmarks/ledger.py                 # p50, p99 and the largest, in milliseconds
    python benchmarks/ledger.py --growth 10000  # the last rounds against the first, and opening
    python benchmarks/ledger.py --kills 1000    # the torture of tests/ledger_torture.py in full

The time is that of the wall clock, since what counts here is the disk, and beside it that of the
processor, which other processes do not change.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import table, write_json

from noisewise.privacy import PrivacyBudget, composed_epsilon, epsilon_of
from noisewise.privacy.ledger import (
    Charge,
    Ledger,
    Reservation,
    instruction_hash,
    metrics_charge,
)

DATASET = "benchmark"
CHARGE = Charge("training", 32 / 2400, 9.67, 75)
DELTA = 1e-4


def one_case(folder: Path, rounds: int, size: int, *, reopen: bool) -> dict[str, Any]:
    """Time rounds with replies of ``size`` bytes, opening the ledger for each or once."""
    path = folder / f"{rounds}-{size}-{reopen}.ledger"
    steps = rounds * CHARGE.steps
    budget = PrivacyBudget(
        epsilon_of(CHARGE.sample_rate, CHARGE.noise_multiplier, steps, DELTA), DELTA
    )
    Ledger.create(path, budget, DATASET)

    def opened() -> Ledger:
        return Ledger.open(path, dataset_id=DATASET, budget=budget, keep_replies=20)

    reply = os.urandom(size)
    ledger, times, busy_times = opened(), [], []
    for number in range(rounds):
        start, busy = time.perf_counter(), time.process_time()
        if reopen:
            ledger.close()
            ledger = opened()
        granted = ledger.reserve(instruction_hash(number.to_bytes(8, "little")), CHARGE)
        assert isinstance(granted, Reservation)
        ledger.seal(granted, reply)
        times.append(1000 * (time.perf_counter() - start))
        busy_times.append(1000 * (time.process_time() - busy))
    ledger.close()
    path.unlink()
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "reply [bytes]": size,
        "opened": "each round" if reopen else "once",
        "rounds": rounds,
        "p50 [ms]": float(p50),
        "p99 [ms]": float(p99),
        "largest [ms]": max(times),
        "processor p99 [ms]": float(np.percentile(busy_times, 99)),
    }


def disk(folder: Path) -> dict[str, Any]:
    """What the disk alone takes for writing and syncing 4 KiB at the end of a file."""
    times = []
    with open(folder / "disk", "wb") as file:
        for _ in range(300):
            start = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - start))
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "reply [bytes]": "disk alone",
        "opened": "",
        "rounds": 300,
        "p50 [ms]": float(p50),
        "p99 [ms]": float(p99),
        "largest [ms]": max(times),
        "processor p99 [ms]": 0.0,
    }


def growth(folder: Path, rounds: int, *, metrics: bool) -> dict[str, Any]:
    """Compare the rounds 10 to 109 with the last hundred, and open the ledger again.

    Every round is a reservation and a seal, with ``metrics`` of two kinds: the plan's and a release
    of noised figures. The budget is spent by the last round.
    """
    path = folder / f"growth-{metrics}.ledger"
    costs = [CHARGE, *([metrics_charge(5000.0)] if metrics else [])]
    counts = {(cost.sample_rate, cost.noise_multiplier): rounds * cost.steps for cost in costs}
    budget = PrivacyBudget(composed_epsilon(counts, DELTA), DELTA)
    Ledger.create(path, budget, DATASET)
    busy_times, times = [], []
    with Ledger.open(path, dataset_id=DATASET, budget=budget, keep_replies=20) as ledger:
        for number in range(rounds):
            start, busy = time.perf_counter(), time.process_time()
            for cost in costs:
                instruction = instruction_hash(number.to_bytes(8, "little"))
                granted = ledger.reserve(instruction, cost, at_most=rounds)
                assert isinstance(granted, Reservation)
                ledger.seal(granted, bytes(1000))
            times.append(1000 * (time.perf_counter() - start))
            busy_times.append(1000 * (time.process_time() - busy))
    busy = time.process_time()
    Ledger.open(path, dataset_id=DATASET, budget=budget).close()
    seconds_to_open = time.process_time() - busy
    first, last = np.median(busy_times[9:109]), np.median(busy_times[-100:])
    return {
        "rounds": rounds,
        "entries a round": len(costs),
        "processor at 10 [ms]": float(first),
        "processor at the end [ms]": float(last),
        "ratio": float(last / first),
        "processor p99 [ms]": float(np.percentile(busy_times, 99)),
        "p99 [ms]": float(np.percentile(times, 99)),
        "open [s]": seconds_to_open,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="On the disk to measure; default: temporary.")
    parser.add_argument("--kills", type=int, help="Kill so many clients instead of timing.")
    parser.add_argument("--growth", type=int, help="Compare the last rounds with the first.")
    parser.add_argument("--output", type=Path, help="A JSON file.")
    chosen = parser.parse_args()
    logging.getLogger("noisewise").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        folder = Path(temporary)
        if chosen.kills:
            script = Path(__file__).parents[1] / "tests" / "ledger_torture.py"
            words = [
                sys.executable,
                str(script),
                "kills",
                str(folder),
                "--kills",
                str(chosen.kills),
            ]
            sys.exit(subprocess.run(words).returncode)
        rows = (
            [
                growth(folder, chosen.growth, metrics=False),
                growth(folder, chosen.growth, metrics=True),
            ]
            if chosen.growth
            else [
                disk(folder),
                one_case(folder, 1000, 1_000, reopen=False),
                one_case(folder, 1000, 115_752, reopen=False),  # the paper's CNN
                one_case(folder, 300, 115_752, reopen=True),
                one_case(folder, 30, 44_800_000, reopen=False),  # 11.2 million parameters
            ]
        )
    print(table(rows))
    if chosen.output:
        write_json(chosen.output, {"ledger": rows})


if __name__ == "__main__":
    main()
