"""Run the study of docs/noisewise_study.md: pilots for learning rates, then all study runs.

    python studies/method.py softmax cnn hetero ablation accountant ... [--workers 2] [--minutes 90]
    python studies/method.py softmax --dists Dist6 --seeds 7,8 --results runs/again

A study run is one population, method and seed with a config of configs/study/. Its result is one
line of studies/results/PART.jsonl, which is committed. The command skips study runs that have a
result and resumes interrupted ones from their checkpoints under runs/study/.

Learning rates come from pilots of 40 rounds with their own seed: six trials for every method, and
more while the best rate is the largest or the smallest of those tried. The rate with the smallest
loss on training records is chosen. (The pilots split the records with their own seed as well, so
most records that a study run holds out are among those that the pilots trained on. This is the same
for all methods.)

Study runs of softmax regression that share config and seed run in lock step
(`noisewise.federation.lockstep`), several times as fast as `noisewise run`. The results of both
agree up to rounding.
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
from result_store import Result, ResultFile

from noisewise.aggregation.noise_floor import plan_noise
from noisewise.aggregation.weights import inverse_variance_weights, proportional_weights
from noisewise.experiments.comparison import cache_spending
from noisewise.experiments.config import ExperimentConfig, MethodConfig, load_config
from noisewise.experiments.prepare import prepare
from noisewise.experiments.runner import run
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult
from noisewise.noise import aggregate_noise

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "studies" / "results", ROOT / "runs" / "study"
PILOT_ROUNDS, PILOT_SEED = 40, 1000
RATES = (0.003, 0.01, 0.03, 0.1)  # the pilots of softmax regression, and then
FINER = 1.8  # this factor below and above the best of them, repeated while the best is at an end
MOST_PILOTS = 12
TOGETHER = 63  # runs in lock step: each needs about 90 MB
DISTS = [f"Dist{k}" for k in (6, 9, 1, 3, 5, 8, 2, 4, 7)]
METHODS = ["NoiseWise", "RobustHDP", "WeiAvg", "DPFedAvg", "BudgetAvg", "PFA", "MinEpsilon"]


@dataclass(frozen=True)
class StudyRun:
    """One run of the study: a population and a method, with one seed.

    Attributes:
        part: the part of the study; it names the file of results.
        name: the population and the label of the method, such as ``Dist6-NoiseWise``.
        config: the file under configs/study/.
        overrides: config fields that differ from the file.
        method: the name of the method.
        rates: the learning rates that the pilots try first; a single rate needs no pilot.
        seed: the seed of the run.
        options: the options of the method.
    """

    part: str
    name: str
    config: str
    overrides: dict[str, Any]
    method: str
    rates: tuple[float, ...]
    seed: int
    options: dict[str, Any] = field(default_factory=dict)


def softmax() -> Iterator[StudyRun]:
    """Softmax regression, iid, all populations and methods, three paired seeds."""
    for seed in range(3):
        for dist in DISTS:
            for method in METHODS:
                yield StudyRun(
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


def cnn() -> Iterator[StudyRun]:
    """The paper's CNN on Dist1, 6, 9, at the published rates: pilots would take too long."""
    for dist, published in PUBLISHED.items():
        rates = {"NoiseWise": SAME_NOISE[dist], **published}
        if dist != "Dist1":
            rates[HALF] = published["RobustHDP"] / 2
        for label, rate in rates.items():
            yield StudyRun(
                "cnn", f"{dist}-{label}", "cnn_iid.toml", {"population.epsilon": dist},
                label.partition(",")[0], (rate,), 0,
            )  # fmt: skip


def one_round(dist: str, name: str) -> tuple[float, float]:
    """Compute from the plans what a round of the CNN does to the model at learning rate 1.

    The weights come from the epsilons for WeiAvg and from the true noise for the other methods,
    whose estimated weights are almost the same.

    Returns:
        The number of average local steps by which the round moves the model, and the length of the
        noise in it.
    """
    config = load_config(ROOT / "configs" / "study" / "cnn_iid.toml", {"population.epsilon": dist})
    prepared = prepare(config, MethodConfig(name=name), 0)
    method, plans = prepared.method, prepared.plans
    size = len(prepared.initial_parameters)
    noise = [plan_noise(plan, size, 1.0, normalised=method.normalise) for plan in plans]
    if name == "WeiAvg":
        weights = proportional_weights([plan.budget.epsilon for plan in plans if plan.budget])
    else:
        weights = inverse_variance_weights(noise)
    steps = [1 if method.normalise else plan.steps_per_round for plan in plans]
    factor = method.server_rate
    return float(factor * weights @ steps), factor * aggregate_noise(weights, noise) ** 0.5


def same_noise(dist: str) -> float:
    """Return NoiseWise's rate at which a round has as much noise as one of Robust-HDP."""
    (_, theirs), (_, ours) = (one_round(dist, name) for name in ("RobustHDP", "NoiseWise"))
    return PUBLISHED[dist]["RobustHDP"] * theirs / ours


def hetero() -> Iterator[StudyRun]:
    """60 clients with at most 8 labels each, mixed batches: where the paper's method loses.

    A pursuit of 60 columns takes as long as a round of all methods together. So Robust-HDP
    estimates its weights in the first round only, as in the authors' code; the ablation has both.
    """
    options = {"RobustHDP": ABLATION["Robust-HDP, estimated once"][1]}
    for seed in range(3):
        for dist in DISTS:
            for method in METHODS:
                yield StudyRun(
                    "hetero", f"{dist}-{method}", "softmax_60.toml", {"population.epsilon": dist},
                    method, RATES, seed, options.get(method, {}),
                )  # fmt: skip


def two_labels() -> Iterator[StudyRun]:
    """Two labels per client: how much all methods lose, and what the term for spread gains."""
    parts = {"without spread": ABLATION["without spread"]}
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for label, (method, options) in ({m: (m, {}) for m in METHODS[:5]} | parts).items():
                yield StudyRun(
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


def ablation() -> Iterator[StudyRun]:
    """Variants of the methods, each with its own pilots; the full methods are in `softmax`."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for label, (method, options) in ABLATION.items():
                yield StudyRun(
                    "ablation", f"{dist}-{label}", "softmax_iid.toml",
                    {"population.epsilon": dist}, method, RATES, seed, options,
                )  # fmt: skip


def ablation_60() -> Iterator[StudyRun]:
    """Variants on data that differ between clients; the full methods are in `hetero`.

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
                yield StudyRun(
                    "ablation_60", f"{dist}-{label}", "softmax_60.toml",
                    {"population.epsilon": dist}, method, RATES, seed, options,
                )  # fmt: skip


def accountant() -> Iterator[StudyRun]:
    """The effect of the accountant alone: the paper's `moments` against `pld`."""
    for seed in range(3):
        for dist in ("Dist6", "Dist9"):
            for method in ("NoiseWise", "RobustHDP"):
                yield StudyRun(
                    "accountant", f"{dist}-{method}-moments", "softmax_iid.toml",
                    {"population.epsilon": dist, "training.accountant": "moments"}, method,
                    RATES, seed,
                )  # fmt: skip


PARTS = {
    f.__name__: f
    for f in (softmax, cnn, hetero, two_labels, ablation, ablation_60, accountant)
}  # fmt: skip


def slug(text: str) -> str:
    """Return a text as a name for files."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def result_file(part: str) -> ResultFile:
    """Return the file with the results of a part, one line for each study run."""
    return ResultFile(RESULTS / f"{part}.jsonl", ("name", "seed"))


def result_of(study_run: StudyRun) -> Result | None:
    """Return the committed result of a study run, or None if it is missing."""
    return result_file(study_run.part).get({"name": study_run.name, "seed": study_run.seed})


def pilot_file() -> ResultFile:
    """Return the file with the train losses of all pilots."""
    fields = ("config", "overrides", "method", "options", "rate")
    return ResultFile(RESULTS / "pilots.jsonl", fields)


def pilot_fields(study_run: StudyRun, rate: float) -> dict[str, Any]:
    """Return the fields that identify a pilot; study runs that differ in seed share it."""
    return {
        "config": study_run.config, "overrides": study_run.overrides, "method": study_run.method,
        "options": study_run.options, "rate": rate,
    }  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A study run at one learning rate, in full or as a pilot."""

    study_run: StudyRun
    rate: float
    pilot: bool

    @property
    def folder(self) -> Path:
        """The folder of its checkpoints."""
        of = self.study_run
        if not self.pilot:
            return RUNS / of.part / f"{slug(of.name)}-seed{of.seed}"
        name = f"{slug(of.config)}-{slug(json.dumps(of.overrides, sort_keys=True))}-{of.method}"
        options = slug(json.dumps(of.options, sort_keys=True)) if of.options else ""
        return RUNS / "pilots" / slug(f"{name}{options}-rate{self.rate:g}")

    def what(self) -> tuple[ExperimentConfig, MethodConfig, int]:
        """Return the config, the method and the seed."""
        of, overrides = self.study_run, dict(self.study_run.overrides)
        path = ROOT / "configs" / "study" / of.config
        if self.pilot:  # plan the budget for all rounds; a pilot runs only the first of them
            overrides["population.planned_rounds"] = load_config(path, overrides).training.rounds
            overrides["training.rounds"] = PILOT_ROUNDS
        method = MethodConfig(name=of.method, options=of.options, learning_rate=self.rate)
        return load_config(path, overrides), method, PILOT_SEED if self.pilot else of.seed

    def play(self, executor: MakeExecutor) -> RunResult:
        """Run the trial, or resume it from its checkpoint."""
        return run(*self.what(), folder=self.folder, executor=executor)


def play_all(trials: list[Trial]) -> list[RunResult]:
    """Run trials in lock step, at most `TOGETHER` at a time."""
    alike = {(trial.study_run.method, str(trial.study_run.overrides)): trial for trial in trials}
    for trial in alike.values():
        cache_spending(prepare(*trial.what()).plans)  # once, not in each of the threads
    batches = [trials[k : k + TOGETHER] for k in range(0, len(trials), TOGETHER)]
    return [result for batch in batches for result in in_lock_step([t.play for t in batch])]


def play_pilots(study_runs: list[StudyRun]) -> None:
    """Run the missing pilots of some study runs and store their train losses."""
    choosing = [study_run for study_run in study_runs if len(study_run.rates) > 1]
    while wanted := [(study_run, rate) for study_run in choosing for rate in pilots(study_run)[1]]:
        _play_missing(wanted)


def _play_missing(wanted: list[tuple[StudyRun, float]]) -> None:
    file = pilot_file()
    trials: dict[str, Trial] = {}  # by key: study runs of several seeds share a pilot
    for study_run, rate in wanted:
        fields = pilot_fields(study_run, rate)
        if file.get(fields) is None:
            trials[file.key_of(fields)] = Trial(study_run, rate, pilot=True)
    missing = list(trials.values())
    for trial, result in zip(missing, play_all(missing), strict=True):
        losses = [r.mean_train_loss for r in result.rounds if r.train_loss is not None][-2:]
        sound = result.status == "finished" and bool(np.isfinite(losses).all())
        loss = float(np.mean(losses)) if sound else None
        file.add(pilot_fields(trial.study_run, trial.rate) | {"train_loss": loss})


def pilots(study_run: StudyRun) -> tuple[dict[float, float], tuple[float, ...]]:
    """Return the train loss of each finished pilot and the rates that are still to be tried.

    The loss is infinite where the pilot diverged.
    """
    losses: dict[float, float] = {}
    wanted, file = study_run.rates, pilot_file()
    while wanted:
        results = {rate: file.get(pilot_fields(study_run, rate)) for rate in wanted}
        missing = tuple(rate for rate, result in results.items() if result is None)
        if missing:
            return losses, missing
        for rate, result in results.items():
            loss = None if result is None else result["train_loss"]
            losses[rate] = float("inf") if loss is None else float(loss)
        best = min(losses, key=lambda rate: losses[rate])
        beside = float(f"{best / FINER:.2g}"), float(f"{best * FINER:.2g}")
        if len(losses) == len(study_run.rates):
            wanted = beside
        elif best not in (min(losses), max(losses)) or len(losses) >= MOST_PILOTS:
            wanted = ()
        else:
            wanted = beside[:1] if best == min(losses) else beside[1:]
    return losses, ()


def pilot_losses(study_run: StudyRun) -> dict[float, float]:
    """Return the losses of all pilots of a study run; empty if its learning rate is given."""
    return pilots(study_run)[0] if len(study_run.rates) > 1 else {}


def work(study_runs: list[StudyRun]) -> str:
    """Run the pilots, then the study runs, and store the results; returns lines for the log."""
    began = time.time()
    play_pilots(study_runs)
    trials = []
    for study_run in study_runs:
        losses = pilot_losses(study_run)
        rate = min(losses, key=lambda r: losses[r]) if losses else study_run.rates[0]
        trials.append(Trial(study_run, rate, pilot=False))
    lines = [keep(trial, result) for trial, result in zip(trials, play_all(trials), strict=True)]
    return "\n".join([*lines, f"  {(time.time() - began) / 60:.1f} min"])


def keep(trial: Trial, result: RunResult) -> str:
    """Store the result of a study run; returns a line for the log."""
    of = trial.study_run
    evaluated = [r for r in result.rounds if r.accuracy is not None]
    shares = [r.signal_share for r in result.rounds if r.signal_share is not None]
    content = {
        "part": of.part, "name": of.name, "method": of.method, "options": of.options,
        "config": of.config, "overrides": of.overrides, "seed": of.seed,
        "learning_rate": trial.rate,
        "pilot_train_loss": {str(r): loss for r, loss in pilot_losses(of).items()},
        "status": result.status,
        "curve": [[r.round, round(r.mean_accuracy, 5)] for r in evaluated],
        "accuracy": evaluated[-1].mean_accuracy,
        "client_accuracy_std": float(np.std(list((evaluated[-1].accuracy or {}).values()))),
        "signal_share": float(np.mean(shares)) if shares else None,
        "noise_ratio": result.rounds[-1].noise_ratio,
        "date": datetime.date.today().isoformat(), "commit": _commit(),
        "machine": f"{platform.machine()}, one core",
    }  # fmt: skip
    result_file(of.part).add(content)
    accuracy = f"{100 * evaluated[-1].mean_accuracy:.2f} %"
    return f"{of.part} {of.name}, seed {of.seed}: {accuracy} at learning rate {trial.rate:g}"


def groups(study_runs: list[StudyRun]) -> list[list[StudyRun]]:
    """Group the study runs that run in lock step: softmax regression with one config and seed.

    The populations have the same batch sizes and differ in their budgets only, so their clients
    draw the same samples and the same standard normal numbers.
    """
    by_key: dict[object, list[StudyRun]] = {}
    for study_run in study_runs:
        key: tuple[object, ...] = (study_run.part, study_run.config, study_run.seed)
        if load_config(ROOT / "configs" / "study" / study_run.config).model.name != "softmax":
            key = (*key, study_run.name)
        by_key.setdefault(key, []).append(study_run)
    return list(by_key.values())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _use(folder: Path) -> None:
    """Write results to a folder, and checkpoints below it if it is not the committed one."""
    global RESULTS, RUNS
    if folder != RESULTS:
        RESULTS, RUNS = folder, folder / "runs"


def chosen(study_runs: list[StudyRun], options: argparse.Namespace) -> list[StudyRun]:
    """Return the study runs that the command line selects, once each."""
    if options.dists:
        dists = options.dists.split(",")
        study_runs = [r for r in study_runs if r.name.partition("-")[0] in dists]
    if options.methods:
        study_runs = [r for r in study_runs if r.method in options.methods.split(",")]
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        alike = {(r.part, r.name): r for r in study_runs}
        study_runs = [replace(r, seed=seed) for r in alike.values() for seed in seeds]
    return study_runs


def main() -> None:
    """Run the study runs that the command line selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--dists", help="run only these populations: Dist6,Dist9")
    parser.add_argument("--methods", help="run only these methods: NoiseWise,RobustHDP")
    parser.add_argument("--seeds", help="use these seeds instead of the study's: 7,8")
    parser.add_argument(
        "--results", type=Path, help="folder for results instead of studies/results"
    )
    options = parser.parse_args()
    if options.results is not None:
        _use(options.results)
    study_runs = chosen([r for part in options.parts for r in PARTS[part]()], options)
    left = [study_run for study_run in study_runs if result_of(study_run) is None]
    print(f"{len(study_runs)} study runs, {len(left)} of them without a result", flush=True)
    end = time.time() + 60 * options.minutes
    with ProcessPoolExecutor(options.workers, initializer=_use, initargs=(RESULTS,)) as pool:
        queue = iter(groups(left))
        running: set[Future[str]] = set()
        while True:
            while len(running) < options.workers and time.time() < end:
                group = next(queue, None)
                if group is None:
                    break
                running.add(pool.submit(work, group))
            if not running:
                break
            done = {future for future in running if future.done()}
            for future in done:
                try:
                    print(future.result(), flush=True)
                except Exception as error:  # a failed run must not end the study
                    print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            running -= done
            time.sleep(0.5)


if __name__ == "__main__":
    main()
