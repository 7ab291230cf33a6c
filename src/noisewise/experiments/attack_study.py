"""`study_attacks`: train every method under every attack, resumably."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import make_method
from noisewise.checks import known_name, no_repeats
from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import cache_spending
from noisewise.experiments.config import (
    AttackConfig,
    ConfigSource,
    ExperimentConfig,
    MethodConfig,
    as_config,
)
from noisewise.experiments.output_folders import check_run_folder, write_config
from noisewise.experiments.prepare import SeedSetup, prepare, prepare_seed
from noisewise.experiments.runner import Job, find_methods, train
from noisewise.federation.attacks import ATTACKS
from noisewise.federation.executors import Execution
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult
from noisewise.report.attack_report import AttackRow, attack_figure
from noisewise.report.chart import save_figure
from noisewise.storage import to_json, write_atomic
from noisewise.text import short_repr
from noisewise.training.heads import head_of

__all__ = [
    "AttackRun",
    "AttackStudy",
    "attack_methods",
    "attack_rows",
    "attack_runs",
    "study_attacks",
    "train_runs",
]

NO_ATTACK = "no attack"
_LONGEST_IDS = 60  # characters in the name of a folder


@dataclass(frozen=True)
class AttackRun:
    """One run: a method, with or without the guard, under one attack.

    Attributes:
        label: of the method with its options and its guard, as tables show it.
        attack: one of `ATTACKS`, or ``no attack``.
        attackers: their ids.
        config: of the run.
        job: method and seed.
    """

    label: str
    attack: str
    attackers: tuple[str, ...]
    config: ExperimentConfig
    job: Job

    @property
    def folder_name(self) -> str:
        """The name of the run's folder, different for all runs of all studies of a config."""
        guard = "-guard" if self.config.policy.tolerated_attackers else ""
        ids = "" if self.attack == NO_ATTACK else "-" + "-".join(self.attackers)
        if len(ids) > _LONGEST_IDS:
            digest = hashlib.sha256(" ".join(self.attackers).encode()).hexdigest()[:12]
            ids = f"-{len(self.attackers)}-clients-{digest}"
        return f"{self.job.folder_name}{guard}-{self.attack.replace(' ', '-')}{ids}"


@dataclass(frozen=True, repr=False)
class AttackStudy:
    """The runs of a study and their results, in the same order."""

    runs: tuple[AttackRun, ...]
    results: tuple[RunResult, ...]

    def __repr__(self) -> str:
        """The number of runs, and the methods and attacks."""
        return short_repr(
            self, runs=len(self.runs), methods=list(dict.fromkeys(run.label for run in self.runs)),
            attacks=list(dict.fromkeys(run.attack for run in self.runs)),
        )  # fmt: skip

    @property
    def rows(self) -> tuple[AttackRow, ...]:
        """What each attack did to each method."""
        return attack_rows(list(zip(self.runs, self.results, strict=True)))

    def write_report(self, folder: Path | str) -> tuple[Path, ...]:
        """Write ``attacks.json`` and the figure (PNG, SVG, PDF).

        Returns:
            The files; the PNG is the first.
        """
        data, rows = Path(folder) / "attacks.json", self.rows
        write_atomic(data, to_json([asdict(row) for row in rows], indent=1).encode())
        return (*save_figure(attack_figure(rows), Path(folder) / "figures", "attacks"), data)


def study_attacks(
    config: ConfigSource,
    attackers: Sequence[str],
    *,
    methods: Sequence[str | MethodConfig] | None = None,
    attacks: Sequence[str] | None = None,
    together: bool = False,
    set: Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    workers: int = 1,
    on_run: Callable[[int, int, AttackRun], None] | None = None,
) -> AttackStudy:
    """Train every method under every attack and without attacks.

    Args:
        config: a config, its content as a mapping, or the path of a TOML file. Its policy gives the
            number of attackers that the guard tolerates, at least the number of attackers in a run.
            Its own attacks are not used.
        attackers: ids of the attackers. The first one attacks alone; sybils need two or more.
        methods: names or `MethodConfig`s. By default those of the config's ``compare`` table, or
            all but the references Alone, FedAvg and Oracle. Noise-aware methods run with and
            without the guard.
        attacks: names of `ATTACKS`; by default all.
        together: all attackers attack at once in every attack, not only as sybils.
        set: config fields to replace.
        folder: for the runs. An interrupted study is resumed, finished runs are read. None keeps
            everything in memory.
        workers: processes for the clients' training.
        on_run: called with number, total and run when a run starts.

    Raises:
        InvalidValueError: an invalid field, or a folder that holds other runs; nothing is trained
            then.

    Example:
        Sybils of two clients, against the methods that can have a guard:

            study = nw.study_attacks(
                "configs/demo.toml", ["client-00", "client-01"],
                methods=["NoiseWise", "RobustHDP"], attacks=["sybils"],
            )
    """
    config = as_config(config, set)
    chosen = attack_methods(config, methods)
    setup = prepare_seed(config, config.seed)
    runs = attack_runs(setup, attackers, methods=chosen, attacks=attacks, together=together)
    target = None if folder is None else Path(folder) / "runs"
    pairs = list(train_runs(runs, target, setup, workers=workers, on_run=on_run))
    return AttackStudy(runs, tuple(result for _, result in pairs))


def attack_methods(
    config: ExperimentConfig, methods: Sequence[str | MethodConfig] | None = None
) -> list[MethodConfig]:
    """The methods of a study: by default the config's, or all but the references."""
    if methods is None and config.compare.methods is None:
        methods = [name for name in METHODS if not make_method(name).is_reference]
    return find_methods(config, methods)


def attack_runs(
    setup: SeedSetup,
    attackers: Sequence[str],
    *,
    methods: Sequence[MethodConfig],
    attacks: Sequence[str] | None = None,
    together: bool = False,
) -> tuple[AttackRun, ...]:
    """All runs of a study, those without an attack first.

    Args:
        setup: config, seed and clients.
        attackers: see `study_attacks`.
        methods: see `study_attacks`.
        attacks: see `study_attacks`.
        together: see `study_attacks`.

    Raises:
        InvalidValueError: an unknown attack or attacker, an empty list, or an entry that is listed
            twice.
    """
    config = setup.config
    kinds = list(ATTACKS) if attacks is None else _listed("attacks", attacks)
    attackers = _listed("attackers", attackers)
    labels = [method.label for method in methods]
    folders = [Job(method, setup.seed).folder_name for method in methods]
    for field, entries in (
        ("attacks", kinds), ("attackers", attackers), ("methods", labels), ("methods", folders)
    ):  # fmt: skip
        if not entries:
            raise InvalidValueError(field, list(entries), "must be one or more")
        no_repeats(field, entries)
    kinds = [known_name("attacks", kind, ATTACKS) for kind in kinds]
    if "sybils" in kinds and len(attackers) < 2:
        raise InvalidValueError("attackers", list(attackers), "must be two or more for sybils")
    ids = [client.spec.id for client in setup.clients]
    for client in attackers:
        if client not in ids:
            raise InvalidValueError(
                "attackers", client, f"must be among the clients {ids[0]} to {ids[-1]}"
            )
    guardable = [make_method(method.name, method.options).can_be_guarded for method in methods]
    runs = []
    for kind in [NO_ATTACK, *kinds]:
        members = tuple(attackers if together or kind == "sybils" else attackers[:1])
        hostile = [] if kind == NO_ATTACK else [AttackConfig(kind=kind, clients=list(members))]
        for method, can_be_guarded in zip(methods, guardable, strict=True):
            for guarded in (False, True) if can_be_guarded else (False,):
                tolerated = max(config.policy.tolerated_attackers, len(members)) if guarded else 0
                policy = config.policy.model_copy(update={"tolerated_attackers": tolerated})
                attacked_config = config.model_copy(update={"attacks": hostile, "policy": policy})
                job = Job(method, setup.seed)
                label = f"{job.label} + guard" if guarded else job.label
                runs.append(AttackRun(label, kind, members, attacked_config, job))
    return tuple(runs)


def _listed(field: str, entries: object) -> list[str]:
    """The entries as a list; one text is one entry."""
    if isinstance(entries, str):
        return [entries]
    if not isinstance(entries, Iterable):
        raise InvalidValueError(field, entries, "must be a list of names")
    return list(entries)


def train_runs(
    runs: Sequence[AttackRun],
    folder: Path | None,
    setup: SeedSetup,
    *,
    workers: int = 1,
    on_run: Callable[[int, int, AttackRun], None] | None = None,
) -> Iterator[tuple[AttackRun, RunResult]]:
    """Train the runs of a study, each resumably in its own folder in ``folder``.

    Runs of a head (one linear layer) under one attack are trained in lock step, others one after
    the other with their clients spread over ``workers``. Each folder has the config of its run,
    with attack and policy, so that reports can distinguish them.

    Raises:
        InvalidValueError: a folder holds a run of another config; nothing is trained then.
    """
    if folder is not None:
        for run in runs:
            check_run_folder(run.config, folder / run.folder_name)
    is_head = head_of(setup.new_model(), setup.task.loss) is not None
    in_step = setup.config.training.executor is None and is_head
    numbered = enumerate(runs, start=1)
    for _, group in itertools.groupby(numbered, key=lambda pair: pair[1].attack):
        pairs = list(group)
        for part in [pairs] if in_step else [[pair] for pair in pairs]:
            for number, run in part:
                if on_run is not None:
                    on_run(number, len(runs), run)
            together = [run for _, run in part]
            yield from zip(together, _train(together, folder, setup, workers), strict=True)


def _train(
    runs: Sequence[AttackRun], folder: Path | None, setup: SeedSetup, workers: int
) -> list[RunResult]:
    """Train one run with its own workers, or several in lock step."""
    tasks = []
    for run in runs:
        shared = prepare_seed(run.config, run.job.seed, setup)
        prepared = prepare(run.config, run.job.method, run.job.seed, setup=shared)
        cache_spending(prepared.plans)  # here, not in each of the threads
        path = None if folder is None else folder / run.folder_name
        if path is not None:
            write_config(run.config, path)
        tasks.append(partial(train, run.config, prepared, path))
    if len(tasks) == 1:
        training = setup.config.training
        execution = Execution(workers, training.executor, training.ray_address)
        return [tasks[0](execution=execution)]

    def train_in_step(task: Callable[..., RunResult], make_executor: MakeExecutor) -> RunResult:
        return task(execution=Execution(executor=make_executor))

    return in_lock_step([partial(train_in_step, task) for task in tasks])


def attack_rows(outcomes: Sequence[tuple[AttackRun, RunResult]]) -> tuple[AttackRow, ...]:
    """What each attack did to each method, compared with the same method without an attack."""
    scores = {
        run.label: result.rounds[-1].figure(result.metric.name)
        for run, result in outcomes
        if run.attack == NO_ATTACK
    }
    rows = []
    for run, result in outcomes:
        weights = [
            sum(record.weights.get(client, 0.0) for client in run.attackers)
            for record in result.rounds
        ]
        last = result.rounds[-1]
        rows.append(
            AttackRow(
                method=run.label,
                attack=run.attack,
                attackers=len(run.attackers) if run.attack != NO_ATTACK else 0,
                weight=float(np.mean(weights)),
                score=last.figure(result.metric.name),
                without_attack=scores.get(run.label, float("nan")),
                metric=result.metric,
                breaks_policy=run.attack != NO_ATTACK and ATTACKS[run.attack].breaks_policy,
                diverged=result.status == "diverged",
                honest_refused=sum(
                    len(record.dropped.keys() - set(run.attackers)) for record in result.rounds
                ),
            )
        )
    return tuple(rows)
