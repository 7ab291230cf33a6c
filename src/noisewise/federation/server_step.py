"""The server's part of a round, the same for the simulator and for Flower.

The same updates give the same model, bit for bit, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import (
    Aggregation,
    Disclosure,
    ServerView,
    State,
    UpdateMatrix,
)
from noisewise.aggregation.drop_reason import DropReason
from noisewise.aggregation.methods import Method
from noisewise.aggregation.screening import Screened
from noisewise.aggregation.server_optimisers import STATE_PREFIX
from noisewise.errors import InvalidValueError, NoHonestUpdateError, UpdateError
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.round_record import RoundRecord
from noisewise.noise.reseeding import reseeded

__all__ = ["Disclose", "ServerStep", "server_step", "unchanged", "with_unforeseen_samples"]

Disclose = Callable[[tuple[str, ...]], Mapping[Disclosure, NDArray[np.float64]]]
"""(ids of the columns) -> what the server knows about them besides their updates."""


@dataclass(frozen=True)
class ServerStep:
    """The result of one round at the server.

    Attributes:
        snapshot: the state after the round.
        dropped: why updates of other clients were not used.
        ids: clients whose updates were aggregated, in the order of the columns.
        answer: the aggregator's result; None if the round did not change the model.
    """

    snapshot: Snapshot
    dropped: Mapping[str, str]
    ids: tuple[str, ...] = ()
    answer: Aggregation | None = None

    def record(self) -> RoundRecord:
        """The record of the round, with what a server learns from the updates only."""
        answer, estimate = self.answer, self.answer.noise if self.answer else None
        estimated = [client for client in self.ids if client not in self.dropped]
        return RoundRecord(
            round=self.snapshot.round,
            weights=_by_client(self.ids, answer.weights) if answer else {},
            dropped={client: str(reason) for client, reason in self.dropped.items()},
            drop_kinds={
                client: reason.kind
                for client, reason in self.dropped.items()
                if isinstance(reason, DropReason) and reason.kind
            },
            noise_estimate=_by_client(estimated, estimate.variance) if estimate else None,
            noise_converged=bool(estimate.converged) if estimate else None,
        )


def server_step(
    method: Method, snapshot: Snapshot, screened: Screened, disclose: Disclose
) -> ServerStep:
    """Aggregate a round's updates and change the model.

    Args:
        method: with its server steps, see `Method.with_server_steps`.
        snapshot: the state before the round; the clients' rounds are counted already.
        screened: the updates that can be aggregated, and why others were dropped.
        disclose: what the aggregator declares that it needs.

    Raises:
        UpdateError: the aggregator returned something of another type or shape.
    """
    number, ids = snapshot.round + 1, screened.updates.ids
    factor, (own, of_optimiser) = method.rate_factor(number), _parted(snapshot.state)
    updates = screened.updates
    if factor != 1.0:  # aggregators see updates of one scale in all rounds
        updates = UpdateMatrix(updates.values / factor, ids)
    try:
        aggregation = _checked(
            method.aggregator.aggregate(ServerView(updates, number, disclose(ids)), own),
            method.name,
            updates,
        )
    except NoHonestUpdateError as error:
        return unchanged(snapshot, {**dict.fromkeys(ids, DropReason.of(error)), **screened.dropped})
    delta, auto = aggregation.delta.to(snapshot.theta), method.auto
    change = method.server_rate * delta if auto is None else auto.scaled(delta)
    if factor != 1.0:
        change = change * factor
    state = aggregation.state
    if method.optimiser is not None:
        moved, later = method.optimiser.step(change.double().cpu().numpy(), of_optimiser)
        change, state = torch.from_numpy(moved).to(change), {**state, **later}
    theta = snapshot.theta + change
    average = _average(snapshot, theta, _newest_share(method, number))
    after = Snapshot(number, theta, state, snapshot.rounds_done, average)
    return ServerStep(after, {**screened.dropped, **aggregation.refused}, ids, aggregation)


def _checked(aggregation: object, method: str, updates: UpdateMatrix) -> Aggregation:
    """The result of an aggregator, which users write too.

    Raises:
        UpdateError: the type of a part or the shape of an array is wrong.
    """
    if not isinstance(aggregation, Aggregation):
        kind = type(aggregation).__name__
        raise UpdateError(f"{method}: aggregate() must return an Aggregation, not {kind}")
    delta: object = aggregation.delta
    if not isinstance(delta, Tensor):
        kind = type(delta).__name__
        raise UpdateError(f"{method}: Aggregation.delta must be a tensor, not {kind}")
    p, n = updates.values.shape
    expected: list[tuple[str, Any, int]] = [
        ("delta", delta, p),
        ("weights", aggregation.weights, n),
    ]
    if aggregation.noise is not None:
        n_estimated = sum(client not in aggregation.refused for client in updates.ids)
        expected.append(("noise.variance", aggregation.noise.variance, n_estimated))
    for name, array, size in expected:
        shape = tuple(np.shape(array))
        if shape != (size,):
            allowed = f"must have the shape ({size},), not {shape}"
            raise UpdateError(f"{method}: Aggregation.{name} {allowed}")
    for name, array in aggregation.state.items():
        is_array = isinstance(array, np.ndarray)
        if not is_array or array.dtype.kind not in "fU":  # what checkpoints store
            form = str(array.dtype) if is_array else type(array).__name__
            allowed = f"must be a numpy array of floats or texts, not {form}"
            raise UpdateError(f"{method}: Aggregation.state[{name!r}] {allowed}")
        if str(name).startswith(STATE_PREFIX):
            allowed = f"must not begin with {STATE_PREFIX!r}, which the server optimiser uses"
            raise UpdateError(f"{method}: Aggregation.state[{name!r}] {allowed}")
    return aggregation


def _parted(state: State) -> tuple[State, State]:
    """The aggregator's part of the state, and that of the server's optimiser."""
    of_optimiser = {k: v for k, v in state.items() if k.startswith(STATE_PREFIX)}
    return {k: v for k, v in state.items() if k not in of_optimiser}, of_optimiser


def unchanged(snapshot: Snapshot, dropped: Mapping[str, str]) -> ServerStep:
    """A round that leaves the model as it was.

    Args:
        snapshot: the state before the round.
        dropped: why each update was not used.
    """
    return ServerStep(replace(snapshot, round=snapshot.round + 1), dropped)


def _by_client(ids: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    return {client: float(value) for client, value in zip(ids, values, strict=True)}


def _newest_share(method: Method, number: int) -> float | None:
    """The weight of the model after a round in the released average; None without an average.

    With ``average_rounds``, it is 1/t in round t until it reaches 1/average_rounds, so that the
    initial model has no lasting weight.
    """
    if method.auto is not None:
        return method.auto.newest_share(number)
    return 1 / min(method.average_rounds, number) if method.average_rounds else None


def _average(snapshot: Snapshot, theta: Tensor, share: float | None) -> Tensor | None:
    """The average with the newest model, in float64."""
    if share is None:
        return None
    before = snapshot.theta if snapshot.average is None else snapshot.average
    return (before.double() + share * (theta.double() - before.double())).to(theta)


def with_unforeseen_samples(method: Method) -> Method:
    """The method with unpredictable samples: no client can foresee which coordinates are read.

    Raises:
        InvalidValueError: if the aggregator or its estimator neither can be reseeded nor declares
            that it reads all coordinates (see `noisewise.noise.reseeding`), or if the aggregator
            loses its guard when it is reseeded.
    """
    deployed = replace(method, aggregator=reseeded(method.aggregator, None, "method"))
    if deployed.guard != method.guard:
        kind = type(method.aggregator).__name__
        allowed = f"{kind}.reseeded(seed) must return a copy with the same `guard`"
        raise InvalidValueError("method", method.name, allowed)
    return deployed
