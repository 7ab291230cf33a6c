"""`simulate`: train a whole federation on one machine; a run can be resumed after any crash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import cast

from torch import Tensor

from noisewise.errors import InvalidValueError
from noisewise.federation.checkpoint import RunFolder, alone_in
from noisewise.federation.executors import Execution, Executor, Workload, one_thread
from noisewise.federation.fingerprint import fingerprint
from noisewise.federation.own_models import Rounds, train_apart
from noisewise.federation.part_checks import check_parts
from noisewise.federation.prepared import Prepared
from noisewise.federation.result_facts import ClientFacts, RunSettings
from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.rounds import (
    Federation,
    choose_members,
    clients_with_budget,
    play_round,
)
from noisewise.federation.run_loop import RunLoop, result_before_training
from noisewise.federation.stopwatch import Stopwatch
from noisewise.federation.task_info import TaskInfo
from noisewise.federation.trained_model import ModelStructure
from noisewise.privacy.budget import overall_guarantee
from noisewise.privacy.plan import LocalPlan, non_private_plan

__all__ = ["simulate"]

OnRound = Callable[[RoundRecord], None]


def simulate(
    prepared: Prepared,
    *,
    execution: Execution | None = None,
    folder: Path | str | None = None,
    on_round: OnRound | None = None,
    clock: Stopwatch | None = None,
) -> RunResult:
    """Train one model over the clients (the paper's Algorithm 1, for any method).

    Under a method that shares no model (`Alone`), every client trains a model of its own.

    Args:
        prepared: everything that decides the result.
        execution: which processes compute the result; this process by default. The result does not
            depend on it.
        folder: of checkpoints and results. A partial run is resumed and a finished run is read;
            None keeps everything in memory.
        on_round: called with the record of each round, also with those of a resumed run.
        clock: measures the parts of the rounds.

    Returns:
        The records of all rounds. A run that diverges ends early with that status; one in which
        no round changed the model has the status ``no_updates`` and writes no model.

    Raises:
        InvalidValueError: the folder belongs to another run, another process trains this run, or
            records, model and metrics do not fit the task.

    Example:
        Of a run that `noisewise.prepare` makes, with checkpoints in a folder:

            prepared = nw.prepare("configs/demo.toml", "NoiseWise", seed=1)
            result = nw.simulate(prepared, execution=nw.Execution(workers=4), folder="runs/mine")
            result.status
    """
    path, listen = None if folder is None else Path(folder), on_round or (lambda record: None)
    run = _play(prepared, execution or Execution(), path, clock or Stopwatch())
    with one_thread(), closing(run):
        if path is None or not (path / "result.json").exists():
            check_parts(prepared.task, prepared.model, prepared.clients)
        while True:
            try:
                listen(next(run))
            except StopIteration as end:
                return cast(RunResult, end.value)


def _play(
    prepared: Prepared, execution: Execution, folder: Path | None, clock: Stopwatch
) -> Rounds:
    """Train a run: yield the record of each round, also of a resumed run, and return the result."""
    files = None
    if folder is not None:
        files = RunFolder(folder, fingerprint(prepared), fingerprint(prepared, with_rounds=True))
        if (finished := _finished(prepared, files)) is not None:
            return finished.with_model_in(folder, prepared.model)
    with alone_in(folder):
        before = _before_training(prepared)
        if not prepared.method.shares_model:
            return (yield from train_apart(prepared, before, files, execution, clock, _play))
        theta = prepared.initial_parameters
        executor = execution.start(_workload(prepared), theta)
        try:
            first = _first_updates(executor, theta, prepared)
            federation = Federation(prepared, executor, clock, first)
            structure = ModelStructure.of(prepared.model)
            loop = RunLoop(before, theta, structure, files, prepared.stop_when)
            return (yield from _train(federation, loop))
        finally:
            executor.close()


def _finished(prepared: Prepared, files: RunFolder) -> RunResult | None:
    """The result in the folder; None if rounds are left, also because the run is extended.

    Raises:
        InvalidValueError: the folder belongs to another run or has more rounds, or no client has
            budget left for more rounds.
    """
    finished, rounds = files.finished(), prepared.settings.rounds
    if finished is None or finished.status in ("stopped", "diverged"):
        return finished
    before = finished.settings["rounds"]
    if rounds == before:
        return finished
    if rounds < before:
        allowed = f"{files.path} holds a run of {before} rounds; give more, or another folder"
        raise InvalidValueError("training.rounds", rounds, allowed)
    resumed = files.resume()
    if resumed is not None and not clients_with_budget(prepared, resumed[0]):
        covered = max(plan.rounds for plan in prepared.plans)
        raise InvalidValueError(
            "training.rounds",
            rounds,
            f"no client of {files.path} has budget left after {resumed[0].round} rounds: the plans "
            f"cover {covered} rounds (population.planned_rounds); start a new run elsewhere",
        )
    return None


def _train(federation: Federation, loop: RunLoop) -> Rounds:
    """Play the rounds that are left and write the result."""
    yield from tuple(loop.records)
    while not loop.ended:
        members = choose_members(federation, loop.snapshot)
        if not members:
            loop.status = "budgets_spent"
            break
        with federation.clock.round():
            snapshot, record = play_round(federation, loop.snapshot, members)
            with federation.clock.part("checkpoint"):
                loop.save(snapshot, record)
        yield record
    return loop.finish()


def _workload(prepared: Prepared) -> Workload:
    settings = prepared.settings
    return Workload(
        model=prepared.model,
        loss=prepared.task.loss,
        clients=tuple(prepared.clients),
        plans=_trained_plans(prepared),
        learning_rate=settings.learning_rate,
        seed=prepared.seed,
        physical_batch=settings.physical_batch,
        device=settings.device,
        metrics=prepared.task.metrics,
        loss_records=settings.loss_records,
        normalise=prepared.method.normalise,
        schedule=prepared.method.schedule,
        optimiser=settings.local_optimiser,
    )


def _trained_plans(prepared: Prepared) -> tuple[LocalPlan, ...]:
    """The plans that clients train with: some attackers add no noise."""
    noise_free = {
        client
        for attack in prepared.attacks
        if attack.properties.noise_free
        for client in attack.clients
    }
    return tuple(
        non_private_plan(client.spec, rounds=plan.rounds, accountant=plan.accountant)
        if client.spec.id in noise_free
        else plan
        for client, plan in zip(prepared.clients, prepared.plans, strict=True)
    )


def _first_updates(executor: Executor, theta: Tensor, prepared: Prepared) -> dict[str, Tensor]:
    """Honest updates of the first round, of attackers that need them in every round."""
    attackers = {
        client
        for attack in prepared.attacks
        if attack.properties.first_round
        for client in attack.clients
    }
    members = [position for position, client in enumerate(prepared.ids) if client in attackers]
    if not members:
        return {}
    updates = executor.updates(theta, 1, members)
    return {prepared.ids[m]: update for m, update in zip(members, updates, strict=True)}


def _unit_facts(plan: LocalPlan) -> ClientFacts:
    """The unit of a plan for persons; results of older versions have none, which means records."""
    if plan.max_records is None:
        return ClientFacts()
    return ClientFacts(unit=plan.unit, max_records=plan.max_records)


def _before_training(prepared: Prepared) -> RunResult:
    budgets = [plan.budget for plan in prepared.plans if plan.budget is not None]
    clients = {
        client.spec.id: ClientFacts(
            id=client.spec.id,
            n_examples=client.spec.n_examples,
            batch_size=client.spec.batch_size,
            local_epochs=client.spec.local_epochs,
            epsilon=client.spec.epsilon,
            delta=client.spec.delta,
            reported_epsilon=client.reported_epsilon,
            planned_epsilon=plan.budget.epsilon if plan.budget else None,
            noise_multiplier=plan.noise_multiplier,
            sample_rate=plan.sample_rate,
            steps_per_round=plan.steps_per_round,
            planned_rounds=plan.rounds,
            **_unit_facts(plan),
        )
        for client, plan in zip(prepared.clients, prepared.plans, strict=True)
    }
    plan = prepared.plans[0]
    settings = {
        **prepared.settings.described(),
        "clip_norm": plan.clip_norm,
        "accountant": plan.accountant,
    }
    if plan.clip_rule != "norm":
        settings["clip_rule"] = plan.clip_rule
    return result_before_training(
        prepared.method,
        prepared.seed,
        cast(RunSettings, settings),
        clients=clients,
        guarantee=asdict(overall_guarantee(budgets)) if budgets else None,
        task=TaskInfo.of(prepared.task),
    )
