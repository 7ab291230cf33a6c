"""Calibration of many different clients, cold: seconds by accountant.

python benchmarks/calibration.py [--clients 10000] [--json FILE]
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

from noisewise.privacy import PrivacyBudget, calibrate


def seconds(accountant: str, clients: int) -> tuple[float, float]:
    """Processor time for the first calibrations, and for the same again."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000, help="for the accountant rdp")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOISEWISE_CACHE"] = folder
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
