"""One round of a simulation: choose clients, train, aggregate, evaluate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure
from noisewise.aggregation.screening import screen_updates
from noisewise.errors import UpdateError
from noisewise.federation.attacks import attacked
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.executors import Executor
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RoundRecord
from noisewise.federation.run_loop import NOT_FINITE
from noisewise.federation.server_step import ServerStep, server_step, unchanged
from noisewise.federation.stopwatch import Stopwatch
from noisewise.noise.variance import aggregate_noise, oracle_noise, signal_share
from noisewise.privacy.spending import epsilon_spent
from noisewise.randomness import keyed_generator

__all__ = ["Federation", "choose_members", "play_round"]


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


def choose_members(federation: Federation, snapshot: Snapshot) -> list[int]:
    """Positions of the next round's clients: a random share of those that have budget left."""
    with_budget = [
        position
        for position, (client, plan) in enumerate(
            zip(federation.run.ids, federation.run.plans, strict=True)
        )
        if not plan.is_private or snapshot.rounds_done[client] < plan.rounds
    ]
    asked = math.ceil(federation.run.settings.participation * len(federation.run.clients))
    if len(with_budget) <= asked:
        return with_budget
    generator = keyed_generator(federation.run.seed, snapshot.round + 1, "participation")
    return sorted(int(m) for m in generator.choice(with_budget, size=asked, replace=False))


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
    received = attacked(trained, run.attacks, run.floor, run.seed, number, federation.first)
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
    kept = [federation.run.ids.index(client) for client in ids]
    clients = [federation.run.clients[k] for k in kept]
    known = {
        Disclosure.EPSILON: [client.disclosed_epsilon for client in clients],
        Disclosure.N_EXAMPLES: [client.spec.n_examples for client in clients],
        Disclosure.TRUE_VARIANCE: [federation.run.true_noise[k] for k in kept],
    }
    needs = federation.run.method.aggregator.needs
    return {need: np.array(known[need], dtype=np.float64) for need in needs}


def _record(federation: Federation, step: ServerStep) -> RoundRecord:
    """The server's record, and what only a simulator knows: true noise, scores, epsilons."""
    run, clock, record = federation.run, federation.clock, step.record()
    due = record.round % run.settings.evaluate_every == 0 or record.round == run.settings.rounds
    if step.answer is not None:
        record = _with_true_noise(run, record, step.ids, step.answer)
        if due:
            with clock.part("evaluation"):
                scores = federation.executor.evaluate(step.snapshot.released)
            by_client = dict(zip(run.ids, scores, strict=True))
            record = replace(
                record,
                accuracy={client: score.accuracy for client, score in by_client.items()},
                train_loss={client: score.train_loss for client, score in by_client.items()},
            )
    with clock.part("accounting"):
        done = step.snapshot.rounds_done
        spent = {
            client: epsilon_spent(plan, done[client]) if plan.is_private else None
            for client, plan in zip(run.ids, run.plans, strict=True)
        }
    return replace(record, epsilon_spent=spent)


def _with_true_noise(
    run: Prepared, record: RoundRecord, ids: Sequence[str], answer: Aggregation
) -> RoundRecord:
    """The record with what follows from the closed-form noise of each update."""
    kept = [run.ids.index(client) for client in ids]
    true_noise, reference = run.true_noise[kept], run.reference_noise[kept]
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
    steps = [1 if run.method.normalise else run.plans[k].steps_per_round for k in kept]
    share = signal_share(answer.weights, true_noise, steps, reference)
    return replace(record, signal_share=share)
