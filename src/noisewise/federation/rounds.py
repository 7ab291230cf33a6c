"""One round of a federation: who takes part, what they send, what the server makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure
from noisewise.aggregation.methods import Method
from noisewise.federation.attacks import Attack, attacked
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.clients import Client
from noisewise.federation.executors import Executor
from noisewise.federation.results import RoundRecord
from noisewise.federation.server import server_step
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.timing import Stopwatch
from noisewise.noise.variance import aggregate_noise, oracle_noise, signal_share
from noisewise.privacy.plan import LocalPlan
from noisewise.privacy.spending import epsilon_spent
from noisewise.randomness import keyed_generator

__all__ = ["Federation", "RoundOutcome", "choose_members", "play_round"]


@dataclass(frozen=True)
class Federation:
    """What all rounds of a run share.

    Attributes:
        true_noise: [n] closed-form noise energy of each client's update, as it is sent.
        reference_noise: [n] the same with every client's own budget, for the oracle.
        clock: told where the time goes.
        attacks: clients that send something else than what they trained.
        floor: the least noise energy of an honest update, which attackers know.
        first: own updates of the first round of attackers that use them in every round.
    """

    clients: tuple[Client, ...]
    plans: tuple[LocalPlan, ...]
    method: Method
    settings: TrainingSettings
    seed: int
    executor: Executor
    true_noise: NDArray[np.float64]
    reference_noise: NDArray[np.float64]
    clock: Stopwatch
    attacks: tuple[Attack, ...] = ()
    floor: float = 0.0
    first: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(client.spec.id for client in self.clients)


@dataclass(frozen=True)
class RoundOutcome:
    """The state after a round, its record, and whether training left the finite numbers."""

    snapshot: Snapshot
    record: RoundRecord
    diverged: bool


def choose_members(federation: Federation, snapshot: Snapshot) -> list[int]:
    """Positions of the next round's participants: those with budget left, then a random share."""
    able = [
        position
        for position, (client, plan) in enumerate(
            zip(federation.ids, federation.plans, strict=True)
        )
        if not plan.is_private or snapshot.rounds_done[client] < plan.rounds
    ]
    asked = math.ceil(federation.settings.participation * len(federation.clients))
    if len(able) <= asked:
        return able
    generator = keyed_generator(federation.seed, snapshot.round + 1, "participation")
    return sorted(int(m) for m in generator.choice(able, size=asked, replace=False))


def play_round(federation: Federation, snapshot: Snapshot, members: Sequence[int]) -> RoundOutcome:
    """Train the members from the snapshot, screen and aggregate their updates, evaluate.

    A member's round is charged to its budget whether or not its update is used.
    """
    number = snapshot.round + 1
    with federation.clock.part("local training"):
        deltas = federation.executor.updates(snapshot.theta, number, members)
    trained = {federation.ids[m]: delta for m, delta in zip(members, deltas, strict=True)}
    received = attacked(
        trained, federation.attacks, federation.floor, federation.seed, number, federation.first
    )
    rounds_done = dict(snapshot.rounds_done)
    for client in received:
        rounds_done[client] += 1
    with federation.clock.part("aggregation"):
        step = server_step(
            federation.method,
            snapshot,
            received,
            lambda ids: _disclosed(federation, _positions(federation, ids)),
            rounds_done,
        )
    if step.failure == "unusable":  # local training overflowed at every client
        record = _record(federation, number, rounds_done, dict.fromkeys(received, "not finite"))
        return RoundOutcome(step.snapshot, record, True)
    if step.answer is None:
        record = _record(federation, number, rounds_done, step.dropped)
        return RoundOutcome(step.snapshot, record, False)
    kept = _positions(federation, step.ids)
    record = _record(
        federation, number, rounds_done, step.dropped, step.snapshot.released, step.answer, kept
    )
    diverged = not bool(torch.isfinite(step.snapshot.theta).all()) or (
        record.train_loss is not None and not math.isfinite(record.mean_train_loss)
    )
    return RoundOutcome(step.snapshot, record, diverged)


def _positions(federation: Federation, ids: Sequence[str]) -> list[int]:
    return [federation.ids.index(client) for client in ids]


def _disclosed(
    federation: Federation, kept: Sequence[int]
) -> Mapping[Disclosure, NDArray[np.float64]]:
    """What the method's server is told about the clients of the round, and nothing more."""
    clients = [federation.clients[k] for k in kept]
    everything = {
        Disclosure.EPSILON: [client.told_epsilon for client in clients],
        Disclosure.N_EXAMPLES: [client.spec.n_examples for client in clients],
        Disclosure.TRUE_VARIANCE: [federation.true_noise[k] for k in kept],
    }
    needs = federation.method.aggregator.needs
    return {what: np.array(everything[what], dtype=np.float64) for what in needs}


def _record(
    federation: Federation,
    number: int,
    rounds_done: Mapping[str, int],
    dropped: Mapping[str, str],
    theta: Tensor | None = None,
    answer: Aggregation | None = None,
    kept: Sequence[int] = (),
) -> RoundRecord:
    """What the simulator notes down about a round."""
    ids = [federation.ids[k] for k in kept]
    weighed = [client for client in ids if client not in dropped]
    true_noise = federation.true_noise[list(kept)]
    steps = [
        1 if federation.method.normalise else federation.plans[k].steps_per_round for k in kept
    ]
    settings = federation.settings
    due = number % settings.evaluate_every == 0 or number == settings.rounds
    scores = None
    if due and theta is not None:
        with federation.clock.part("evaluation"):
            scores = federation.executor.evaluate(theta)
    estimate = answer.noise if answer else None
    with federation.clock.part("accounting"):
        spent = {
            client: epsilon_spent(plan, rounds_done[client]) if plan.is_private else None
            for client, plan in zip(federation.ids, federation.plans, strict=True)
        }
    return RoundRecord(
        round=number,
        weights=_by_client(ids, answer.weights) if answer else {},
        dropped=dict(dropped),
        noise_estimate=_by_client(weighed, estimate.variance) if estimate else None,
        noise_converged=bool(estimate.converged) if estimate else None,
        true_noise=_by_client(ids, true_noise),
        aggregate_noise=(
            aggregate_noise(answer.weights, true_noise)
            if answer and answer.is_weighted_sum
            else None
        ),
        signal_share=(
            signal_share(answer.weights, true_noise, steps, federation.reference_noise[list(kept)])
            if answer and answer.is_weighted_sum and np.all(true_noise > 0)
            else None
        ),
        oracle_noise=oracle_noise(federation.reference_noise[list(kept)]) if kept else None,
        epsilon_spent=spent,
        accuracy=_by_client(federation.ids, [s.accuracy for s in scores]) if scores else None,
        train_loss=_by_client(federation.ids, [s.train_loss for s in scores]) if scores else None,
    )


def _by_client(
    ids: Sequence[str], values: Sequence[float] | NDArray[np.float64]
) -> dict[str, float]:
    return {client: float(value) for client, value in zip(ids, values, strict=True)}
