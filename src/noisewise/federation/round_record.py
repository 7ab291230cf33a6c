"""`RoundRecord`: what happened in one round of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noisewise.text import short_repr

__all__ = ["RoundRecord", "read_record"]


@dataclass(frozen=True, repr=False)
class RoundRecord:
    """What happened in one round. A server knows only some of the fields.

    Attributes:
        round: counted from 1.
        weights: aggregation weight of each client whose update was used.
        dropped: why updates of other clients were not used.
        noise_estimate: the server's estimate of each update's noise energy, if it made one.
        noise_converged: whether the estimator converged.
        true_noise: closed-form noise energy of each update; simulator only.
        aggregate_noise: noise energy of the change of the global model; simulator only, and None if
            the aggregate is not a weighted sum (PFA).
        oracle_noise: the smallest noise energy that any weights reach with every client's own
            budget; simulator only.
        epsilon_spent: by each client so far, None without privacy; simulator only.
        signal_share: signal-to-noise ratio of the aggregate divided by the best one (see
            `noisewise.noise.variance.signal_share`); None as for ``aggregate_noise``.
        accuracy: on each client's held-out records, or on a server's public records; None if the
            round was not evaluated.
        train_loss: on each client's training records; simulator only.
        noised_accuracy: the scores that sites of a real federation chose to send, each with
            noise of its own; None if the server did not ask.
        metrics: the task's other metrics, by name and client; None if there are none.
        overall: figures of all clients' held-out records together, of metrics that need it.
        confusion: number of held-out records of all clients by class and predicted class, after the
            last round of a classification with at most 100 classes; simulator only.
        drop_kinds: the `DropKind` of the reasons in ``dropped`` that have one.
    """

    round: int
    weights: Mapping[str, float]
    dropped: Mapping[str, str]
    noise_estimate: Mapping[str, float] | None
    noise_converged: bool | None
    true_noise: Mapping[str, float] = field(default_factory=dict)
    aggregate_noise: float | None = None
    oracle_noise: float | None = None
    epsilon_spent: Mapping[str, float | None] = field(default_factory=dict)
    accuracy: Mapping[str, float] | None = None
    train_loss: Mapping[str, float] | None = None
    signal_share: float | None = None
    noised_accuracy: Mapping[str, float] | None = None
    metrics: Mapping[str, Mapping[str, float]] | None = None
    overall: Mapping[str, float] | None = None
    confusion: Sequence[Sequence[int]] | None = None
    drop_kinds: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Its number, clients and mean figures."""
        names = [] if self.accuracy is None else ["accuracy"]
        figures = {name: self.figure(name) for name in [*names, *(self.metrics or {})]}
        return short_repr(
            self,
            round=self.round,
            used=len(self.used),
            dropped=len(self.dropped) or None,
            **figures,
        )

    @property
    def evaluated(self) -> bool:
        """Whether the round was evaluated."""
        return self.accuracy is not None or self.metrics is not None

    def by_client(self, metric: str) -> Mapping[str, float]:
        """A metric at each client; empty if the round has no such figure."""
        if metric == "accuracy" and self.accuracy is not None:
            return self.accuracy
        return (self.metrics or {}).get(metric, {})

    def figure(self, metric: str) -> float:
        """A metric over all clients (`MetricInfo.combine`); NaN if the round has no such figure."""
        if self.overall is not None and metric in self.overall:
            return self.overall[metric]
        scores = list(self.by_client(metric).values())
        return float(np.mean(scores)) if scores else math.nan

    @property
    def used(self) -> frozenset[str]:
        """Clients whose updates were used; a guard's refusals have a weight of 0."""
        return frozenset(self.weights) - frozenset(self.dropped)

    @property
    def changed(self) -> bool:
        """Whether the round's updates changed the model."""
        return bool(self.weights)

    @property
    def mean_noised_accuracy(self) -> float:
        """Mean over the sites that sent one; NaN if none did."""
        accuracies = list((self.noised_accuracy or {}).values())
        return float(np.mean(accuracies)) if accuracies else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean over clients; NaN if the round was not evaluated or the task has no accuracy."""
        return self.figure("accuracy")

    @property
    def mean_train_loss(self) -> float:
        """Mean over clients; NaN if unknown or not finite."""
        losses = [] if self.train_loss is None else list(self.train_loss.values())
        return float(np.mean(losses)) if losses else math.nan

    @property
    def noise_ratio(self) -> float:
        """Noise of the aggregate divided by the oracle's: 1 is the best, 0 means no noise."""
        if self.aggregate_noise == 0:
            return 0.0
        if self.aggregate_noise is None or not self.oracle_noise:
            return math.nan
        return self.aggregate_noise / self.oracle_noise


def read_record(line: str | bytes) -> RoundRecord:
    """Read a record from its line of ``rounds.jsonl``.

    In mappings, null is a number that was not finite. In ``epsilon_spent``, null means no privacy.
    """
    fields = json.loads(line)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("epsilon_spent", "dropped", "drop_kinds"):
            fields[name] = _numbers(value)
    return RoundRecord(**fields)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers by name, or numbers by name and client, with NaN for null."""
    return {
        name: math.nan if value is None else _numbers(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
