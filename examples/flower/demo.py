"""Sites to try the app with: `python demo.py demo 5` deals scikit-learn's digits to five sites."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from noisewise.data import load_dataset
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger

EPSILONS = [2.0, 4.0, 8.0, 16.0]


def main(folder: Path, sites: int, rounds: int) -> None:
    inputs, targets = load_dataset("digits").train.arrays()
    part = np.arange(len(targets)) % (sites + 1)
    folder.mkdir(parents=True, exist_ok=True)
    public = part == sites
    np.savez(folder / "public.npz", inputs=inputs[public], targets=targets[public])
    template = (Path(__file__).parent / "site.toml").read_text()
    for number in range(sites):
        place = folder / f"site-{number}"
        place.mkdir()
        mine = part == number
        np.savez(place / "records.npz", inputs=inputs[mine], targets=targets[mine])
        epsilon, delta = EPSILONS[number % len(EPSILONS)], 1e-4
        own = {
            "my-dataset": f"digits-{number}",
            "records = 2400": f"records = {10 * (int(mine.sum()) // 10 + 1)}",  # declared, rounded
            "epsilon = 2.0": f"epsilon = {epsilon}",
            "delta = 1e-6": f"delta = {delta}",
            "planned_rounds = 100": f"planned_rounds = {rounds}",
            "local_epochs = 1": "local_epochs = 4",
        }
        text = template
        for old, new in own.items():
            text = text.replace(old, new)
        (place / "site.toml").write_text(text)
        Ledger.create(place / "site.ledger", PrivacyBudget(epsilon, delta), f"digits-{number}")
    print(f"{sites} sites in {folder.resolve()}; budgets last {rounds} rounds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("demo"))
    parser.add_argument("sites", type=int, nargs="?", default=5)
    parser.add_argument("rounds", type=int, nargs="?", default=3, help="that the budgets last")
    told = parser.parse_args()
    if told.folder.exists():
        parser.error(f"{told.folder} is there already, with ledgers: remove it or name another")
    if told.sites < 1 or told.rounds < 1:
        parser.error("sites and rounds must be at least 1")
    main(told.folder, told.sites, told.rounds)
