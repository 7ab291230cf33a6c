"""Run the study of docs/utility.md: private heads on public features, without tuning.

    python studies/utility.py mnist fashion cifar10 encoder [--seeds 0,1,2] [--workers 2]
    python studies/utility.py fars heart vietnam spam --seeds 0,1,2,3,4,5,6,7,8,9
    python studies/utility.py mnist_pixels fashion_pixels cifar10_pixels
    python studies/utility.py mnist_steps fashion_steps cifar10_steps --seeds 0
    python studies/utility.py mnist_rule mnist_constant mnist_clip mnist_rounds --seeds 0
    python studies/utility.py mnist_grid fashion_grid cifar10_grid encoder_grid --seeds 0
    python studies/utility.py mnist_unhelpful
    python studies/utility.py few_digits few_mnist few_heart few_vietnam
    python studies/utility.py few_parameters --seeds 0,1,2,3,4,5,6,7,8,9
    python studies/utility.py cifar100 cifar100_encoder
    python studies/utility.py persons --workers 1
    python studies/utility.py fars_grid heart_grid vietnam_grid spam_grid --seeds 0,1,2
    python studies/utility.py fars_steps heart_steps --seeds 0,1,2
    python studies/utility.py vietnam_steps --seeds 0
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
from utility_variants import VARIANTS, Extrapolated

from noisewise.aggregation.auto_steps import AUTO, AutoSteps
from noisewise.errors import SourceError
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
SMALL_RATES = (2.0, 5.0, 10.0)  # also tried on the real federations, whose heads are small
OWN = "own"  # the population of the config
TOGETHER = 120  # runs in lock step


@dataclass(frozen=True)
class StudyRun:
    """One run of the study.

    Attributes:
        part: the part of the study.
        config: the file under configs/.
        population: the name of a distribution of epsilons, and how they are ordered.
        method: the name of the method.
        rate: "auto", "auto" with another strength or variant such as "auto 0.6" or "auto momentum"
            (`utility_variants`), or a learning rate.
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
        fields: dict[str, Any] = {"training.evaluate_every": 20}
        if epsilon != OWN:
            fields["population.epsilon"] = epsilon
        return fields | ({"population.order": order} if order else {}) | dict(self.fields)


# Robust-HDP estimates its weights in the first round only, as in the authors' code: a pursuit in
# every round would take longer than all other parts of a round together.
OPTIONS: dict[str, dict[str, Any]] = {"RobustHDP": {"estimate": "first"}}
FEW_METHODS = ["NoiseWise", "RobustHDP", "DPFedAvg"]
IMAGES = {  # part: config and methods
    "mnist": ("mnist_head.toml", FEW_METHODS),
    "fashion": ("fashion_mnist_head.toml", FEW_METHODS),
    "cifar10": ("cifar10_head.toml", FEW_METHODS),
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


def rates_of(part: str) -> tuple[float, ...]:
    """The rates of the grid of a part, in increasing order."""
    return SMALL_RATES + RATES if part.partition("_")[0] in FEDERATIONS else RATES


def federation_grid(part: str, seed: int) -> Iterator[StudyRun]:
    """A real federation with NoiseWise at each rate of the grid."""
    for order in ORDERS:
        for rate in rates_of(part):
            population = FEDERATIONS[part] + order
            yield StudyRun(part, f"{part}.toml", population, "NoiseWise", rate, seed)


def federation_steps(part: str, seed: int) -> Iterator[StudyRun]:
    """The grid for DPFedAvg on a real federation, with the paper's accountant and with ours."""
    fields = {"training.accountant": "moments"}
    for rate in rates_of(part):
        for name, changed in ((f"{part}_moments", fields), (part, {})):
            config, dist = f"{part}.toml", FEDERATIONS[part]
            yield StudyRun(name, config, dist, "DPFedAvg", rate, seed, fields=changed)


FEW: dict[str, tuple[str, str, tuple[float, ...], tuple[int, ...]]] = {
    # part: config, population, rates of the grid, numbers of rounds
    "few_digits": ("digits_head.toml", OWN, (20.0, 50.0, 125.0, 300.0), (*range(1, 9), 12, 16)),
    "few_mnist": ("mnist_head.toml", "Dist1", (50.0, 125.0, 300.0), (2, 3, 5, 7, 8, 12, 16)),
    "few_heart": ("heart.toml", "Dist1", (5.0, 20.0, 50.0, 125.0), (*range(1, 9), 12, 16)),
    "few_vietnam": ("vietnam.toml", "Dist1", (5.0, 20.0, 50.0, 125.0), (2, 4, 7, 8, 12, 16)),
}


def few_rounds(part: str, seed: int) -> Iterator[StudyRun]:
    """Runs of few rounds: the rule, the rule without its limit, and a grid of rates."""
    config, population, rates, lengths = FEW[part]
    for rounds in lengths:
        fields = {"training.rounds": rounds}
        for rate in ("auto", "auto no limit", *rates):
            name = f"{part}_{rounds}"
            yield StudyRun(name, config, population, "NoiseWise", rate, seed, fields=fields)


UNHELPFUL_DISTS = ("Dist1", "Dist2", "Dist3")
FIXED_RATES = (20.0, 300.0)  # with and without extrapolation


def unhelpful(seed: int) -> Iterator[StudyRun]:
    """What did not help, on MNIST with the populations that the rule was fixed on."""
    config, normalise = "mnist_head.toml", {"training.clip": "normalise"}
    for dist in UNHELPFUL_DISTS:
        for variant in ("no average", "momentum"):
            yield StudyRun("mnist_variant", config, dist, "NoiseWise", f"auto {variant}", seed)
        yield StudyRun("mnist_normalise", config, dist, "NoiseWise", "auto", seed, {}, normalise)
        for rate in FIXED_RATES:
            yield StudyRun("mnist", config, dist, "NoiseWise", rate, seed)
            yield StudyRun("mnist_extrapolated", config, dist, "NoiseWise", rate, seed)


FEW_PARAMETERS = (1, 3, 9, 31, 99, 316, 999)  # features of a head with 10 (features + 1) parameters


def few_parameters(seed: int) -> Iterator[StudyRun]:
    """The hospitals of the demo with random projections: only the number of parameters differs."""
    for width in FEW_PARAMETERS:
        fields = {"features.name": "random_projection:project", "features.options.width": width}
        for method in ("NoiseWise", "RobustHDP", "DPFedAvg"):
            part = f"few_parameters_{width}"
            yield StudyRun(part, "digits_head.toml", OWN, method, "auto", seed, fields=fields)


CIFAR100 = {"cifar100": "cifar100_head.toml", "cifar100_encoder": "cifar100_encoder.toml"}


def cifar100(part: str, seed: int) -> Iterator[StudyRun]:
    """All populations of CIFAR-100, whose images have to be in the cache."""
    for dist in DISTS:
        for method in FEW_METHODS:
            yield StudyRun(
                part, CIFAR100[part], dist, method, "auto", seed, OPTIONS.get(method, {})
            )


PERSONS_CONFIG, PERSONS_DISTS = "mnist_persons.toml", ("Dist1", "Dist6", "Dist9")
PERSONS_METHODS = ("NoiseWise", "RobustHDP")
PERSONS: dict[str, dict[str, Any]] = {  # part: what differs from the config
    "persons_record": {
        "data.records_per_person": None, "population.unit": "record", "population.max_records": None
    },
    "persons_4": {},
    "persons_16": {"data.records_per_person": 16, "population.max_records": 16},
}  # fmt: skip


def persons(seed: int) -> Iterator[StudyRun]:
    """The same records and epsilons, with budgets that protect records and persons."""
    for part, fields in PERSONS.items():
        for dist in PERSONS_DISTS:
            for method in PERSONS_METHODS:
                options = OPTIONS.get(method, {})
                yield StudyRun(part, PERSONS_CONFIG, dist, method, "auto", seed, options, fields)


PARTS: dict[str, Callable[[int], Iterator[StudyRun]]] = {
    **{part: partial(automatic, part) for part in IMAGES},
    **{part: partial(federation, part) for part in FEDERATIONS},
    **{part: partial(details, part) for part in DETAILS},
    "mnist_rule": rule,
    "mnist_unhelpful": unhelpful,
    "persons": persons,
    "few_parameters": few_parameters,
    **{part: partial(few_rounds, part) for part in FEW},
    **{part: partial(cifar100, part) for part in CIFAR100},
    **{f"{part}_pixels": partial(pixels, part) for part in ("mnist", "fashion", "cifar10")},
    **{f"{part}_steps": partial(steps, part) for part in ("mnist", "fashion", "cifar10")},
    **{f"{part}_grid": partial(grid, part) for part in IMAGES},
    **{f"{part}_grid": partial(federation_grid, part) for part in FEDERATIONS},
    **{f"{part}_steps": partial(federation_steps, part) for part in FEDERATIONS},
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
            rounds = config.training.rounds
            variant = VARIANTS.get(strength)
            auto = variant(rounds) if variant else AutoSteps(rounds, float(strength))
            run = replace(run, method=replace(run.method, auto=auto))
        if study_run.part == "mnist_extrapolated":
            method_of_run = replace(run.method, aggregator=Extrapolated(run.method.aggregator))
            run = replace(run, method=method_of_run)
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
    parser.add_argument("--dists", help="populations to run, such as Dist1,Dist6; default: all")
    parser.add_argument("--workers", type=int, default=2, help="threads that train clients")
    parser.add_argument("--heart", help="folder with the files of the dataset heart")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args()
    file, dists = result_file(arguments.results), (arguments.dists or "").split(",")
    for part in arguments.parts:
        for seed in map(int, arguments.seeds.split(",")):
            runs = list(PARTS[part](seed))
            if arguments.dists is not None:
                runs = [run for run in runs if run.population.split()[0] in dists]
            if part.startswith("heart") and arguments.heart is not None:
                folder = {"data.folder": arguments.heart}
                runs = [replace(run, fields={**run.fields, **folder}) for run in runs]
            missing = [run for run in runs if file.get(key_fields(run)) is None]
            began = time.time()
            for start in range(0, len(missing), TOGETHER):
                batch = missing[start : start + TOGETHER]
                try:
                    results = play_together(batch, arguments.workers)
                except SourceError as error:  # of CIFAR-100: no machine of ours has its images
                    raise SystemExit(f"{part}: not run: {' '.join(str(error).split())}") from None
                for study_run, result in zip(batch, results, strict=True):
                    keep(study_run, result, file)
            minutes = (time.time() - began) / 60
            print(f"{part}, seed {seed}: {len(missing)} runs in {minutes:.1f} min", flush=True)


def _commit() -> str:
    """The last commit that changed the library or the configs."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "src", "configs"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
