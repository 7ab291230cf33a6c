"""What hostile clients do to each method: every attack against every method, resumably."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noisewise.aggregation.methods import METHODS
from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import warm_up
from noisewise.experiments.config import AttackConfig, ExperimentConfig, MethodConfig
from noisewise.experiments.runner import Job, run, training_loss
from noisewise.experiments.setup import make_initial_model
from noisewise.federation.attacks import ATTACKS
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import AttackRow, RunResult
from noisewise.training.engine.linear import is_linear

__all__ = ["AttackCell", "attack_cells", "attack_rows", "default_methods", "run_cells"]

NO_ATTACK = "no attack"
_GUARDED = ("NoiseWise", "RobustHDP")


@dataclass(frozen=True)
class AttackCell:
    """One run: a method, behind a guard or not, under one attack.

    Attributes:
        label: of the method, as tables show it.
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
        """A name for files."""
        return f"{self.job.folder_name}-{self.label.replace(' ', '-')}-{self.attack}".replace(
            " ", "-"
        )


def attack_cells(
    config: ExperimentConfig,
    attackers: Sequence[str],
    *,
    methods: Sequence[MethodConfig],
    attacks: Sequence[str] | None = None,
) -> tuple[AttackCell, ...]:
    """All runs of the study, the attack-free ones first.

    Args:
        config: its policy gives the number of tolerated attackers for the guarded methods, at least
            one for each attacker; its own attacks are left aside.
        attackers: ids of the attackers; the first attacks alone, sybils need two.
        methods: names with their learning rates; noise-aware ones run with and without the guard.
        attacks: names of `ATTACKS`; all by default.
    """
    kinds = list(ATTACKS) if attacks is None else list(attacks)
    for kind in kinds:
        if kind not in ATTACKS:
            raise InvalidValueError("attacks", kind, f"must be among {', '.join(ATTACKS)}")
    if "sybils" in kinds and len(attackers) < 2:
        raise InvalidValueError("attackers", list(attackers), "must be two or more for sybils")
    cells = []
    for kind in [NO_ATTACK, *kinds]:
        members = tuple(attackers) if kind == "sybils" else tuple(attackers[:1])
        hostile = [] if kind == NO_ATTACK else [AttackConfig(kind=kind, clients=list(members))]
        for method in methods:
            for guarded in (False, True) if method.name in _GUARDED else (False,):
                tolerated = max(config.policy.tolerated_attackers, len(members)) if guarded else 0
                policy = config.policy.model_copy(update={"tolerated_attackers": tolerated})
                own = config.model_copy(update={"attacks": hostile, "policy": policy})
                label = f"{method.name} + guard" if guarded else method.name
                cells.append(AttackCell(label, kind, members, own, Job(method, config.seed)))
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
    clients spread over ``workers``.
    """
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
