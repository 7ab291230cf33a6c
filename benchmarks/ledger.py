"""Time the ledger for a round (reserve and seal), or kill clients at random moments.

    python benchmarks/ledger.py                 # p50, p99 and largest time in milliseconds
    python benchmarks/ledger.py --growth 10000  # compare the last rounds with the first
    python benchmarks/ledger.py --kills 1000    # kill -9 with tests/helpers/ledger_torture.py

Wall-clock times include the disk. Processor times do not, and other processes hardly change them.
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
    """Time rounds with replies of ``size`` bytes.

    With ``reopen``, the ledger is opened in each round, otherwise once.
    """
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
    """Time the disk: append 4 KiB to a file and sync it."""
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
    """Compare rounds 10 to 109 with the last 100 rounds, and time opening the ledger afterwards.

    A round reserves and seals one training charge. With ``metrics`` it also reserves and seals a
    charge for noised metrics. The last round uses up the budget.
    """
    path = folder / f"growth-{metrics}.ledger"
    charges = [CHARGE, *([metrics_charge(5000.0)] if metrics else [])]
    counts = {(one.sample_rate, one.noise_multiplier): rounds * one.steps for one in charges}
    budget = PrivacyBudget(composed_epsilon(counts, DELTA), DELTA)
    Ledger.create(path, budget, DATASET)
    busy_times, times = [], []
    with Ledger.open(path, dataset_id=DATASET, budget=budget, keep_replies=20) as ledger:
        for number in range(rounds):
            start, busy = time.perf_counter(), time.process_time()
            for charge in charges:
                instruction = instruction_hash(number.to_bytes(8, "little"))
                granted = ledger.reserve(instruction, charge, at_most=rounds)
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
        "entries a round": len(charges),
        "processor at 10 [ms]": float(first),
        "processor at the end [ms]": float(last),
        "ratio": float(last / first),
        "processor p99 [ms]": float(np.percentile(busy_times, 99)),
        "p99 [ms]": float(np.percentile(times, 99)),
        "open [s]": seconds_to_open,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: temporary folder)"
    )
    parser.add_argument("--kills", type=int, help="kill this number of clients instead of timing")
    parser.add_argument(
        "--growth", type=int, help="compare the last of this number of rounds with the first"
    )
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    chosen = parser.parse_args()
    logging.getLogger("noisewise").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        folder = Path(temporary)
        if chosen.kills:
            script = Path(__file__).parents[1] / "tests" / "helpers" / "ledger_torture.py"
            command = [
                sys.executable,
                str(script),
                "kills",
                str(folder),
                "--kills",
                str(chosen.kills),
            ]
            sys.exit(subprocess.run(command).returncode)
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
