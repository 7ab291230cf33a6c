"""Sites for tests: a folder with records, the site's file and a ledger. Flower is not required."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np

from noisewise.data import load_dataset
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger

SITE = """
[ledger]
file = "site.ledger"
dataset = "digits-{number}"

[data]
file = "records.npz"
records = {records}

[model]
name = "softmax"
input_shape = [1, 8, 8]
classes = 10

[budget]
epsilon = {epsilon}
delta = 1e-3
planned_rounds = {rounds}

[training]
batch_size = {batch}
clip_norm = 1.0
local_epochs = {epochs}
normalise = {normalise}

[limits]
learning_rate = [0.01, 1.0]
"""

METRICS = """
[metrics]
noise_multiplier = {noise}
records = {records}
releases = {releases}
"""


def make_site(
    folder: Path,
    number: int = 0,
    *,
    sites: int = 5,
    records: int | None = None,
    epsilon: float = 8.0,
    rounds: int = 3,
    batch: int = 30,
    epochs: int = 1,
    normalise: bool = False,
    ledger: bool = True,
) -> Path:
    """Make a site's folder with records, site file and ledger; return the path of the site file."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_dataset("digits").train
    inputs, targets = digits.arrays()
    mine = np.arange(number, len(targets), sites)[:records]
    np.savez(folder / "records.npz", inputs=inputs[mine], targets=targets[mine])
    text = SITE.format(
        number=number, records=len(mine), epsilon=epsilon, rounds=rounds, batch=batch,
        epochs=epochs, normalise=str(normalise).lower(),
    )  # fmt: skip
    (folder / "site.toml").write_text(text)
    if ledger:
        path = folder / "site.ledger"
        Ledger.create(path, PrivacyBudget(epsilon, 1e-3), f"digits-{number}")
    return folder / "site.toml"


def protect_persons(site: Path, persons: int, max_records: int, column: str = "who") -> None:
    """Let a site protect persons, with a new ledger.

    Args:
        site: file of `make_site`.
        persons: the declared number of persons.
        max_records: of a person in a step.
        column: of a CSV file, or the array of another one, that says whose record each one is.
    """
    lines = site.read_text().splitlines()
    data, budget = lines.index("[data]"), lines.index("[budget]")
    lines[budget] += f'\nunit = "person"\nmax_records = {max_records}'
    number = next(n for n in range(data, len(lines)) if lines[n].startswith("records = "))
    lines[number] = f'persons = {persons}\nperson = "{column}"'
    site.write_text("\n".join(lines) + "\n")
    for old in site.parent.glob("site.ledger*"):
        old.unlink()
    with site.open("rb") as file:
        parts = tomllib.load(file)
    promise = PrivacyBudget(parts["budget"]["epsilon"], parts["budget"]["delta"])
    path, dataset = site.parent / parts["ledger"]["file"], parts["ledger"]["dataset"]
    Ledger.create(path, promise, dataset, unit="person")
