"""Train your own torch module on your own data, with one CSV file for each site.

Run it with `python examples/own_data.py [FOLDER]`. Without a folder, the script creates synthetic
records of three sites in a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import noisewise as nw
from noisewise.data import clients_from_files, count_classes, population_table

EPSILONS = [2.0, 4.0, 8.0]  # one for each site, in the order of the file names


def make_up_sites(folder: Path) -> None:
    """Write CSV files of three sites; the outcome depends on two of the four columns."""
    rng = np.random.default_rng(0)
    for name, n in [("north", 900), ("south", 600), ("west", 300)]:
        table = rng.normal(size=(n, 4))
        outcome = (table[:, 0] - table[:, 2] + 0.3 * rng.normal(size=n) > 0).astype(int)
        rows = [
            ",".join([*(f"{value:.4f}" for value in row), str(label)])
            for row, label in zip(table, outcome, strict=True)
        ]
        (folder / f"{name}.csv").write_text("age,dose,weight,score,outcome\n" + "\n".join(rows))


def small_net(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Return the model; any module without BatchNorm works."""
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Linear(8, n_classes))


def main(folder: Path) -> None:
    data = clients_from_files(folder, target="outcome")
    sites = sorted(path.stem for path in folder.glob("*.csv"))
    specs = nw.make_specs(data, epsilons=EPSILONS, batch_sizes=32, delta=1e-4, ids=sites)
    print(population_table(specs))

    method = nw.make_method("RobustHDP")
    plans = nw.plan_clients(specs, method, rounds=10, clip_norm=1.0, accountant="rdp")
    shape = data[0].train.inputs.shape[1:]
    model = nw.make_model(small_net, shape, count_classes(data), seed=0)
    settings = nw.TrainingSettings(rounds=10, learning_rate=0.2)
    result = nw.simulate(nw.Prepared(nw.make_clients(specs, data), plans, method, model, settings))

    last = result.rounds[-1]
    print(f"\nafter {last.round} rounds: mean accuracy {100 * last.mean_accuracy:.1f} %")
    for site in sites:
        spent, weight = last.epsilon_spent[site], last.weights[site]
        print(f"{site:>6}: epsilon spent {spent:.2f}, weight in the last round {weight:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            make_up_sites(Path(temporary))
            main(Path(temporary))
