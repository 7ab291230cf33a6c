"""The tables of docs/utility_persons.md: the same data with budgets for records and for persons."""

from __future__ import annotations

import numpy as np
from utility import PERSONS, PERSONS_CONFIG, PERSONS_DISTS, PERSONS_METHODS, ROOT
from utility_cells import accuracies, all_cells, cell, difference, table

from noisewise.experiments.config import load_config

PERSONS_PAGE = ROOT / "docs" / "utility_persons.md"
UNITS = {
    "persons_record": "a record",
    "persons_4": "a person with 4 records",
    "persons_16": "a person with 16 records",
}


def persons() -> list[str]:
    """What it costs to protect persons: accuracies, and paired differences to records."""
    config = load_config(ROOT / "configs" / PERSONS_CONFIG)
    rows: list[list[str]] = []
    paired: list[list[str]] = []
    costs: list[tuple[str, list[list[float]]]] = []
    for method in PERSONS_METHODS:
        records = {dist: accuracies("persons_record", dist, method) for dist in PERSONS_DISTS}
        for part in PERSONS:
            label = f"{method}, {UNITS[part]}"
            rows.append([label, *(cell(part, dist, method) for dist in PERSONS_DISTS)])
            if part == "persons_record":
                continue
            cells = []
            for dist in PERSONS_DISTS:
                values = accuracies(part, dist, method)
                seeds = sorted(set(values) & set(records[dist]))
                cells.append([values[seed] - records[dist][seed] for seed in seeds])
            costs.append((part, cells))
            paired.append([label, *map(difference, cells)])
    if not all(values for _, cells in costs for values in cells):
        return []
    results = [run for key, runs in all_cells().items() if key[0] in PERSONS
               for run in runs.values()]  # fmt: skip
    dates = " to ".join(sorted({run["date"] for run in results}))
    machines = ", ".join(sorted({run["machine"] for run in results}))
    seeds = [
        f"{UNITS[part]}: " + ", ".join(map(str, accuracies(part, "Dist1", "NoiseWise")))
        for part in PERSONS
    ]
    means = {
        part: [float(np.mean(values)) for name, cells in costs if name == part for values in cells]
        for part in PERSONS
    }
    lost = " and ".join(
        f"{-max(means[part]):.1f} to {-min(means[part]):.1f} points with "
        f"{UNITS[part].removeprefix('a person with ')} each"
        for part in PERSONS if means[part]
    )  # fmt: skip
    return [
        f"The same {config.data.limit:,} images of MNIST with scattering, {config.data.clients} "
        f"clients, {config.training.rounds} rounds, the same epsilons and delta "
        f"({config.population.delta:g}), the automatic rate; only the unit of the budget differs. "
        f"(`python studies/utility.py persons`, `configs/{PERSONS_CONFIG}`, "
        f"{dates}, {machines}. Seeds: {'; '.join(seeds)}.)",
        "",
        *table(["accuracy [%], the budget protects", *PERSONS_DISTS], rows),
        *table(["person minus record, paired by seed [points]", *PERSONS_DISTS], paired),
        f"Protecting persons costs {lost}.",
        "",
    ]
