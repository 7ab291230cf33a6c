"""What hostile clients do to each method: every attack against every method, resumably."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noisewise.aggregation.methods import METHODS
from noisewise.checks import no_repeats
from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import warm_up
from noisewise.experiments.config import (
    AttackConfig,
    ExperimentConfig,
    MethodConfig,
    dump_config,
)
from noisewise.experiments.preflight import check_folder
from noisewise.experiments.runner import Job, run, training_loss
from noisewise.experiments.setup import make_initial_model, make_population
from noisewise.federation.attacks import ATTACKS
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import AttackRow, RunResult
from noisewise.storage import write_atomic
from noisewise.training.engine.linear import is_linear

__all__ = ["AttackCell", "attack_cells", "attack_rows", "default_methods", "run_cells"]

NO_ATTACK = "no attack"
_GUARDED = ("NoiseWise", "RobustHDP")
_LONGEST_IDS = 60  # letters in the name of a folder


@dataclass(frozen=True)
class AttackCell:
    """One run: a method, behind a guard or not, under one attack.

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
        """A name for files, which tells apart what the cells of studies differ in."""
        guard = "-guard" if self.config.policy.tolerated_attackers else ""
        who = "" if self.attack == NO_ATTACK else "-" + "-".join(self.attackers)
        if len(who) > _LONGEST_IDS:
            known = hashlib.sha256(" ".join(self.attackers).encode()).hexdigest()[:12]
            who = f"-{len(self.attackers)}-clients-{known}"
        return f"{self.job.folder_name}{guard}-{self.attack.replace(' ', '-')}{who}"


def attack_cells(
    config: ExperimentConfig,
    attackers: Sequence[str],
    *,
    methods: Sequence[MethodConfig],
    attacks: Sequence[str] | None = None,
    together: bool = False,
) -> tuple[AttackCell, ...]:
    """All runs of the study, the attack-free ones first.

    Args:
        config: its policy gives the number of tolerated attackers for the guarded methods, at least
            one for each attacker; its own attacks are left aside.
        attackers: ids of the attackers; the first attacks alone, sybils need two.
        methods: names with options and learning rates; noise-aware ones run with and without the
            guard.
        attacks: names of `ATTACKS`; all by default.
        together: all attackers attack at once in every attack, not just the sybils.

    Raises:
        InvalidValueError: for an attack or attacker that does not exist, for an empty list, and for
            what stands in a list twice.
    """
    kinds = list(ATTACKS) if attacks is None else list(attacks)
    labels = [Job(method, config.seed).folder_name for method in methods]
    for field, several in (("attacks", kinds), ("attackers", attackers), ("methods", labels)):
        if not several:
            raise InvalidValueError(field, list(several), "must be one or more")
        no_repeats(field, several)
    for kind in kinds:
        if kind not in ATTACKS:
            raise InvalidValueError("attacks", kind, f"must be among {', '.join(ATTACKS)}")
    if "sybils" in kinds and len(attackers) < 2:
        raise InvalidValueError("attackers", list(attackers), "must be two or more for sybils")
    ids = [client.spec.id for client in make_population(config, config.seed)]
    for client in attackers:
        if client not in ids:
            raise InvalidValueError(
                "attackers", client, f"must be among the clients {ids[0]} to {ids[-1]}"
            )
    cells = []
    for kind in [NO_ATTACK, *kinds]:
        members = tuple(attackers if together or kind == "sybils" else attackers[:1])
        hostile = [] if kind == NO_ATTACK else [AttackConfig(kind=kind, clients=list(members))]
        for method in methods:
            for guarded in (False, True) if method.name in _GUARDED else (False,):
                tolerated = max(config.policy.tolerated_attackers, len(members)) if guarded else 0
                policy = config.policy.model_copy(update={"tolerated_attackers": tolerated})
                own = config.model_copy(update={"attacks": hostile, "policy": policy})
                job = Job(method, config.seed)
                label = f"{job.label} + guard" if guarded else job.label
                cells.append(AttackCell(label, kind, members, own, job))
    return tuple(cells)


def run_cells(
    cells: Sequence[AttackCell],
    folder: Path,
    *,
    workers: int = 1,
    on_cell: Callable[[AttackCell], None] | None = None,
) -> Iterator[tuple[AttackCell, RunResult]]:
    """Run the cells, each resumably in its own folder below ``folder``.

    Cells of softmax regression under one attack run in lock step; others one after the other, their
    clients spread over ``workers``. Each folder has the config of its cell, with the attack and the
    policy, so that reports tell them apart.

    Raises:
        InvalidValueError: before anything is trained, if a folder holds a run of another config.
    """
    for cell in cells:
        path = folder / "runs" / cell.folder_name
        check_folder(cell.config, path, [path])
    for _, several in itertools.groupby(cells, key=lambda cell: cell.attack):
        some = list(several)
        groups = [some] if _is_softmax(some[0]) else [[cell] for cell in some]
        for group in groups:
            for cell in group:
                if on_cell is not None:
                    on_cell(cell)
            yield from zip(group, _run_group(group, folder / "runs", workers), strict=True)


def _is_softmax(cell: AttackCell) -> bool:
    model = make_initial_model(cell.config, cell.job.seed)
    return is_linear(model, training_loss(cell.config)) and cell.config.training.executor is None


def _run_group(group: Sequence[AttackCell], folder: Path, workers: int) -> list[RunResult]:
    for cell in group:
        path = folder / cell.folder_name
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / "config.toml", dump_config(cell.config).encode())
    if len(group) == 1:
        (cell,) = group
        return [run(cell.config, cell.job, folder=folder / cell.folder_name, workers=workers)]

    for _ in warm_up(group[0].config, [cell.job for cell in group]):  # once, not by each of them
        pass

    def play(cell: AttackCell) -> Callable[[MakeExecutor], RunResult]:
        path = folder / cell.folder_name
        return lambda make: run(cell.config, cell.job, folder=path, executor=make)

    return in_lock_step([play(cell) for cell in group])


def attack_rows(outcomes: Sequence[tuple[AttackCell, RunResult]]) -> tuple[AttackRow, ...]:
    """What each attack did to each method, beside the same method left alone."""
    alone = {
        cell.label: result.rounds[-1].mean_accuracy
        for cell, result in outcomes
        if cell.attack == NO_ATTACK
    }
    rows = []
    for cell, result in outcomes:
        weights = [
            sum(record.weights.get(client, 0.0) for client in cell.attackers)
            for record in result.rounds
        ]
        last = result.rounds[-1]
        rows.append(
            AttackRow(
                method=cell.label,
                attack=cell.attack,
                attackers=len(cell.attackers) if cell.attack != NO_ATTACK else 0,
                weight=float(np.mean(weights)),
                accuracy=last.mean_accuracy,
                without_attack=alone.get(cell.label, float("nan")),
                breaks_policy=cell.attack != NO_ATTACK and ATTACKS[cell.attack].breaks_policy,
                diverged=result.status == "diverged",
                honest_refused=sum(
                    len(record.dropped.keys() - set(cell.attackers)) for record in result.rounds
                ),
            )
        )
    return tuple(rows)


def default_methods(config: ExperimentConfig) -> tuple[MethodConfig, ...]:
    """The config's methods to compare, or all of the table but the references."""
    listed = config.compare.methods
    if listed is None:
        return tuple(MethodConfig(name=m) for m in METHODS if m not in ("FedAvg", "Oracle"))
    return tuple(MethodConfig(name=m) if isinstance(m, str) else m for m in listed)
