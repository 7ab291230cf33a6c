"""Traffic, time and memory of a real Flower run: a ResNet-18 against a head on public features.

    python benchmarks/flower_traffic.py

Starts a SuperLink and 2 SuperNodes on this machine and runs 2 rounds with each model. Each site has
80 random pictures [3, 32, 32]; the head is trained on 1,280 features of a public encoder. The
server's memory for 20 clients is measured apart, with made-up updates. Needs noisewise[flower].
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import table, write_json

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
sys.path.insert(0, str(HELPERS))

from flower_traffic import WIDTH, features_part, image_site, run_sites  # noqa: E402

from noisewise.flower.new_app import write_app  # noqa: E402

SITES, ROUNDS, RECORDS = 2, 2, 80
SIZES = {"resnet18": 11_181_642, "head": 10 * (WIDTH + 1)}


def one_case(folder: Path, model: str) -> dict[str, Any]:
    """Run a federation; the figures of a round and of each program."""
    app = folder / "app"
    write_app(app)
    changes = {
        "records = 2400": f"records = {RECORDS + 10}",
        "planned_rounds = 100": f"planned_rounds = {ROUNDS}",
    }
    if model == "head":
        changes |= {
            "[1, 8, 8]": f"[{WIDTH}]",
            "\n[limits]": f"{features_part(app)}\n[limits]",
        }
        told = f'input-shape="{WIDTH}"'
    else:
        changes |= {"[1, 8, 8]": "[3, 32, 32]", '"softmax"': f'"{model}"'}
        told = f'model="{model}" input-shape="3,32,32"'
    sites = [image_site(app, k, RECORDS, changes) for k in range(SITES)]
    output = folder / "output"
    told += f' output="{output}" learning-rate=0.1 min-clients={SITES} num-rounds={ROUNDS}'
    traffic = run_sites(folder / "processes", app, sites, f"{told} round-seconds=400.0")
    return {
        "model": model,
        "parameters": SIZES[model],
        "sent [MB]": traffic.sent / ROUNDS / 1e6,
        "received [MB]": traffic.received / ROUNDS / 1e6,
        "round [s]": traffic.seconds / ROUNDS,
        **{f"{program} [MB]": peak for program, peak in traffic.memory.items()},
    }


def server_memory(folder: Path, size: int) -> dict[str, Any]:
    """Memory and time of the server for a round with 20 clients."""
    done = subprocess.run(
        [sys.executable, str(HELPERS / "flower_large.py"), str(folder), str(size)],
        env={**os.environ, "PYTHONPATH": f"{HELPERS.parents[1] / 'src'}:{HELPERS}"},
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes, _, _, seconds, _ = done.stdout.split()
    return {
        "parameters": size,
        "server, 20 clients [MB]": float(megabytes),
        "aggregation [s]": int(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    chosen = parser.parse_args()
    runs, servers = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for model, size in SIZES.items():
            runs.append(one_case(Path(temporary) / model, model))
            servers.append(server_memory(Path(temporary) / f"{model}-server", size))
    print(table(runs))
    print(table(servers))
    if chosen.output:
        write_json(chosen.output, {"runs": runs, "servers": servers})


if __name__ == "__main__":
    main()
