"""The study of docs/noisewise_method.md: pilots for learning rates, then all cells, resumably.

    python studies/method.py softmax cnn hetero ablation accountant [--workers 2] [--minutes 90]

Every cell (population, method, seed) is a run of a config in configs/study/ and leaves one small
JSON file under studies/results/, which is committed; a cell with such a file is not run again, and
one that was interrupted goes on from its checkpoint under runs/study/. Learning rates come from
pilots of 40 rounds with a seed of their own, as many trials for every method, chosen by the loss on
training records: no held-out record takes part in the choice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.experiments.config import MethodConfig, load_config
from noisewise.experiments.runner import Job, run
from noisewise.federation.results import RunResult, to_json
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "studies" / "results", ROOT / "runs" / "study"
PILOT_ROUNDS, PILOT_SEED = 40, 1000
DISTS = [f"Dist{k}" for k in (6, 9, 1, 3, 5, 8, 2, 4, 7)]
METHODS = ["NoiseWise", "RobustHDP", "WeiAvg", "DPFedAvg", "BudgetAvg", "PFA", "MinEpsilon"]


@dataclass(frozen=True)
class Cell:
    """One run of the study.

    Attributes:
        part: of the study; names the folder of results.
        name: of the cell within its part.
        config: file under configs/study/.
        overrides: config fields that differ.
        method: with its options.
        rates: the pilot's trials; one rate needs no pilot.
        seed: of the run.
        options: of the method.
    """

    part: str
    name: str
    config: str
    overrides: dict[str, Any]
    method: str
    rates: tuple[float, ...]
    seed: int
    options: dict[str, Any] = field(default_factory=dict)


def softmax() -> Iterator[Cell]:
    """Softmax regression, iid, all populations and methods, three paired seeds."""
    for seed in range(3):
        for dist in DISTS:
            for method in METHODS:
                yield Cell(
                    "softmax", f"{dist}-{method}", "softmax_iid.toml",
                    {"population.epsilon": dist}, method, (0.01, 0.03, 0.1), seed,
                )  # fmt: skip


PUBLISHED = {  # the paper's learning rates on MNIST; ours is half of Robust-HDP's, untried
    "Dist9": {"RobustHDP": 0.002, "WeiAvg": 0.001, "NoiseWise": 0.001},
    "Dist6": {"RobustHDP": 0.002, "WeiAvg": 0.001, "NoiseWise": 0.001},
    "Dist1": {"RobustHDP": 0.01, "WeiAvg": 0.01, "NoiseWise": 0.005},
}


def cnn() -> Iterator[Cell]:
    """The paper's CNN on Dist1, 6, 9. A pilot costs too much: rates are the published ones."""
    for dist, rates in PUBLISHED.items():
        for method in ("NoiseWise", "RobustHDP", "WeiAvg"):
            yield Cell(
                "cnn", f"{dist}-{method}", "cnn_iid.toml", {"population.epsilon": dist}, method,
                (rates[method],), 0,
            )  # fmt: skip


def hetero() -> Iterator[Cell]:
    """60 clients with at most 8 labels each, mixed batches: where the paper's method loses."""
    for seed in range(3):
        for dist in DISTS:
            for method in METHODS:
                yield Cell(
                    "hetero", f"{dist}-{method}", "softmax_60.toml", {"population.epsilon": dist},
                    method, (0.01, 0.03, 0.1), seed,
                )  # fmt: skip


def two_labels() -> Iterator[Cell]:
    """Two labels a client: how far all of it breaks."""
    for dist in ("Dist6", "Dist9"):
        for method in METHODS[:5]:
            yield Cell(
                "two_labels", f"{dist}-{method}", "softmax_2labels.toml",
                {"population.epsilon": dist}, method, (0.01, 0.03, 0.1), 0,
            )  # fmt: skip


ABLATION: dict[str, tuple[str, dict[str, Any]]] = {
    "NoiseWise": ("NoiseWise", {}),
    "without normalising (loadings)": ("NoiseWise", {"normalise": False}),
    "without smoothing": ("NoiseWise", {"smooth": 1}),
    "without spread": ("NoiseWise", {"spread": 0}),
    "with pcp": ("NoiseWise", {"estimator": "pcp"}),
    "with norms": ("NoiseWise", {"estimator": "norm"}),
    "with average of 10 rounds": ("NoiseWise", {"average_rounds": 10}),
    "Robust-HDP, normalised": ("RobustHDP", {"normalise": True}),
    "Robust-HDP, average of 10 rounds": ("RobustHDP", {"average_rounds": 10}),
    "true noise, normalised": ("Oracle", {"normalise": True}),
    "true noise": ("Oracle", {}),
}


def ablation() -> Iterator[Cell]:
    """Part by part, each variant with pilots of its own."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for label, (method, options) in ABLATION.items():
                yield Cell(
                    "ablation", f"{dist}-{label}", "softmax_iid.toml",
                    {"population.epsilon": dist}, method, (0.01, 0.03, 0.1), seed, options,
                )  # fmt: skip


def accountant() -> Iterator[Cell]:
    """The accountant as a step of its own: the paper's `moments` against `pld`."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for method in ("NoiseWise", "RobustHDP"):
                yield Cell(
                    "accountant", f"{dist}-{method}-moments", "softmax_iid.toml",
                    {"population.epsilon": dist, "training.accountant": "moments"}, method,
                    (0.01, 0.03, 0.1), seed,
                )  # fmt: skip


def cnn_published() -> Iterator[Cell]:
    """Robust-HDP as published: the paper's accountant and learning rates."""
    for dist, rate in (("Dist9", 0.002), ("Dist6", 0.002)):
        yield Cell(
            "cnn_published", f"{dist}-RobustHDP-moments", "cnn_iid.toml",
            {"population.epsilon": dist, "training.accountant": "moments"}, "RobustHDP",
            (rate,), 0,
        )  # fmt: skip


PARTS = {
    f.__name__: f
    for f in (softmax, cnn, hetero, two_labels, ablation, accountant, cnn_published)
}  # fmt: skip


def slug(text: str) -> str:
    """A name for files."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def result_file(cell: Cell) -> Path:
    """Where a cell's result is committed."""
    return RESULTS / cell.part / f"{slug(cell.name)}-seed{cell.seed}.json"


def play(cell: Cell, rate: float, rounds: int | None, seed: int, folder: Path) -> RunResult:
    """One run of the cell's config."""
    overrides = dict(cell.overrides)
    if rounds is not None:  # the budget lasts for all rounds, of which a pilot plays the first
        overrides["training.rounds"] = rounds
        overrides["population.planned_rounds"] = _rounds(cell)
    config = load_config(ROOT / "configs" / "study" / cell.config, overrides)
    job = Job(MethodConfig(name=cell.method, options=cell.options, learning_rate=rate), seed)
    return run(config, job, folder=folder)


def _rounds(cell: Cell) -> int:
    return load_config(ROOT / "configs" / "study" / cell.config, cell.overrides).training.rounds


def pilot(cell: Cell, rate: float) -> float:
    """Mean train loss after a pilot (infinite where it diverged), from a file where it is known."""
    name = f"{slug(cell.config)}-{slug(json.dumps(cell.overrides, sort_keys=True))}-{cell.method}"
    options = slug(json.dumps(cell.options, sort_keys=True)) if cell.options else ""
    stem = slug(f"{name}{options}-rate{rate:g}")
    file = RESULTS / "pilots" / f"{stem}.json"
    if not file.exists():
        result = play(cell, rate, PILOT_ROUNDS, PILOT_SEED, RUNS / "pilots" / stem)
        losses = [r.mean_train_loss for r in result.rounds if r.train_loss is not None][-2:]
        sound = result.status == "finished" and bool(np.isfinite(losses).all())
        loss = float(np.mean(losses)) if sound else None
        write_atomic(file, (to_json({"rate": rate, "train_loss": loss}) + "\n").encode())
    loss = json.loads(file.read_text())["train_loss"]
    return float("inf") if loss is None else float(loss)


def work(cell: Cell) -> str:
    """Pilots, then the cell itself; its result goes to a file."""
    file = result_file(cell)
    if file.exists():
        return f"{file.stem}: there"
    began = time.time()
    trials = {rate: pilot(cell, rate) for rate in cell.rates} if len(cell.rates) > 1 else {}
    rate = min(trials, key=lambda r: trials[r]) if trials else cell.rates[0]
    folder = RUNS / cell.part / f"{slug(cell.name)}-seed{cell.seed}"
    result = play(cell, rate, None, cell.seed, folder)
    seen = [r for r in result.rounds if r.accuracy is not None]
    shares = [r.signal_share for r in result.rounds if r.signal_share is not None]
    content = {
        "part": cell.part, "cell": cell.name, "method": cell.method, "options": cell.options,
        "config": cell.config, "overrides": cell.overrides, "seed": cell.seed,
        "learning_rate": rate, "pilot_train_loss": {str(r): loss for r, loss in trials.items()},
        "status": result.status,
        "curve": [[r.round, round(r.mean_accuracy, 5)] for r in seen],
        "accuracy": seen[-1].mean_accuracy,
        "client_accuracy_std": float(np.std(list((seen[-1].accuracy or {}).values()))),
        "signal_share": float(np.mean(shares)) if shares else None,
        "noise_ratio": result.rounds[-1].noise_ratio,
        "date": datetime.date.today().isoformat(), "commit": _commit(),
        "machine": f"{platform.machine()}, one core",
    }  # fmt: skip
    write_atomic(file, (to_json(content, indent=1) + "\n").encode())
    minutes = (time.time() - began) / 60
    return f"{file.stem}: {100 * seen[-1].mean_accuracy:.2f} % at {rate:g} ({minutes:.1f} min)"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Run the cells of the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no cell after so many")
    options = parser.parse_args()
    cells = [cell for part in options.parts for cell in PARTS[part]()]
    left = [cell for cell in cells if not result_file(cell).exists()]
    print(f"{len(cells)} cells, {len(left)} left", flush=True)
    end = time.time() + 60 * options.minutes
    with ProcessPoolExecutor(options.workers) as pool:
        queue, running = iter(left), set()
        while True:
            while len(running) < options.workers and time.time() < end:
                cell = next(queue, None)
                if cell is None:
                    break
                running.add(pool.submit(work, cell))
            if not running:
                break
            done = {future for future in running if future.done()}
            for future in done:
                try:
                    print(future.result(), flush=True)
                except Exception as error:  # one bad cell must not end the study
                    print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            running -= done
            time.sleep(0.5)


if __name__ == "__main__":
    main()
