"""Run the study of docs/utility.md: private heads on public features, without tuning.

    python studies/utility.py mnist fashion cifar10 encoder [--seeds 0,1,2] [--workers 2]
    python studies/utility.py fars heart vietnam spam --seeds 0,1,2,3,4,5,6,7,8,9
    python studies/utility.py mnist_pixels fashion_pixels cifar10_pixels
    python studies/utility.py mnist_steps fashion_steps cifar10_steps --seeds 0
    python studies/utility.py mnist_rule mnist_constant mnist_clip mnist_rounds --seeds 0
    python studies/utility.py mnist_grid fashion_grid cifar10_grid encoder_grid --seeds 0
    python studies/utility.py mnist --dists Dist6 --seeds 7 --results runs/again

A run is one population, method, learning rate and seed with a config of configs/. Its result is one
line of studies/results/utility.jsonl, which is committed. The command skips runs that have a
result. Runs that share config and seed run in lock step (`noisewise.federation.lockstep`); they
agree with `noisewise run` up to rounding.

The rule behind `learning_rate = "auto"` was fixed on MNIST with Dist1 to Dist3. The runs with
`RATES` are the grid that it is compared with; no rate is chosen from them for any other result.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from result_store import ResultFile

from noisewise.aggregation.auto_steps import AUTO, AutoSteps
from noisewise.experiments.comparison import cache_spending
from noisewise.experiments.config import MethodConfig, load_config
from noisewise.experiments.prepare import SeedSetup, prepare, prepare_seed
from noisewise.federation.executors import Execution
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RunResult
from noisewise.federation.simulation import simulate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "results" / "utility.jsonl"
DISTS = [f"Dist{k}" for k in range(1, 10)]
METHODS = ["NoiseWise", "RobustHDP", "WeiAvg", "PFA", "DPFedAvg", "MinEpsilon"]
RATES = (20.0, 50.0, 125.0, 300.0, 750.0, 1900.0)
TOGETHER = 120  # runs in lock step


@dataclass(frozen=True)
class StudyRun:
    """One run of the study.

    Attributes:
        part: the part of the study.
        config: the file under configs/.
        population: the name of a distribution of epsilons, and how they are ordered.
        method: the name of the method.
        rate: "auto", "auto" with another strength such as "auto 0.6", or a learning rate.
        seed: the seed of the run.
        options: the options of the method.
        fields: further config fields that differ from the file.
    """

    part: str
    config: str
    population: str
    method: str
    rate: float | str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        """The config fields that differ from the file."""
        epsilon, _, order = self.population.partition(" ")
        fields: dict[str, Any] = {"population.epsilon": epsilon, "training.evaluate_every": 20}
        return fields | ({"population.order": order} if order else {}) | dict(self.fields)


# Robust-HDP estimates its weights in the first round only, as in the authors' code: a pursuit in
# every round would take longer than all other parts of a round together.
OPTIONS: dict[str, dict[str, Any]] = {"RobustHDP": {"estimate": "first"}}
FEW = ["NoiseWise", "RobustHDP", "DPFedAvg"]
IMAGES = {  # part: config and methods
    "mnist": ("mnist_head.toml", FEW),
    "fashion": ("fashion_mnist_head.toml", FEW),
    "cifar10": ("cifar10_head.toml", FEW),
    "encoder": ("cifar10_encoder.toml", METHODS),
}


def automatic(part: str, seed: int) -> Iterator[StudyRun]:
    """All populations of a dataset, with several methods at the automatic rate."""
    config, methods = IMAGES[part]
    for dist in DISTS:
        for method in methods:
            yield StudyRun(part, config, dist, method, "auto", seed, OPTIONS.get(method, {}))


def grid(part: str, seed: int) -> Iterator[StudyRun]:
    """All populations of a dataset, with NoiseWise at each rate of the grid."""
    for dist in DISTS:
        for rate in RATES:
            yield StudyRun(part, IMAGES[part][0], dist, "NoiseWise", rate, seed)


PIXELS: dict[str, Any] = {"features.name": "identity"}
MOMENTS = PIXELS | {"training.accountant": "moments"}
STEPS_DIST = "Dist6"  # population of the figure that shows what each step is worth


def pixels(part: str, seed: int) -> Iterator[StudyRun]:
    """The same head on the pixels themselves: all populations at the automatic rate."""
    for dist in DISTS:
        for method in ("NoiseWise", "RobustHDP"):
            config, options = IMAGES[part][0], OPTIONS.get(method, {})
            yield StudyRun(f"{part}_pixels", config, dist, method, "auto", seed, options, PIXELS)


def steps(part: str, seed: int) -> Iterator[StudyRun]:
    """The grid on pixels: DPFedAvg with the paper's accountant and with ours, and NoiseWise."""
    for rate in RATES:
        for name, method, fields in (
            (f"{part}_moments", "DPFedAvg", MOMENTS),
            (f"{part}_pixels", "DPFedAvg", PIXELS),
            (f"{part}_pixels", "NoiseWise", PIXELS),
        ):
            config, options = IMAGES[part][0], OPTIONS.get(method, {})
            yield StudyRun(name, config, STEPS_DIST, method, rate, seed, options, fields)


STRENGTHS = (0.3, 0.6, 1.2, 2.4, 4.8)
DETAILS: dict[str, dict[str, Any]] = {  # part: what differs from the config
    "mnist_constant": {"model.options.constant": 1.0},
    "mnist_clip": {"training.clip_norm": 1.0},
    "mnist_rounds": {"training.rounds": 120},
}


def rule(seed: int) -> Iterator[StudyRun]:
    """The runs that the strength of the automatic steps was chosen by."""
    for dist in ("Dist1", "Dist2", "Dist3"):
        for strength in STRENGTHS:
            yield StudyRun(
                "mnist_rule", "mnist_head.toml", dist, "NoiseWise", f"auto {strength}", seed
            )


def details(part: str, seed: int) -> Iterator[StudyRun]:
    """One choice of the head's config changed."""
    for dist in ("Dist1", "Dist6"):
        fields = DETAILS[part]
        yield StudyRun(part, "mnist_head.toml", dist, "NoiseWise", "auto", seed, fields=fields)


FEDERATIONS = {  # part: distribution of the epsilons
    "fars": "Dist6",
    "heart": "Dist1",
    "vietnam": "Dist1",
    "spam": "Dist6",
}
ORDERS = ("", " small_strict", " large_strict")
REFERENCES = ["Alone", "BudgetAvg", "FedAvg", "Oracle"]


def federation(part: str, seed: int) -> Iterator[StudyRun]:
    """A real federation: epsilons in random order, and stricter for small or for large clients."""
    for order in ORDERS:
        for method in METHODS + REFERENCES:
            yield StudyRun(
                part, f"{part}.toml", FEDERATIONS[part] + order, method, "auto", seed,
                OPTIONS.get(method, {}) if part == "vietnam" else {},
            )  # fmt: skip


PARTS: dict[str, Callable[[int], Iterator[StudyRun]]] = {
    **{part: partial(automatic, part) for part in IMAGES},
    **{part: partial(federation, part) for part in FEDERATIONS},
    **{part: partial(details, part) for part in DETAILS},
    "mnist_rule": rule,
    **{f"{part}_pixels": partial(pixels, part) for part in ("mnist", "fashion", "cifar10")},
    **{f"{part}_steps": partial(steps, part) for part in ("mnist", "fashion", "cifar10")},
    **{f"{part}_grid": partial(grid, part) for part in IMAGES},
}


def result_file(path: Path = RESULTS) -> ResultFile:
    """The file with all results, one line for each run."""
    return ResultFile(path, ("part", "population", "method", "rate", "seed"))


def key_fields(study_run: StudyRun) -> dict[str, Any]:
    """The fields that identify a run; rates are text because one of them is "auto"."""
    rate = study_run.rate if isinstance(study_run.rate, str) else f"{study_run.rate:g}"
    return {
        "part": study_run.part, "population": study_run.population, "method": study_run.method,
        "rate": rate, "seed": study_run.seed,
    }  # fmt: skip


def play_together(study_runs: Sequence[StudyRun], workers: int) -> list[RunResult]:
    """Train runs with one config file and one seed in lock step."""
    setup: SeedSetup | None = None
    prepared: list[Prepared] = []
    for study_run in study_runs:
        config = load_config(ROOT / "configs" / study_run.config, study_run.overrides())
        setup = prepare_seed(config, study_run.seed, setup)
        rate, _, strength = str(study_run.rate).partition(" ")
        method = MethodConfig(
            name=study_run.method,
            learning_rate=rate if rate == AUTO else float(rate),
            options=dict(study_run.options),
        )
        run = prepare(config, method, study_run.seed, setup=setup)
        if strength:
            auto = AutoSteps(config.training.rounds, float(strength))
            run = replace(run, method=replace(run.method, auto=auto))
        prepared.append(run)
        cache_spending(prepared[-1].plans)

    def train(run: Prepared, executor: MakeExecutor) -> RunResult:
        # Clients that train alone are many runs of one client, which share nothing.
        alone = run.method.name == "Alone"
        return simulate(run, execution=None if alone else Execution(executor=executor))

    return in_lock_step(
        [lambda make, run=run: train(run, make) for run in prepared], workers=workers
    )


def keep(study_run: StudyRun, result: RunResult, file: ResultFile) -> None:
    """Store the result of a run."""
    last = next(r for r in reversed(result.rounds) if r.accuracy is not None)
    curve = [(r.round, round(r.mean_accuracy, 5)) for r in result.rounds if r.accuracy is not None]
    # Who gains by joining: only these two methods, and only where clients are real.
    shown = study_run.part in FEDERATIONS and study_run.method in ("Alone", "NoiseWise")
    clients = [[c, round(a, 4)] for c, a in (last.accuracy or {}).items()] if shown else []
    file.add(
        key_fields(study_run) | {
            "config": study_run.config, "status": result.status,
            "accuracy": last.mean_accuracy,
            "clients": clients,
            "curve": curve, "signal_share": last.signal_share,
            "date": datetime.date.today().isoformat(), "commit": _commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
    )  # fmt: skip


def main() -> None:
    """Run the missing runs of some parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    parser.add_argument("--dists", default=",".join(DISTS), help="populations to run")
    parser.add_argument("--workers", type=int, default=2, help="threads that train clients")
    parser.add_argument("--heart", help="folder with the files of the dataset heart")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args()
    file, dists = result_file(arguments.results), arguments.dists.split(",")
    for part in arguments.parts:
        for seed in map(int, arguments.seeds.split(",")):
            runs = [run for run in PARTS[part](seed) if run.population.split()[0] in dists]
            if part == "heart" and arguments.heart is not None:
                runs = [replace(run, fields={"data.folder": arguments.heart}) for run in runs]
            missing = [run for run in runs if file.get(key_fields(run)) is None]
            began = time.time()
            for start in range(0, len(missing), TOGETHER):
                batch = missing[start : start + TOGETHER]
                results = play_together(batch, arguments.workers)
                for study_run, result in zip(batch, results, strict=True):
                    keep(study_run, result, file)
            minutes = (time.time() - began) / 60
            print(f"{part}, seed {seed}: {len(missing)} runs in {minutes:.1f} min", flush=True)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
