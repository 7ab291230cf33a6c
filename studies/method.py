"""The study of docs/noisewise_method.md: pilots for learning rates, then all cells, resumably.

    python studies/method.py softmax cnn hetero ablation accountant ... [--workers 2] [--minutes 90]
    python studies/method.py softmax --dists Dist6 --seeds 7,8 --results runs/again

Every cell (population, method, seed) is a run of a config in configs/study/ and leaves one small
JSON file under studies/results/, which is committed; a cell with such a file is not run again, and
one that was interrupted goes on from its checkpoint under runs/study/. Learning rates come from
pilots of 40 rounds with a seed of their own: six trials for every method, and more as long as the
best of them is the largest or the smallest. They are chosen by the loss on training records. (The
pilots have a split of their own as well, so most records that a run holds out are among those that
the pilots trained on: for all methods alike.) Cells of softmax regression that share config and
seed run in lock step (`noisewise.federation.lockstep`), several times as fast as `noisewise run`,
with which they agree up to rounding.
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
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.aggregation.methods import make_method
from noisewise.aggregation.policy import plan_noise
from noisewise.aggregation.weights import inverse_variance_weights, proportional_weights
from noisewise.experiments.comparison import warm_up
from noisewise.experiments.config import ExperimentConfig, MethodConfig, load_config
from noisewise.experiments.runner import Job, run
from noisewise.experiments.setup import make_initial_model, make_plans, make_population
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult, to_json
from noisewise.noise import aggregate_noise
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "studies" / "results", ROOT / "runs" / "study"
PILOT_ROUNDS, PILOT_SEED = 40, 1000
RATES = (0.003, 0.01, 0.03, 0.1)  # the pilots of softmax regression, and then
FINER = 1.8  # this factor below and above the best of them, and on, if that is at an end
MOST_PILOTS = 12
TOGETHER = 63  # runs in lock step: each needs about 90 MB
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
                    {"population.epsilon": dist}, method, RATES, seed,
                )  # fmt: skip


PUBLISHED = {  # the paper's learning rates on MNIST
    "Dist9": {"RobustHDP": 0.002, "WeiAvg": 0.001},
    "Dist6": {"RobustHDP": 0.002, "WeiAvg": 0.001},
    "Dist1": {"RobustHDP": 0.01, "WeiAvg": 0.01},
}
SAME_NOISE = {"Dist9": 0.00125, "Dist6": 0.00175, "Dist1": 0.0074}  # `same_noise`, rounded
HALF = "NoiseWise, half the rate"  # of Robust-HDP; what was run first, see the page


def cnn() -> Iterator[Cell]:
    """The paper's CNN on Dist1, 6, 9. A pilot costs too much: rates are the published ones."""
    for dist, published in PUBLISHED.items():
        rates = {"NoiseWise": SAME_NOISE[dist], **published}
        if dist != "Dist1":
            rates[HALF] = published["RobustHDP"] / 2
        for label, rate in rates.items():
            yield Cell(
                "cnn", f"{dist}-{label}", "cnn_iid.toml", {"population.epsilon": dist},
                label.partition(",")[0], (rate,), 0,
            )  # fmt: skip


def one_round(dist: str, name: str) -> tuple[float, float]:
    """What a round of the CNN does to the model, at rate 1 and from the plans alone.

    Returns:
        By how many average local steps it moves the model, and the length of its noise, for weights
        from true noise (which NoiseWise and Robust-HDP all but reach) or from epsilons (WeiAvg).
    """
    config = load_config(ROOT / "configs" / "study" / "cnn_iid.toml", {"population.epsilon": dist})
    method = make_method(name)
    plans = make_plans(config, make_population(config, seed=0), method)
    size = sum(p.numel() for p in make_initial_model(config, seed=0).parameters())
    noise = [plan_noise(plan, size, 1.0, normalised=method.normalise) for plan in plans]
    if name == "WeiAvg":
        weights = proportional_weights([plan.budget.epsilon for plan in plans if plan.budget])
    else:
        weights = inverse_variance_weights(noise)
    steps = [1 if method.normalise else plan.steps_per_round for plan in plans]
    factor = method.settled(plans).server_rate
    return float(factor * weights @ steps), factor * aggregate_noise(weights, noise) ** 0.5


def same_noise(dist: str) -> float:
    """NoiseWise's rate at which a round moves the model by as much noise as Robust-HDP's does."""
    (_, theirs), (_, ours) = (one_round(dist, name) for name in ("RobustHDP", "NoiseWise"))
    return PUBLISHED[dist]["RobustHDP"] * theirs / ours


def hetero() -> Iterator[Cell]:
    """60 clients with at most 8 labels each, mixed batches: where the paper's method loses.

    A pursuit of 60 columns takes as long as a round of all methods together, so Robust-HDP's
    weights come from the first round here, as in the authors' code; the ablation has both.
    """
    options = {"RobustHDP": ABLATION["Robust-HDP, estimated once"][1]}
    for seed in range(3):
        for dist in DISTS:
            for method in METHODS:
                yield Cell(
                    "hetero", f"{dist}-{method}", "softmax_60.toml", {"population.epsilon": dist},
                    method, RATES, seed, options.get(method, {}),
                )  # fmt: skip


def two_labels() -> Iterator[Cell]:
    """Two labels a client: how far all of it breaks, and what the weights' regard is worth."""
    parts = {"without spread": ABLATION["without spread"]}
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for label, (method, options) in ({m: (m, {}) for m in METHODS[:5]} | parts).items():
                yield Cell(
                    "two_labels", f"{dist}-{label}", "softmax_2labels.toml",
                    {"population.epsilon": dist}, method, RATES, seed, options,
                )  # fmt: skip


ABLATION: dict[str, tuple[str, dict[str, Any]]] = {
    "without normalising (loadings)": ("NoiseWise", {"normalise": False}),
    "without smoothing": ("NoiseWise", {"smooth": 1}),
    "without spread": ("NoiseWise", {"spread": 0}),
    "with pcp": ("NoiseWise", {"estimator": "pcp"}),
    "with norms": ("NoiseWise", {"estimator": "norm"}),
    "with average of 10 rounds": ("NoiseWise", {"average_rounds": 10}),
    "with 750 server steps": ("NoiseWise", {"server_steps": 750}),  # ten times the plans' median
    "Robust-HDP, estimated once": ("RobustHDP", {"estimate": "first"}),
    "Robust-HDP, normalised": ("RobustHDP", {"normalise": True}),
    "Robust-HDP, average of 10 rounds": ("RobustHDP", {"average_rounds": 10}),
    "true noise, normalised": ("Oracle", {"normalise": True}),
    "true noise": ("Oracle", {}),
}


def ablation() -> Iterator[Cell]:
    """Part by part, each variant with pilots of its own; the whole methods are in `softmax`."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for label, (method, options) in ABLATION.items():
                yield Cell(
                    "ablation", f"{dist}-{label}", "softmax_iid.toml",
                    {"population.epsilon": dist}, method, RATES, seed, options,
                )  # fmt: skip


def ablation_60() -> Iterator[Cell]:
    """The same with different data; the whole methods are in `hetero`.

    "True noise" is what Robust-HDP would do with perfect estimates in every round.
    """
    once = {"normalise": True, **ABLATION["Robust-HDP, estimated once"][1]}
    labels = ["without smoothing", "without spread", "with norms"]
    labels += ["true noise", "true noise, normalised"]
    parts = {label: ABLATION[label] for label in labels}
    parts["Robust-HDP, estimated once, normalised"] = ("RobustHDP", once)
    for seed in range(3):
        for dist in ("Dist2", "Dist4", "Dist6", "Dist9"):
            for label, (method, options) in parts.items():
                yield Cell(
                    "ablation_60", f"{dist}-{label}", "softmax_60.toml",
                    {"population.epsilon": dist}, method, RATES, seed, options,
                )  # fmt: skip


def accountant() -> Iterator[Cell]:
    """The accountant as a step of its own: the paper's `moments` against `pld`."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for method in ("NoiseWise", "RobustHDP"):
                yield Cell(
                    "accountant", f"{dist}-{method}-moments", "softmax_iid.toml",
                    {"population.epsilon": dist, "training.accountant": "moments"}, method,
                    RATES, seed,
                )  # fmt: skip


PARTS = {
    f.__name__: f
    for f in (softmax, cnn, hetero, two_labels, ablation, ablation_60, accountant)
}  # fmt: skip


def slug(text: str) -> str:
    """A name for files."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def result_file(cell: Cell) -> Path:
    """Where a cell's result is committed."""
    return RESULTS / cell.part / f"{slug(cell.name)}-seed{cell.seed}.json"


@dataclass(frozen=True)
class Trial:
    """One run: a cell at a rate, whole or as a pilot."""

    cell: Cell
    rate: float
    pilot: bool

    @property
    def folder(self) -> Path:
        """Where its checkpoints are."""
        if self.pilot:
            return RUNS / "pilots" / pilot_file(self.cell, self.rate).stem
        return RUNS / self.cell.part / f"{slug(self.cell.name)}-seed{self.cell.seed}"

    def what(self) -> tuple[ExperimentConfig, Job]:
        """What is run."""
        cell, overrides = self.cell, dict(self.cell.overrides)
        path = ROOT / "configs" / "study" / cell.config
        if self.pilot:  # the budget lasts for all rounds, of which a pilot plays the first
            overrides["population.planned_rounds"] = load_config(path, overrides).training.rounds
            overrides["training.rounds"] = PILOT_ROUNDS
        method = MethodConfig(name=cell.method, options=cell.options, learning_rate=self.rate)
        return load_config(path, overrides), Job(method, PILOT_SEED if self.pilot else cell.seed)

    def play(self, executor: MakeExecutor) -> RunResult:
        """Run it."""
        return run(*self.what(), folder=self.folder, executor=executor)


def play_all(trials: list[Trial]) -> list[RunResult]:
    """Runs in lock step, not too many at once."""
    alike = {(trial.cell.method, str(trial.cell.overrides)): trial for trial in trials}
    for trial in alike.values():
        config, job = trial.what()
        for _ in warm_up(config, [job]):  # once, not by each of the runs at the same time
            pass
    parts = [trials[k : k + TOGETHER] for k in range(0, len(trials), TOGETHER)]
    return [result for part in parts for result in in_lock_step([t.play for t in part])]


def pilot_file(cell: Cell, rate: float) -> Path:
    """Where a pilot's train loss is committed."""
    name = f"{slug(cell.config)}-{slug(json.dumps(cell.overrides, sort_keys=True))}-{cell.method}"
    options = slug(json.dumps(cell.options, sort_keys=True)) if cell.options else ""
    return RESULTS / "pilots" / (slug(f"{name}{options}-rate{rate:g}") + ".json")


def play_pilots(cells: list[Cell]) -> None:
    """The pilots of some cells that are missing; leaves their train losses in files."""
    choosing = [cell for cell in cells if len(cell.rates) > 1]
    while wanted := [(cell, rate) for cell in choosing for rate in pilots(cell)[1]]:
        _play_missing(wanted)


def _play_missing(wanted: list[tuple[Cell, float]]) -> None:
    found = {pilot_file(cell, rate): Trial(cell, rate, pilot=True) for cell, rate in wanted}
    missing = {file: trial for file, trial in found.items() if not file.exists()}
    for (file, trial), result in zip(
        missing.items(), play_all(list(missing.values())), strict=True
    ):
        losses = [r.mean_train_loss for r in result.rounds if r.train_loss is not None][-2:]
        sound = result.status == "finished" and bool(np.isfinite(losses).all())
        loss = float(np.mean(losses)) if sound else None
        content = to_json({"rate": trial.rate, "train_loss": loss}) + "\n"
        write_atomic(file, content.encode())


def pilots(cell: Cell) -> tuple[dict[float, float], tuple[float, ...]]:
    """Train loss after each pilot, infinite where it diverged; and the rates still to be tried."""
    losses: dict[float, float] = {}
    wanted = cell.rates
    while wanted:
        missing = tuple(rate for rate in wanted if not pilot_file(cell, rate).exists())
        if missing:
            return losses, missing
        for rate in wanted:
            loss = json.loads(pilot_file(cell, rate).read_text())["train_loss"]
            losses[rate] = float("inf") if loss is None else float(loss)
        best = min(losses, key=lambda rate: losses[rate])
        beside = float(f"{best / FINER:.2g}"), float(f"{best * FINER:.2g}")
        if len(losses) == len(cell.rates):
            wanted = beside
        elif best not in (min(losses), max(losses)) or len(losses) >= MOST_PILOTS:
            wanted = ()
        else:
            wanted = beside[:1] if best == min(losses) else beside[1:]
    return losses, ()


def pilot_losses(cell: Cell) -> dict[float, float]:
    """All pilots of a cell; none where its rate was given."""
    return pilots(cell)[0] if len(cell.rates) > 1 else {}


def work(cells: list[Cell]) -> str:
    """Pilots, then the cells themselves; their results go to files."""
    began = time.time()
    play_pilots(cells)
    trials = []
    for cell in cells:
        losses = pilot_losses(cell)
        rate = min(losses, key=lambda r: losses[r]) if losses else cell.rates[0]
        trials.append(Trial(cell, rate, pilot=False))
    lines = [keep(trial, result) for trial, result in zip(trials, play_all(trials), strict=True)]
    return "\n".join([*lines, f"  {(time.time() - began) / 60:.1f} min"])


def keep(trial: Trial, result: RunResult) -> str:
    """Write a cell's result; returns it in words."""
    cell, file = trial.cell, result_file(trial.cell)
    seen = [r for r in result.rounds if r.accuracy is not None]
    shares = [r.signal_share for r in result.rounds if r.signal_share is not None]
    content = {
        "part": cell.part, "cell": cell.name, "method": cell.method, "options": cell.options,
        "config": cell.config, "overrides": cell.overrides, "seed": cell.seed,
        "learning_rate": trial.rate,
        "pilot_train_loss": {str(r): loss for r, loss in pilot_losses(cell).items()},
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
    return f"{cell.part} {file.stem}: {100 * seen[-1].mean_accuracy:.2f} % at {trial.rate:g}"


def groups(cells: list[Cell]) -> list[list[Cell]]:
    """Cells to run in lock step: softmax regression with one config and seed.

    The populations' batch sizes are the same, only their budgets differ, and so their clients'
    samples and normals are the same as well.
    """
    found: dict[object, list[Cell]] = {}
    for cell in cells:
        key: tuple[object, ...] = (cell.part, cell.config, cell.seed)
        if load_config(ROOT / "configs" / "study" / cell.config).model.name != "softmax":
            key = (*key, cell.name)
        found.setdefault(key, []).append(cell)
    return list(found.values())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _use(folder: Path) -> None:
    """Results, and checkpoints unless they are the committed ones, go to a folder."""
    global RESULTS, RUNS
    if folder != RESULTS:
        RESULTS, RUNS = folder, folder / "runs"


def chosen(cells: list[Cell], options: argparse.Namespace) -> list[Cell]:
    """The cells that the command asks for, once each."""
    if options.dists:
        cells = [c for c in cells if c.name.partition("-")[0] in options.dists.split(",")]
    if options.methods:
        cells = [cell for cell in cells if cell.method in options.methods.split(",")]
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        alike = {result_file(replace(cell, seed=0)): cell for cell in cells}
        cells = [replace(cell, seed=seed) for cell in alike.values() for seed in seeds]
    return cells


def main() -> None:
    """Run the cells of the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="start none after so many")
    parser.add_argument("--dists", help="these populations only: Dist6,Dist9")
    parser.add_argument("--methods", help="these methods only: NoiseWise,RobustHDP")
    parser.add_argument("--seeds", help="these seeds instead of the study's: 7,8")
    parser.add_argument("--results", type=Path, help="folder of results instead of the committed")
    options = parser.parse_args()
    if options.results is not None:
        _use(options.results)
    cells = chosen([cell for part in options.parts for cell in PARTS[part]()], options)
    left = [cell for cell in cells if not result_file(cell).exists()]
    print(f"{len(cells)} cells, {len(left)} left", flush=True)
    end = time.time() + 60 * options.minutes
    with ProcessPoolExecutor(options.workers, initializer=_use, initargs=(RESULTS,)) as pool:
        queue = iter(groups(left))
        running: set[Future[str]] = set()
        while True:
            while len(running) < options.workers and time.time() < end:
                some = next(queue, None)
                if some is None:
                    break
                running.add(pool.submit(work, some))
            if not running:
                break
            done = {future for future in running if future.done()}
            for future in done:
                try:
                    print(future.result(), flush=True)
                except Exception as error:  # a bad cell must not end the study
                    print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            running -= done
            time.sleep(0.5)


if __name__ == "__main__":
    main()
