"""Split your own arrays or torch Dataset over simulated clients, and train.

Run it with `python examples/own_arrays.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

import noisewise as nw
from noisewise.data import dataset_from_arrays, dataset_from_torch


def main() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(scale=2.0, size=(3, 5))
    targets = rng.integers(3, size=3000)
    inputs = centres[targets] + rng.normal(size=(3000, 5))

    # Arrays can have any numeric type. A torch Dataset of (input, class) pairs gives the same:
    data = dataset_from_arrays(inputs, targets, name="three clouds")
    same = dataset_from_torch(TensorDataset(torch.tensor(inputs), torch.tensor(targets)))
    assert np.array_equal(data.train.inputs, same.train.inputs)

    clients = nw.split_dataset(data, 6, partition="dirichlet", alpha=0.5, seed=1)
    specs = nw.make_specs(
        clients, epsilons=[1.0, 1.0, 2.0, 2.0, 5.0, 5.0], batch_sizes=16, delta=1e-4
    )
    model = nw.make_model("mlp", (5,), data.n_classes, seed=0, hidden=8)
    settings = nw.TrainingSettings(rounds=5, learning_rate=0.2)
    for name in ("RobustHDP", "DPFedAvg"):
        method = nw.make_method(name)
        plans = nw.plan_clients(specs, method, rounds=5, clip_norm=1.0, accountant="rdp")
        result = nw.simulate(
            nw.Prepared(nw.make_clients(specs, clients), plans, method, model, settings)
        )
        last = result.rounds[-1]
        print(
            f"{name:>9}: mean accuracy {100 * last.mean_accuracy:.1f} %, "
            f"noise of the last aggregate {last.aggregate_noise:.4f}"
        )


if __name__ == "__main__":
    main()
