"""Time a federation of thousands of small clients, beside another commit.

    python benchmarks/many_clients.py --base COMMIT [--clients 5000] [--pairs 3] [--json FILE]

NoiseWise on a linear model with 64 features and 10 classes: 50 training and 10 held-out records at
each client, four budgets, a tenth of the clients in each of 5 rounds, one process, results in a
folder. Both commits run in turn in processes of their own, so a busy machine slows both in the same
way. The time is the processor time of `simulate`, without imports, records and plans; it equals the
time on the clock of a free core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import table, write_json

RECORDS, HELD_OUT, FEATURES, CLASSES = 50, 10, 64, 10
LINE = "seconds: "


def train(n_clients: int) -> tuple[float, str]:
    """Simulate once; returns the seconds, and a hash of the trained parameters."""
    import hashlib

    import numpy as np
    import torch

    import noisewise as nw
    from noisewise.data.examples import Examples
    from noisewise.data.partition import ClientData

    rng = np.random.default_rng(0)
    directions = rng.standard_normal((FEATURES, CLASSES))

    def examples(count: int) -> Examples:
        inputs = rng.standard_normal((count, FEATURES)).astype(np.float32)
        return Examples(inputs, (inputs @ directions).argmax(1).astype(np.int64))

    data = [ClientData(examples(RECORDS), examples(HELD_OUT)) for _ in range(n_clients)]
    epsilons = rng.choice([1.0, 2.0, 4.0, 8.0], n_clients).tolist()
    specs = [
        nw.ClientSpec(f"client-{k:05d}", RECORDS, 16, epsilon, 1e-3, 1)
        for k, epsilon in enumerate(epsilons)
    ]
    method = nw.make_method("NoiseWise")
    plans = nw.plan_clients(specs, method, rounds=5, clip_norm=1.0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(FEATURES, CLASSES))
    torch.nn.init.zeros_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    settings = nw.TrainingSettings(rounds=5, learning_rate=0.2, participation=0.1)
    prepared = nw.Prepared(nw.make_clients(specs, data), plans, method, model, settings)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = nw.simulate(prepared, folder=folder)
        seconds = time.process_time() - began
        records = Path(folder, "rounds.jsonl").read_bytes()
    assert result.status == "finished"
    return seconds, hashlib.sha256(records).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/many_clients.json"))
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once or options.base is None:
        print(LINE + json.dumps(train(options.clients)))
        return
    from same_results import CLI, two_trees

    seconds: dict[str, list[float]] = {"base": [], "here": []}
    hashes = set()
    with two_trees(options.base, CLI) as trees:
        for _ in range(options.pairs):
            for name, tree in zip(seconds, trees, strict=True):
                words = [sys.executable, __file__, "--once", "--clients", str(options.clients)]
                done = subprocess.run(
                    words, env=tree.environment(), capture_output=True, text=True, check=True
                )
                took, digest = json.loads(done.stdout.split(LINE)[1])
                seconds[name].append(took)
                hashes.add(digest)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        {"source": name, "median s": medians[name], "least s": min(values),
         "speed-up": medians["base"] / medians[name]}
        for name, values in seconds.items()
    ]  # fmt: skip
    print(table(rows))
    print("same rounds.jsonl" if len(hashes) == 1 else "the records of the rounds differ")
    write_json(options.json, {"many_clients": rows, "same": len(hashes) == 1})
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
