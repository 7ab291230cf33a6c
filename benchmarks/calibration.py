"""Time the calibration of many different clients without a cache, for each accountant.

python benchmarks/calibration.py [--clients 10000] [--json FILE]
python benchmarks/calibration.py --plans 200    # single plans over the whole supported range
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import PrivacyBudget, calibrate


def seconds(accountant: str, clients: int) -> tuple[float, float]:
    """Return the processor seconds of the first calibrations, and of a repetition."""
    rng = np.random.default_rng(clients)
    plans = []
    for _ in range(clients):
        size = int(rng.integers(200, 5000))
        batch = int(rng.integers(8, min(size, 256)))
        budget = PrivacyBudget(float(np.exp(rng.uniform(math.log(0.3), math.log(10)))), 1e-5)
        plans.append((budget, batch / size, 100 * math.ceil(size / batch)))
    times = []
    for _ in range(2):
        start = time.process_time()
        for budget, rate, steps in plans:
            calibrate(budget, rate, steps, accountant)
        times.append(time.process_time() - start)
    return times[0], times[1]


def single_plans(count: int, accountant: str = "pld") -> dict[str, float]:
    """Return the processor seconds of single calibrations over the range of `calibrate`."""
    rng = np.random.default_rng(count)
    times = []
    while len(times) < count:
        budget = PrivacyBudget(10 ** rng.uniform(-2, 4), 10 ** rng.uniform(-9, -2))
        rate, steps = 10 ** rng.uniform(-6, 0), int(10 ** rng.uniform(0, 7))
        start = time.process_time()
        try:
            calibrate(budget, rate, steps, accountant)
        except InvalidValueError:  # outside of the supported range
            continue
        except AccountingError as error:
            print(f"calibration failed: {error}")
        times.append(time.process_time() - start)
        if times[-1] > 2:
            print(f"{times[-1]:.2f} s: {budget}, q = {rate:.3g}, {steps} steps", flush=True)
    return {
        "plans": count,
        "median": float(np.median(times)),
        "p95": float(np.percentile(times, 95)),
        "largest": max(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, help="time this number of single plans instead")
    parser.add_argument(
        "--clients", type=int, default=10_000, help="number of clients for the accountant rdp"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOISEWISE_CACHE"] = folder
        if arguments.plans:
            print(json.dumps(single_plans(arguments.plans), indent=1))
            return
        print(f"{'accountant':<12}{'clients':>9}{'cold s':>9}{'again s':>9}")
        for accountant, clients in (
            ("rdp", 20), ("moments", 20), ("pld", 20), ("rdp", arguments.clients)
        ):  # fmt: skip
            cold, again = seconds(accountant, clients)
            print(f"{accountant:<12}{clients:>9}{cold:>9.2f}{again:>9.2f}", flush=True)
            results.append(
                {"accountant": accountant, "clients": clients, "cold": cold, "again": again}
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
