"""`simulate`: a whole federation in this process, resumable after any crash."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noisewise.aggregation.methods import Method
from noisewise.aggregation.policy import plan_noise
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack, check_attacks
from noisewise.federation.checkpoint import OTHER_RUN, RunFolder, Snapshot, alone_in
from noisewise.federation.clients import Client
from noisewise.federation.evaluation import Metric, accuracy
from noisewise.federation.executors import (
    Executor,
    ExecutorName,
    Workload,
    check_executor,
    make_executor,
    one_thread,
)
from noisewise.federation.identity import fingerprint
from noisewise.federation.results import RoundRecord, RunResult, Status, load_result
from noisewise.federation.rounds import Federation, choose_members, play_round
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.timing import Stopwatch
from noisewise.privacy.budget import overall_guarantee
from noisewise.privacy.plan import LocalPlan, non_private_plan
from noisewise.training.gradients import Loss
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["simulate"]

_log = logging.getLogger(__name__)

OnRound = Callable[[RoundRecord], None]
ExecutorFactory = Callable[[Workload], Executor]


def simulate(
    clients: Sequence[Client],
    plans: Sequence[LocalPlan],
    method: Method,
    model: nn.Module,
    settings: TrainingSettings,
    *,
    seed: int = 0,
    loss: Loss = cross_entropy,
    metric: Metric = accuracy,
    workers: int = 1,
    executor: ExecutorName | ExecutorFactory | None = None,
    ray_address: str | None = None,
    folder: Path | str | None = None,
    reference_plans: Sequence[LocalPlan] | None = None,
    attacks: Sequence[Attack] = (),
    noise_floor: float | None = None,
    on_round: OnRound | None = None,
    clock: Stopwatch | None = None,
) -> RunResult:
    """Train one model over the clients (the paper's Algorithm 1, for any method).

    Args:
        clients: settings and records.
        plans: of the clients, in the same order, from `plan_clients`.
        method: what clients and server do.
        model: structure and initial parameters; not changed.
        settings: rounds, learning rate and the like.
        seed: of participation, sampling and noise.
        loss: mean loss of a batch.
        metric: score of each record, reported as accuracy.
        workers: processes; the result does not depend on it.
        executor: "serial", "processes" or "ray"; by default processes for more than one worker.
            The result does not depend on it. Or a function that makes one, as `LockStep` has.
        ray_address: of a running Ray cluster; None starts one here for the time of the run.
        folder: where checkpoints and results go. A folder with a part of the same run is resumed,
            one with the whole run is read, one in which another process is training is refused;
            None keeps everything in memory.
        reference_plans: every client's plan with its own budget, for the oracle's noise; the
            method's own plans by default.
        attacks: clients that send something else than an honest update.
        noise_floor: F, the least noise energy of an honest update, which attackers know; by default
            the least of the clients' plans.
        on_round: called with the record of each round, also with those of a resumed run.
        clock: told where the time of the rounds goes.

    Returns:
        The records of all rounds. A run that diverges ends early with that status; one in which
        no round changed the model has the status ``no_updates`` and writes no model.
    """
    check_model(model)
    if not callable(executor):
        check_executor(executor, ray_address)
    if len(plans) != len(clients) or not clients:
        raise InvalidValueError("plans", f"{len(plans)} plans", f"must fit {len(clients)} clients")
    method = method.settled(plans)
    layout = ParameterLayout.of(model)
    theta = layout.flatten(model).to(settings.device)
    files = None
    if folder is not None:
        functions = (model, loss, metric)
        identity = (clients, plans, method, settings, seed, theta, functions, tuple(attacks))
        files = RunFolder(Path(folder), fingerprint(*identity))
        if (finished := _finished(files)) is not None:
            return finished
    workload = Workload(
        model=model,
        loss=loss,
        clients=tuple(clients),
        plans=_trained_plans(clients, plans, attacks),
        learning_rate=settings.learning_rate,
        seed=seed,
        physical_batch=settings.physical_batch,
        device=settings.device,
        metric=metric,
        loss_records=settings.loss_records,
        normalise=method.normalise,
    )

    def noise(some: Sequence[LocalPlan]) -> np.ndarray:
        size, rate = layout.size, settings.learning_rate
        return np.array([plan_noise(p, size, rate, normalised=method.normalise) for p in some])

    with alone_in(files.path if files else None), one_thread():
        if callable(executor):
            hands = executor(workload)
        else:
            few = min(workers, len(clients))
            hands = make_executor(workload, few, theta, executor, ray_address)
        try:
            federation = Federation(
                clients=workload.clients,
                plans=tuple(plans),
                method=method,
                settings=settings,
                seed=seed,
                executor=hands,
                true_noise=noise(plans),
                reference_noise=noise(reference_plans or plans),
                clock=clock or Stopwatch(),
                attacks=tuple(attacks),
                floor=float(noise(plans).min()) if noise_floor is None else noise_floor,
                first=_first_updates(hands, theta, workload.clients, attacks),
            )
            return _all_rounds(federation, theta, files, on_round)
        finally:
            hands.close()


def _trained_plans(
    clients: Sequence[Client], plans: Sequence[LocalPlan], attacks: Sequence[Attack]
) -> tuple[LocalPlan, ...]:
    """The plans that clients train by: some attackers leave the noise out."""
    check_attacks(attacks, [client.spec.id for client in clients])
    clean = {client for attack in attacks if attack.what.noise_free for client in attack.clients}
    return tuple(
        non_private_plan(client.spec, rounds=plan.rounds, accountant=plan.accountant)
        if client.spec.id in clean
        else plan
        for client, plan in zip(clients, plans, strict=True)
    )


def _first_updates(
    executor: Executor, theta: Tensor, clients: Sequence[Client], attacks: Sequence[Attack]
) -> dict[str, Tensor]:
    """What the attackers that need it trained in the first round: also known in a resumed run."""
    wanted = {client for attack in attacks if attack.what.first_round for client in attack.clients}
    members = [place for place, client in enumerate(clients) if client.spec.id in wanted]
    if not members:
        return {}
    updates = executor.updates(theta, 1, members)
    return {clients[m].spec.id: update for m, update in zip(members, updates, strict=True)}


def _all_rounds(
    federation: Federation, theta: Tensor, files: RunFolder | None, on_round: OnRound | None
) -> RunResult:
    """Play the rounds that are left and write the result."""
    resumed = files.resume() if files else None
    if resumed is None:
        snapshot, records = Snapshot(0, theta, {}, dict.fromkeys(federation.ids, 0)), []
    else:
        snapshot, records = resumed[0], list(resumed[1])
        average = None if snapshot.average is None else snapshot.average.to(theta)
        snapshot = replace(snapshot, theta=snapshot.theta.to(theta), average=average)
    if files:
        files.result_file.unlink(missing_ok=True)  # of a run that turned out to be damaged
        files.begin(_result(federation, (), "unfinished").summary())
    for record in records:
        if on_round:
            on_round(record)
    status: Status = "finished"
    while snapshot.round < federation.settings.rounds:
        if not (members := choose_members(federation, snapshot)):
            status = "budgets_spent"
            break
        with federation.clock.round():
            outcome = play_round(federation, snapshot, members)
            snapshot = outcome.snapshot
            records.append(outcome.record)
            if files:
                with federation.clock.part("checkpoint"):
                    files.save(snapshot, outcome.record)
        if on_round:
            on_round(outcome.record)
        if outcome.diverged:
            status = "diverged"
            break
    if status != "diverged" and not any(record.changed for record in records):
        status = "no_updates"
    result = _result(federation, tuple(records), status)
    if files:
        files.finish(result.summary(), None if status == "no_updates" else snapshot.released)
    return result


def _result(federation: Federation, records: tuple[RoundRecord, ...], status: Status) -> RunResult:
    budgets = [plan.budget for plan in federation.plans if plan.budget is not None]
    clients = {
        client.spec.id: {
            **asdict(client.spec),
            "reported_epsilon": client.reported_epsilon,
            "planned_epsilon": plan.budget.epsilon if plan.budget else None,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sample_rate,
            "steps_per_round": plan.steps_per_round,
            "planned_rounds": plan.rounds,
        }
        for client, plan in zip(federation.clients, federation.plans, strict=True)
    }
    plan = federation.plans[0]
    return RunResult(
        method=federation.method.name,
        seed=federation.seed,
        status=status,
        rounds=records,
        clients=clients,
        guarantee=asdict(overall_guarantee(budgets)) if budgets else None,
        settings={
            **asdict(federation.settings),
            "clip_norm": plan.clip_norm,
            "accountant": plan.accountant,
        },
        needs=tuple(sorted(need.value for need in federation.method.aggregator.needs)),
    )


def _finished(files: RunFolder) -> RunResult | None:
    """The result of the same run, if it is complete already."""
    if not files.result_file.exists():
        return None
    try:
        known = json.loads(files.result_file.read_text()).get("fingerprint")
    except (ValueError, AttributeError):
        return None  # damaged: the checkpoints will tell
    if known != files.fingerprint:
        raise InvalidValueError(
            "output",
            str(files.path),
            OTHER_RUN,
        )
    try:
        return load_result(files.path)
    except InvalidValueError as error:
        _log.warning("%s: %s; going on from the checkpoints", files.path, error.allowed)
        return None
