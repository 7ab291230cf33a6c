"""`NoiseTracker`: estimates over rounds - how often to estimate, and what to remember."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate
from noisewise.noise.factor import Factor
from noisewise.noise.unforeseen import reseeded

__all__ = ["NoiseTracker", "TrackerState"]

TrackerState = Mapping[str, NDArray[np.float64] | NDArray[np.str_]]
"""Named arrays: ids, log_level and count [m] each, log_scale and rounds [1] each."""


@dataclass(frozen=True)
class NoiseTracker:
    """Runs an estimator over rounds and remembers what it said of each client.

    A client's noise level hardly changes from round to round (eq. sigma_i^2: it follows from the
    client's plan), so the estimates of several rounds are averaged. What does change is a factor
    common to all clients (a learning-rate schedule; the share of the noise that PCP sees), on
    which weights do not depend: log sigma_it^2 = s_t + l_i + error, with s_t the median over the
    known clients and l_i averaged over rounds. A client that is new gets its level at once. One
    whose estimate is off by more than the factor ``change`` has changed its level: it starts anew.

    Attributes:
        estimator: the estimator of a single round.
        every: estimate in every k-th round and whenever a client is new, or in the ``first`` round
            in which a client takes part and never again (as the authors' code does).
        memory: number of estimates over which levels are averaged; 1 takes each as it comes.
        change: factor by which an estimate must differ from the level to replace it.
    """

    estimator: Estimator
    every: int | Literal["first"] = 1
    memory: int = 20
    change: float = 1.5

    def __post_init__(self) -> None:
        if self.every != "first":
            try:
                positive_int("every", self.every)
            except InvalidValueError:
                allowed = 'must be a whole number >= 1 or "first"'
                raise InvalidValueError("every", self.every, allowed) from None
        positive_int("memory", self.memory)
        if positive_number("change", self.change) <= 1:
            raise InvalidValueError("change", self.change, "must be a factor > 1")

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.unforeseen.Reseedable`."""
        return replace(self, estimator=reseeded(self.estimator, seed, "estimator"))

    def estimate(
        self, updates: Matrix, ids: Sequence[str], state: TrackerState
    ) -> tuple[NoiseEstimate, TrackerState]:
        """The round's estimate for the clients ``ids``, and the state for the next round.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            state: what the last call returned; empty at first. It is not modified.

        Returns:
            An estimate whose variances are on the scale of this round's (or the last) estimate;
            its details say whether it was ``remembered`` and how many ``estimates`` it rests on.
        """
        if len(set(ids)) != len(ids) or len(ids) != updates.shape[1]:
            raise UpdateError(
                f"updates of shape {tuple(updates.shape)} do not fit the {len(set(ids))} different "
                f"client ids of {len(ids)}"
            )
        memory = _Memory.of(state)
        if self._rests(ids, memory):
            estimate = memory.recall(ids, self.estimator.name)
        else:
            fresh = self._fresh(updates, ids, memory)
            estimate = self._learn(fresh, ids, memory)
        memory.rounds += 1
        return estimate, memory.state()

    def _fresh(self, updates: Matrix, ids: Sequence[str], memory: _Memory) -> NoiseEstimate:
        """The round's own estimate; the factor model starts from what is known."""
        if isinstance(self.estimator, Factor) and all(client in memory.levels for client in ids):
            known = memory.recall(ids, self.estimator.name).variance
            return self.estimator.estimate(updates, start=known)
        return self.estimator.estimate(updates)

    def _rests(self, ids: Sequence[str], memory: _Memory) -> bool:
        """Whether this round needs no estimate: it is not due and every client is known."""
        due = self.every != "first" and memory.rounds % self.every == 0
        return not due and all(client in memory.levels for client in ids)

    def _learn(self, fresh: NoiseEstimate, ids: Sequence[str], memory: _Memory) -> NoiseEstimate:
        """Merge a fresh estimate into the memory, and return the better of both."""
        usable = np.isfinite(fresh.variance) & (fresh.variance > 0)
        log_variance = np.log(np.where(usable, fresh.variance, 1.0))
        ratios = [
            log_variance[i] - memory.levels[client]
            for i, client in enumerate(ids)
            if usable[i] and client in memory.levels
        ]
        if ratios:
            memory.log_scale = float(np.median(ratios))
        variance = fresh.variance.copy()
        counts = np.zeros(len(ids))
        for i, client in enumerate(ids):
            if not usable[i]:
                continue  # no noise at all, or no number: nothing to average, the caller decides
            observed = float(log_variance[i]) - memory.log_scale
            self._update(memory, client, observed)
            if self.memory > 1 or self.every == "first":
                variance[i] = math.exp(memory.log_scale + memory.levels[client])
            counts[i] = memory.counts[client]
        details = {**fresh.details, "remembered": False, "estimates": counts}
        return NoiseEstimate(variance, fresh.method, fresh.converged, details)

    def _update(self, memory: _Memory, client: str, observed: float) -> None:
        level = memory.levels.get(client)
        if level is not None and self.every == "first":
            return
        if level is None or abs(observed - level) > math.log(self.change):
            memory.levels[client], memory.counts[client] = observed, 1.0
            return
        count = memory.counts[client] + 1
        memory.levels[client] = level + (observed - level) / min(count, self.memory)
        memory.counts[client] = count


@dataclass
class _Memory:
    """The state as Python values: a working copy that one call fills and packs again."""

    levels: dict[str, float]
    counts: dict[str, float]
    log_scale: float
    rounds: int

    @classmethod
    def of(cls, state: TrackerState) -> _Memory:
        if not state:
            return cls({}, {}, 0.0, 0)
        ids = [str(client) for client in state["ids"]]
        return cls(
            dict(zip(ids, (float(x) for x in state["log_level"]), strict=True)),
            dict(zip(ids, (float(x) for x in state["count"]), strict=True)),
            float(state["log_scale"][0]),
            int(float(state["rounds"][0])),
        )

    def state(self) -> TrackerState:
        return {
            "ids": np.array(list(self.levels), dtype=np.str_),
            "log_level": np.array(list(self.levels.values()), dtype=np.float64),
            "count": np.array(list(self.counts.values()), dtype=np.float64),
            "log_scale": np.array([self.log_scale]),
            "rounds": np.array([float(self.rounds)]),
        }

    def recall(self, ids: Sequence[str], method: str) -> NoiseEstimate:
        levels = np.array([self.levels[client] for client in ids])
        details: dict[str, Any] = {
            "remembered": True,
            "estimates": np.array([self.counts[client] for client in ids]),
        }
        return NoiseEstimate(np.exp(self.log_scale + levels), method, True, details)
