"""One round of a simulation: choose clients, train, aggregate, evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure
from noisewise.aggregation.screening import screen_updates
from noisewise.errors import UpdateError
from noisewise.federation.attacks import attacked
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.evaluation import with_scores
from noisewise.federation.executors import Executor
from noisewise.federation.prepared import Prepared
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.run_loop import NOT_FINITE
from noisewise.federation.server_step import ServerStep, server_step, unchanged
from noisewise.federation.stopwatch import Stopwatch
from noisewise.noise.variance import aggregate_noise, oracle_noise, signal_share
from noisewise.privacy.plan import LocalPlan
from noisewise.privacy.spending import epsilon_spent
from noisewise.randomness import keyed_generator

__all__ = ["Federation", "choose_members", "clients_with_budget", "play_round"]


@dataclass(frozen=True)
class Federation:
    """What all rounds of a simulated run share.

    Attributes:
        run: everything that decides its result.
        executor: computes the clients' part.
        clock: measures the parts of a round.
        first: honest updates of the first round, of attackers that use them in every round.
    """

    run: Prepared
    executor: Executor
    clock: Stopwatch
    first: Mapping[str, Tensor]


def clients_with_budget(run: Prepared, snapshot: Snapshot) -> list[int]:
    """Positions of the clients whose plan has a round left, or needs none."""
    return [
        position
        for position, (client, plan) in enumerate(zip(run.ids, run.plans, strict=True))
        if not plan.is_private or snapshot.rounds_done[client] < plan.rounds
    ]


def choose_members(federation: Federation, snapshot: Snapshot) -> list[int]:
    """Positions of the next round's clients: a random share of those that have budget left."""
    with_budget = clients_with_budget(federation.run, snapshot)
    n_members = math.ceil(federation.run.settings.participation * len(federation.run.clients))
    if len(with_budget) <= n_members:
        return with_budget
    generator = keyed_generator(federation.run.seed, snapshot.round + 1, "participation")
    return sorted(int(m) for m in generator.choice(with_budget, size=n_members, replace=False))


def play_round(
    federation: Federation, snapshot: Snapshot, members: Sequence[int]
) -> tuple[Snapshot, RoundRecord]:
    """Train the members from the snapshot, aggregate their updates, evaluate.

    A member's round is charged to its budget whether or not its update is used.

    Returns:
        The state after the round, and its record.
    """
    run, number = federation.run, snapshot.round + 1
    with federation.clock.part("local training"):
        deltas = federation.executor.updates(snapshot.theta, number, members)
    trained = {run.ids[m]: delta for m, delta in zip(members, deltas, strict=True)}
    received: Mapping[str, Tensor] = trained
    if run.attacks:
        floor = run.floor * run.method.rate_factor(number) ** 2  # a schedule scales the noise
        received = attacked(trained, run.attacks, floor, run.seed, number, federation.first)
    with federation.clock.part("aggregation"):
        step = _aggregate(federation, snapshot.counting(received), received)
    return step.snapshot, _record(federation, step)


def _aggregate(
    federation: Federation, snapshot: Snapshot, received: Mapping[str, Tensor]
) -> ServerStep:
    theta = snapshot.theta
    try:
        screened = screen_updates(received, size=len(theta), dtype=theta.dtype)
    except UpdateError:  # local training overflowed at every client
        return unchanged(snapshot, dict.fromkeys(received, NOT_FINITE))
    return server_step(
        federation.run.method, snapshot, screened, lambda ids: _disclosed(federation, ids)
    )


def _disclosed(
    federation: Federation, ids: Sequence[str]
) -> Mapping[Disclosure, NDArray[np.float64]]:
    """What the method declares that its server needs to know about the clients, and no more."""
    positions = [federation.run.positions[client] for client in ids]
    clients = [federation.run.clients[k] for k in positions]
    values: Mapping[Disclosure, Callable[[], list[float]]] = {
        Disclosure.EPSILON: lambda: [client.disclosed_epsilon for client in clients],
        Disclosure.N_EXAMPLES: lambda: [client.spec.n_examples for client in clients],
        Disclosure.TRUE_VARIANCE: lambda: [federation.run.true_noise[k] for k in positions],
    }
    needs = federation.run.method.aggregator.needs
    return {need: np.array(values[need](), dtype=np.float64) for need in needs}


def _record(federation: Federation, step: ServerStep) -> RoundRecord:
    """The server's record, and what only a simulator knows: true noise, scores, epsilons."""
    run, clock, record = federation.run, federation.clock, step.record()
    due = record.round % run.settings.evaluate_every == 0 or record.round == run.settings.rounds
    if step.answer is not None:
        record = _with_true_noise(run, record, step.ids, step.answer)
        if due:
            with clock.part("evaluation"):
                counted = run.task.one_class and record.round == run.settings.rounds
                scores = federation.executor.evaluate(
                    step.snapshot.released, run.evaluated, counted
                )
            ids = [run.ids[position] for position in run.evaluated]
            record = with_scores(record, run.task, dict(zip(ids, scores, strict=True)))
    with clock.part("accounting"):
        spent = _spent(run, step.snapshot.rounds_done)
    return replace(record, epsilon_spent=spent)


def _spent(run: Prepared, rounds_done: Mapping[str, int]) -> dict[str, float | None]:
    """Epsilon that each client has spent; clients with the same plan are computed once."""
    epsilons: dict[tuple[LocalPlan, int], float] = {}
    spent: dict[str, float | None] = {}
    for client, plan in zip(run.ids, run.plans, strict=True):
        if not plan.is_private:
            spent[client] = None
            continue
        key = plan, rounds_done[client]
        if key not in epsilons:
            epsilons[key] = epsilon_spent(*key)
        spent[client] = epsilons[key]
    return spent


def _with_true_noise(
    run: Prepared, record: RoundRecord, ids: Sequence[str], answer: Aggregation
) -> RoundRecord:
    """The record with what follows from the closed-form noise of each update, if there is one.

    Under a schedule, noise energies are those of updates divided by the round's factor.
    """
    if not run.noise_is_known:
        return record
    positions = [run.positions[client] for client in ids]
    true_noise, reference = run.true_noise[positions], run.reference_noise[positions]
    record = replace(
        record,
        true_noise={client: float(noise) for client, noise in zip(ids, true_noise, strict=True)},
        oracle_noise=oracle_noise(reference),
    )
    if not answer.is_weighted_sum:
        return record
    record = replace(record, aggregate_noise=aggregate_noise(answer.weights, true_noise))
    if not np.all(true_noise > 0):
        return record
    steps = [1 if run.method.normalise else run.plans[k].steps_per_round for k in positions]
    share = signal_share(answer.weights, true_noise, steps, reference)
    return replace(record, signal_share=share)
