"""Write the clients of the real federations: their numbers of records and their epsilons.

    python studies/utility_clients.py

The command writes studies/results/utility_clients.json, which the figures of
docs/utility_results.md need. Records are training records with seed 0; epsilons do not depend on
the seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from utility import FEDERATIONS, ORDERS, ROOT, StudyRun

from noisewise.experiments.config import load_config
from noisewise.experiments.population import make_population
from noisewise.storage import write_atomic

CLIENTS = ROOT / "studies" / "results" / "utility_clients.json"
Clients = dict[str, dict[str, dict[str, Any]]]


def read_clients(path: Path = CLIENTS) -> Clients:
    """Records and epsilon of each client, by part and population."""
    found: Clients = json.loads(path.read_text())
    return found


def main() -> None:
    """Split every federation once and write its clients."""
    clients: Clients = {}
    for part, dist in FEDERATIONS.items():
        for order in ORDERS:
            run = StudyRun(part, f"{part}.toml", dist + order, "NoiseWise", "auto", 0)
            config = load_config(ROOT / "configs" / run.config, run.overrides())
            config = config.model_copy(update={"features": None})  # they take minutes for spam
            clients.setdefault(part, {})[run.population] = {
                client.spec.id: [client.spec.n_examples, round(client.spec.epsilon, 4)]
                for client in make_population(config, 0)
            }
    write_atomic(CLIENTS, (json.dumps(clients, indent=None, sort_keys=True) + "\n").encode())
    print(f"written: {CLIENTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
