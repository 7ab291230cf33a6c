"""What a result says about its clients and settings, as it is in ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

__all__ = ["ClientFacts", "RunSettings"]


class ClientFacts(TypedDict, total=False):
    """What a result says about one client, as it is in ``result.json``.

    A simulation has all fields but ``declared``; ``unit`` and ``max_records`` only if the budget
    protects persons, whose number ``n_examples`` then is. Of a real site there is ``declared``
    only: the site's `Declaration` as a mapping, or None.
    """

    id: str
    n_examples: int
    batch_size: int
    local_epochs: int
    epsilon: float
    delta: float
    reported_epsilon: float | None
    planned_epsilon: float | None
    noise_multiplier: float
    sample_rate: float
    steps_per_round: int
    planned_rounds: int
    unit: str
    max_records: int
    declared: Mapping[str, Any] | None


class RunSettings(TypedDict, total=False):
    """Settings of a run, as they are in ``result.json``.

    Both kinds of runs have ``rounds``, ``learning_rate`` (of the clients' local steps) and
    ``participation``. ``server_rate`` is "auto" if `AutoSteps` sets the server's steps. A
    simulation adds its other `TrainingSettings`, ``clip_norm`` and ``accountant``; a server adds
    ``min_clients`` and ``noise_floor``. Training options are listed if they are not the default.
    """

    rounds: int
    learning_rate: float
    server_rate: Literal["auto"]
    participation: float
    evaluate_every: int
    physical_batch: int
    device: str
    loss_records: int
    clip_norm: float | None
    accountant: str
    min_clients: int
    noise_floor: float | None
    evaluate_clients: float
    local_optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    server_optimiser: Mapping[str, Any]
    clip_rule: str
