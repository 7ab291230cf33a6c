"""Measure the precision of the estimators on first-round updates of the paper's CNN.

    python benchmarks/precision.py --updates FOLDER       # npz files with updates and variance
    python benchmarks/precision.py --train --save FOLDER  # trains 36 times 20 clients on MNIST

The table shows the excess noise relative to the oracle (1 is the optimum), the L1 error of the
weights, and the factor of the estimate that is common to all clients. The updates are for Dist1 to
Dist9, iid and with two labels per client, with the authors' epsilons and ten times these.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Updates, from_folder, table, write_json

from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.noise import PCP, Estimator, Factor, Norm, common_factor, excess_noise

DISTS = [f"Dist{i}" for i in range(1, 10)]
ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "norm": Norm,
    "factor": Factor,
    "factor, all rows": lambda: Factor(quiet=False),
    "pcp": PCP,
    "pcp, 5000 coordinates": lambda: PCP(sample=5000),
    "pcp, first 5000 rows": lambda: PCP(submatrix_rows=5000, submatrices=1),
}


def trained_updates(
    dists: Iterable[str], kinds: Iterable[str], scales: Iterable[float], accountant: str, n: int
) -> Iterator[Updates]:
    """Train n clients for one round on MNIST, with the authors' epsilons and batch sizes."""
    # Imported here, because stored updates need neither data nor training.
    from noisewise.data import authors_population, load_dataset, make_specs, split_dataset
    from noisewise.noise import update_noise_variance
    from noisewise.privacy import make_plan
    from noisewise.randomness import SeededRandom
    from noisewise.training import local_update, make_model
    from noisewise.training.local import TensorData
    from noisewise.training.parameters import ParameterLayout

    dataset = load_dataset("mnist")
    model = make_model("cnn", (1, 28, 28), 10, seed=0)
    layout = ParameterLayout.of(model)
    theta = layout.flatten(model)
    rate, clip = 0.01, 3.0
    for kind in kinds:
        labels = {"partition": "iid"} if kind == "iid" else {"partition": "shards", "max_labels": 2}
        clients = split_dataset(dataset, n, **labels)  # type: ignore[arg-type]
        data = []
        for client in clients:
            inputs, targets = client.train.arrays()
            data.append(TensorData(torch.from_numpy(inputs), torch.from_numpy(targets)))
        for dist in dists:
            for scale in scales:
                drawn = authors_population(dist, n, scale)
                specs = make_specs(
                    clients,
                    epsilons=drawn.epsilons,
                    batch_sizes=drawn.batch_sizes,
                    delta=drawn.delta,
                )
                columns, variance = [], []
                for spec, records in zip(specs, data, strict=True):
                    plan = make_plan(spec, rounds=200, clip_norm=clip, accountant=accountant)
                    rng = SeededRandom(0, 1, spec.id)
                    loss = torch.nn.functional.cross_entropy
                    update = local_update(model, theta, records, plan, rate, loss, rng)
                    columns.append(update.delta.numpy())
                    variance.append(
                        update_noise_variance(
                            layout.size,
                            plan.steps_per_round,
                            rate,
                            clip,
                            plan.noise_multiplier,
                            plan.expected_batch,
                        )
                    )
                name = f"{dist}_{kind}_{scale:g}"
                yield Updates(name, np.stack(columns, axis=1), np.array(variance, dtype=float))


def precision(updates: Updates, name: str) -> dict[str, Any]:
    """Compare one estimator's weights with the oracle's; returns a row of the table."""
    start = time.process_time()
    estimate = ESTIMATORS[name]().estimate(updates.values)
    weights = inverse_variance_weights(estimate.variance)
    oracle = inverse_variance_weights(updates.variance)
    return {
        "updates": updates.name,
        "estimator": name,
        "excess": excess_noise(weights, updates.variance),
        "L1 of weights": float(np.abs(weights - oracle).sum()),
        "common factor": common_factor(estimate.variance, updates.variance),
        "converged": bool(estimate.converged),
        "seconds": time.process_time() - start,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--updates", type=Path, help="folder of npz files with updates and variance"
    )
    options.add_argument("--train", action="store_true", help="train clients to get updates")
    options.add_argument("--save", type=Path, help="store the trained updates in this folder")
    options.add_argument("--dists", default=",".join(DISTS), help="populations to train")
    options.add_argument("--kinds", default="iid,two", help="iid, or two labels per client")
    options.add_argument("--scales", default="1,10", help="factors of the epsilons")
    options.add_argument("--clients", type=int, default=20, choices=[20, 40, 60])
    options.add_argument("--accountant", default="pld", help="pld, rdp or moments")
    options.add_argument("--estimators", default=",".join(name for name in ESTIMATORS))
    options.add_argument("--output", type=Path, default=Path("runs/bench/precision.json"))
    chosen = options.parse_args()
    if not chosen.train and chosen.updates is None:
        options.error("--updates FOLDER or --train is required")
    torch.set_num_threads(1)
    source: Iterable[Updates]
    if chosen.train:
        scales = [float(scale) for scale in chosen.scales.split(",")]
        kinds = chosen.kinds.split(",")
        dists = chosen.dists.split(",")
        source = trained_updates(dists, kinds, scales, chosen.accountant, chosen.clients)
    else:
        source = from_folder(chosen.updates)
    estimators = [name for name in ESTIMATORS if name in chosen.estimators]
    rows: list[dict[str, Any]] = []
    for updates in source:
        if chosen.save:
            chosen.save.mkdir(parents=True, exist_ok=True)
            path = chosen.save / f"{updates.name}.npz"
            np.savez(path, updates=updates.values, variance=updates.variance)
        rows += [precision(updates, name) for name in estimators]
        print(table(rows[-len(estimators) :]), flush=True)
    worst = [
        {
            "estimator": name,
            "updates": kind,
            "largest excess": max(excesses),
            "mean excess": float(np.mean(excesses)),
        }
        for name in estimators
        for kind in sorted({row["updates"].partition("_")[2] for row in rows})
        if (
            excesses := [
                row["excess"]
                for row in rows
                if row["estimator"] == name and row["updates"].partition("_")[2] == kind
            ]
        )
    ]
    print("\n" + table(worst))
    write_json(chosen.output, {"rows": rows, "worst": worst})
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    main()
