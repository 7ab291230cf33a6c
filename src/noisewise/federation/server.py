"""The server's part of a round, one for the simulator and for Flower: the same updates give the
same model, bit for bit.

Nothing here knows how updates travelled or who trained them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView
from noisewise.aggregation.methods import Method
from noisewise.aggregation.screening import screen_updates
from noisewise.errors import NoHonestUpdateError, UpdateError
from noisewise.federation.checkpoint import Snapshot
from noisewise.noise.unforeseen import reseeded

__all__ = ["Disclose", "ServerStep", "server_step", "with_unforeseen_samples"]

Disclose = Callable[[tuple[str, ...]], Mapping[Disclosure, NDArray[np.float64]]]
"""(ids of the columns) -> what the server is told about them."""


@dataclass(frozen=True)
class ServerStep:
    """What the server made of a round's updates.

    Attributes:
        snapshot: the state after the round.
        ids: clients whose updates were aggregated, in the order of the columns.
        dropped: why others were not used.
        answer: the aggregator's; None if the model stayed as it was.
        failure: why it stayed: ``unusable`` if screening left nothing, ``refused`` if a guard did.
    """

    snapshot: Snapshot
    ids: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    answer: Aggregation | None = None
    failure: Literal["unusable", "refused"] | None = None


def server_step(
    method: Method,
    snapshot: Snapshot,
    received: Mapping[str, Tensor],
    disclose: Disclose,
    rounds_done: Mapping[str, int] | None = None,
) -> ServerStep:
    """Screen a round's updates, aggregate them, move the model.

    Args:
        method: settled, see `Method.settled`.
        snapshot: the state before the round.
        received: updates [p] by client id, sound or not.
        disclose: what the aggregator declares that it needs; asked for the sound updates only.
        rounds_done: of each client, after the round; None counts who sent something.
    """
    number = snapshot.round + 1
    if rounds_done is None:
        rounds_done = dict(snapshot.rounds_done)
        for client in received:
            rounds_done[client] = rounds_done.get(client, 0) + 1
    waiting = replace(snapshot, round=number, rounds_done=rounds_done)
    try:
        screened = screen_updates(received, size=len(snapshot.theta), dtype=snapshot.theta.dtype)
    except UpdateError as error:
        return ServerStep(waiting, dropped=dict.fromkeys(received, str(error)), failure="unusable")
    ids = screened.updates.ids
    try:
        given: object = method.aggregator.aggregate(
            ServerView(screened.updates, number, disclose(ids)), snapshot.state
        )
    except NoHonestUpdateError as error:
        return ServerStep(waiting, dropped=dict.fromkeys(received, str(error)), failure="refused")
    if not isinstance(given, Aggregation):  # an aggregator may be anybody's
        kind = type(given).__name__
        raise UpdateError(f"{method.name}: aggregate() must return an Aggregation, not {kind}")
    answer = given
    theta = snapshot.theta + method.server_rate * answer.delta.to(snapshot.theta)
    average = _average(snapshot, theta, method.average_rounds)
    return ServerStep(
        Snapshot(number, theta, answer.state, rounds_done, average),
        ids,
        {**screened.dropped, **answer.refused},
        answer,
    )


def _average(snapshot: Snapshot, theta: Tensor, rounds: int) -> Tensor | None:
    """Moving average of the global model over about ``rounds`` rounds, in float64; None for 0.

    The weight of the newest model is 1/t in round t until it reaches 1/rounds, so that the average
    is not pulled to the start.
    """
    if rounds == 0:
        return None
    share = 1 / min(rounds, snapshot.round + 1)
    before = snapshot.theta if snapshot.average is None else snapshot.average
    return (before.double() + share * (theta.double() - before.double())).to(theta)


def with_unforeseen_samples(method: Method) -> Method:
    """The method with parts that read no coordinates which a client can foresee.

    Raises:
        InvalidValueError: if the aggregator or its estimator neither can be reseeded nor declares
            that it reads all coordinates (see `noisewise.noise.unforeseen`).
    """
    return replace(method, aggregator=reseeded(method.aggregator, None, "method"))
