"""Run attackers that follow the noise policy against the guarded methods.

    python studies/hostile.py settings adaptive honest frontier more    # run what is missing
    python studies/hostile.py --tables                                  # print the tables

MNIST, softmax regression, Dist6, 20 clients with mixed batches, 30 rounds; the attackers are the
first f clients. The result of a run is one line of studies/results/hostile.jsonl; the command skips
runs that have a result. Runs that share records and seed train in lock step. The parts:

- settings: both methods behind the guard, under the three attacks of `noisewise attacks` that
  follow the policy; S1 has all records and a rate of 0.01, S2 has 20,000 records and 0.03.
  (Robust-HDP estimates by norms here, which is as good at this noise and faster than `pcp`.)
- adaptive: attackers that know the guard (`ADAPTIVE`), which the package does not contain.
- honest: no attack; two labels per client, sites of unequal size (settings of S1).
- frontier: numbers of records and learning rates.
- more: more attackers, also more than the guard tolerates.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_store import ResultFile
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, UpdateMatrix
from noisewise.experiments.config import AttackConfig, MethodConfig, load_config
from noisewise.experiments.prepare import prepare
from noisewise.experiments.runner import run
from noisewise.federation.attacks import Attack
from noisewise.federation.executors import Execution
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult
from noisewise.federation.simulation import simulate
from noisewise.noise.gram import gram_matrix
from noisewise.randomness import keyed_generator

ROOT = Path(__file__).parents[1]
KEY = ("part", "setting", "method", "attack", "attackers", "tolerated", "seed")
RESULTS = ResultFile(ROOT / "studies" / "results" / "hostile.jsonl", KEY)
CONFIG = ROOT / "configs" / "attacks.toml"
ATTACKS = ("sign_flip_at_floor", "antisign", "fixed")
TOGETHER = 32  # runs in lock step
S1: dict[str, Any] = {}
S2: dict[str, Any] = {"data.limit": 20000, "training.learning_rate": 0.03}
DATA: dict[str, dict[str, Any]] = {
    "2 labels": {"data.partition": "shards", "data.max_labels": 2},
    "unequal": {"data.partition": "quantity", "data.alpha": 2.0},
    "very unequal": {"data.partition": "quantity", "data.alpha": 1.0},
}
METHODS = ("NoiseWise", "RobustHDP")
OPTIONS: dict[str, dict[str, Any]] = {"NoiseWise": {}, "RobustHDP": {"estimator": "norm"}}
MORE = ((2, 1), (3, 1), (5, 3), (5, 5), (7, 7))  # attackers, tolerated
RECORDS, RATES = (8000, 20000, 60000), (0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class HostileRun:
    """One run of a method under an attack.

    Attributes:
        part: the part of the study.
        setting: the name of the overrides.
        method: the name of the method.
        attack: ``none``, one of `ATTACKS` or one of `ADAPTIVE`.
        attackers: how many clients attack.
        tolerated: how many attackers the guard tolerates; 0 is no guard.
        seed: the seed of the run.
        overrides: config fields that differ from configs/attacks.toml.
    """

    part: str
    setting: str
    method: str
    attack: str
    attackers: int
    tolerated: int
    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify the line of its result."""
        return {name: getattr(self, name) for name in KEY}

    @property
    def accuracy(self) -> float:
        """The accuracy in percent; NaN if the result is missing."""
        result = RESULTS.get(self.key)
        return math.nan if result is None else float(result["accuracy"])


@dataclass(frozen=True)
class Round:
    """What an attacker knows in a round.

    Attributes:
        number: of the round, from 1.
        own: [p] its clean direction, with the length of the clients' common signal.
        noise: [p] fresh normal noise of energy F.
        past: the model's earlier moves, [p] each.
        share: [p] whether a coordinate belongs to this one of the attackers.
    """

    number: int
    own: Tensor
    noise: Tensor
    past: Sequence[Tensor]
    share: Tensor


def _antisign(here: Round, own: Tensor) -> Tensor:
    return torch.where(here.share, -own.sign() * here.noise.abs(), here.noise)


def _honest(here: Round) -> Tensor:
    return here.noise + here.own


def _orthogonal(here: Round) -> Tensor:
    """Opposite signs of what is left of the direction beside the last moves of the model."""
    if not here.past:
        return _antisign(here, here.own)
    basis, _ = torch.linalg.qr(torch.stack(list(here.past[-8:]), 1))
    return _antisign(here, here.own - basis @ (basis.T @ here.own))


def _blocks(here: Round) -> Tensor:
    """Opposite signs on another quarter of the coordinates in each round."""
    mixed = torch.from_numpy(np.random.default_rng(5).permutation(len(here.own)) % 4)
    chosen = replace(here, share=here.share & (mixed == here.number % 4))
    return _antisign(chosen, here.own)


def _some_coordinates(here: Round) -> Tensor:
    """Opposite signs on a random sixth of the coordinates, drawn anew in each round."""
    drawn = np.random.default_rng(here.number).random(len(here.own)) < 1 / 6
    return _antisign(replace(here, share=here.share & torch.from_numpy(drawn)), here.own)


def _back_to_the_start(here: Round) -> Tensor:
    """Opposite signs of all that the model has moved so far."""
    return _antisign(here, torch.stack(list(here.past)).sum(0)) if here.past else here.noise


def _at_the_bound(here: Round) -> Tensor:
    """Noise without its part along the last moves, and four deviations of it backwards."""
    if not here.past:
        return here.noise
    along = torch.stack(list(here.past[-5:])).sum(0)
    along /= along.norm()
    deviation = here.noise.norm() / math.sqrt(len(here.noise))
    return here.noise - (here.noise @ along + 4 * deviation) * along


ADAPTIVE: dict[str, Callable[[Round], Tensor]] = {
    "flip of the common length": lambda here: here.noise - here.own,
    "beside past moves": _orthogonal,
    "rotating quarters": _blocks,
    "a random sixth": _some_coordinates,
    "back to the start": _back_to_the_start,
    "at the bound": _at_the_bound,
    "loud once, then antisign": lambda here: (
        1e4 * here.noise if here.number % 10 == 1 else _antisign(here, here.own)
    ),
    "honest for 10 rounds": lambda here: (
        _antisign(here, here.own) if here.number > 10 else _honest(here)
    ),
    "honest for 25 rounds": lambda here: (
        _antisign(here, here.own) if here.number > 25 else _honest(here)
    ),
    "honest for 28 rounds": lambda here: (
        _antisign(here, here.own) if here.number > 28 else _honest(here)
    ),
    "6 rounds honest, 3 not": lambda here: (
        _antisign(here, here.own) if (here.number - 1) % 9 >= 6 else _honest(here)
    ),
}
"""Attackers that know the guard: they keep the policy exactly and choose direction and time."""


@dataclass
class Hostile:
    """An aggregator whose first f columns are replaced before it sees them.

    The attackers must have sent their clean updates, as `sign_flip` does. Not resumable: it keeps
    the moves of the model.
    """

    inner: Any
    craft: Callable[[Round], Tensor]
    attackers: int
    floor: float
    seed: int
    past: list[Tensor] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[Disclosure]:
        """See `Aggregator`."""
        return frozenset(self.inner.needs)

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        values = view.updates.values.clone()
        p, f = len(values), self.attackers
        length = math.sqrt(max(_common_energy(values[:, f:]), 1e-30))
        for k in range(f):
            generator = keyed_generator(self.seed, view.round, f"attacker-{k}", "study")
            noise = torch.from_numpy(generator.standard_normal(p)).to(values)
            own = -values[:, k]
            here = Round(
                view.round,
                own / own.norm() * length,
                noise * math.sqrt(self.floor / p),
                self.past,
                torch.arange(p) % f == k,
            )
            values[:, k] = self.craft(here)
        answer: Aggregation = self.inner.aggregate(
            replace(view, updates=UpdateMatrix(values, view.updates.ids)), state
        )
        self.past.append(answer.delta)
        return answer


def _common_energy(updates: Tensor) -> float:
    """||g||^2 of updates [p, n], from the precision-weighted products of different ones."""
    gram = gram_matrix(updates).matrix
    weights = np.outer(1 / np.diagonal(gram), 1 / np.diagonal(gram))
    np.fill_diagonal(weights, 0.0)
    return float((gram * weights).sum() / weights.sum())


def runs_of(part: str) -> Iterator[HostileRun]:
    """Return all runs of a part."""
    if part == "settings":
        for (name, over), seed, method in itertools.product(
            (("S2", S2), ("S1", S1)), (0, 1), METHODS
        ):
            yield HostileRun(part, name, method, "none", 0, 0, seed, over)
            for f, attack in itertools.product((1, 3), ("none", *ATTACKS)):
                yield HostileRun(
                    part, name, method, attack, 0 if attack == "none" else f, f, seed, over
                )
    elif part == "adaptive":
        for seed, f, attack in itertools.product((0, 1), (1, 3), ADAPTIVE):
            yield HostileRun(part, "S2", "NoiseWise", attack, f, f, seed, S2)
    elif part == "honest":
        for seed, (data, over), method in itertools.product((0, 1), DATA.items(), METHODS):
            if (data, seed) == ("very unequal", 1):
                continue  # a site has fewer records than its batch size
            for tolerated in (0, 1, 3):
                yield HostileRun(part, data, method, "none", 0, tolerated, seed, over)
    elif part == "frontier":
        for records, rate in itertools.product(RECORDS, RATES):
            over = {"training.learning_rate": rate}
            if records < max(RECORDS):
                over["data.limit"] = records
            name = f"{records} records, rate {rate}"
            for f, attack in itertools.product((1, 3), ("none", *ATTACKS[:2])):
                hostile = 0 if attack == "none" else f
                yield HostileRun(part, name, "NoiseWise", attack, hostile, f, 0, over)
    elif part == "more":
        for (f, tolerated), attack in itertools.product(MORE, ATTACKS[:2]):
            yield HostileRun(part, "S2", "NoiseWise", attack, f, tolerated, 0, S2)
    else:
        raise SystemExit(f"{part}: must be settings, adaptive, honest, frontier or more")


def play(wanted: HostileRun, executor: MakeExecutor) -> RunResult:
    """Run one of the study's runs."""
    over = {**wanted.overrides, "seed": wanted.seed}
    over |= {"policy.tolerated_attackers": wanted.tolerated, "training.evaluate_every": 30}
    config = load_config(CONFIG, over)
    method = MethodConfig(name=wanted.method, options=OPTIONS[wanted.method])
    ids = [f"client-{k:02d}" for k in range(wanted.attackers)]
    if wanted.attack in ATTACKS:
        config = config.model_copy(
            update={"attacks": [AttackConfig(kind=wanted.attack, clients=ids)]}
        )
    if wanted.attack not in ADAPTIVE:
        return run(config, method, wanted.seed, executor=executor)
    honest = prepare(config, method, wanted.seed)
    attack, guarded = ADAPTIVE[wanted.attack], honest.method
    hostile = Hostile(guarded.aggregator, attack, wanted.attackers, honest.floor, wanted.seed)
    prepared = replace(
        honest,
        method=replace(guarded, aggregator=hostile),
        attacks=[Attack("sign_flip", tuple(ids))],
    )
    return simulate(prepared, execution=Execution(executor=executor))


def run_part(part: str) -> None:
    """Run what is missing of a part."""
    missing = [wanted for wanted in runs_of(part) if RESULTS.get(wanted.key) is None]

    def records(wanted: HostileRun) -> str:
        shared = {k: v for k, v in wanted.overrides.items() if k != "training.learning_rate"}
        return json.dumps([wanted.seed, shared], sort_keys=True)

    for _, several in itertools.groupby(sorted(missing, key=records), key=records):
        group = list(several)
        for start in range(0, len(group), TOGETHER):
            batch = group[start : start + TOGETHER]
            plays = [lambda make, wanted=wanted: play(wanted, make) for wanted in batch]
            for wanted, result in zip(batch, in_lock_step(plays), strict=True):
                _write(wanted, result)
            first = batch[0]
            print(f"{part}: {len(batch)} runs of {first.setting}, seed {first.seed}", flush=True)


def _write(played: HostileRun, result: RunResult) -> None:
    ids = {f"client-{k:02d}" for k in range(played.attackers)}
    weight = [sum(record.weights.get(client, 0.0) for client in ids) for record in result.rounds]
    refused = sum(len(record.dropped.keys() - ids) for record in result.rounds)
    content = {
        "accuracy": round(100 * result.rounds[-1].mean_accuracy, 2),
        "attackers_weight": round(float(np.mean(weight)), 4),
        "honest_updates_refused": refused,
        "status": result.status,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    RESULTS.add(played.key | content)


def tables() -> str:
    """Return Markdown tables of all results."""
    lines: list[str] = []

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines.extend(["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)])
        lines.extend("| " + " | ".join(row) + " |" for row in rows)

    def accuracies(runs: Sequence[HostileRun]) -> str:
        values = [r.accuracy for r in runs]
        return " / ".join("" if math.isnan(v) else f"{v:.1f}" for v in values)

    def pick(part: str, **wanted: Any) -> list[HostileRun]:
        return [r for r in runs_of(part) if all(getattr(r, k) == v for k, v in wanted.items())]

    rows = []
    for setting, method, f in itertools.product(("S1", "S2"), METHODS, (1, 3)):
        wanted = {"setting": setting, "method": method}
        bare = accuracies(pick("settings", attack="none", tolerated=0, **wanted))
        alone = accuracies(pick("settings", attack="none", tolerated=f, **wanted))
        under = [accuracies(pick("settings", attack=a, attackers=f, **wanted)) for a in ATTACKS]
        rows.append([setting, method, str(f), bare, alone, *under])
    heads = ["setting", "method", "f", "no guard, no attack", "no attack"]
    table([*heads, "flip at floor", *ATTACKS[1:]], rows)
    rows = [
        [name, *(accuracies(pick("adaptive", attack=name, attackers=f)) for f in (1, 3))]
        for name in ADAPTIVE
    ]
    table(["attack, S2, guarded NoiseWise", "1 of 20", "3 of 20"], rows)
    rows = [
        [data, method, *(accuracies(pick("honest", setting=data, method=method, tolerated=f))
                         for f in (0, 1, 3))]
        for data, method in itertools.product(DATA, METHODS)
    ]  # fmt: skip
    table(["data", "method", "no guard", "guard, f = 1", "guard, f = 3"], rows)
    rows = []
    for setting in dict.fromkeys(r.setting for r in runs_of("frontier")):
        row = [setting]
        for f in (1, 3):
            row += [accuracies(pick("frontier", setting=setting, attack="none", tolerated=f))]
            row += [
                accuracies(pick("frontier", setting=setting, attack=a, attackers=f))
                for a in ATTACKS[:2]
            ]
        rows.append(row)
    names = ["no attack", "flip", "antisign"]
    table(["records, rate", *(f"{a}, f = {f}" for f in (1, 3) for a in names)], rows)
    rows = [
        [str(f), str(tolerated), *(
            accuracies(pick("more", attackers=f, tolerated=tolerated, attack=a))
            for a in ATTACKS[:2]
        )]
        for f, tolerated in MORE
    ]  # fmt: skip
    table(["attackers, S2, NoiseWise", "tolerated", "flip at floor", "antisign"], rows)
    return "\n".join(lines)


def main() -> None:
    """Run parts, print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--tables", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    for part in wanted.parts:
        run_part(part)
    if wanted.tables:
        sys.stdout.write(tables() + "\n")


if __name__ == "__main__":
    main()
