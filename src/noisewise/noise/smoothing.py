"""`NoiseTracker`: runs an estimator over rounds and averages each client's estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate, WarmStart
from noisewise.noise.reseeding import reseeded

__all__ = ["NoiseTracker", "TrackerState"]

TrackerState = Mapping[str, NDArray[np.float64] | NDArray[np.str_]]
"""Named arrays: ``ids``, ``log_level`` and ``count`` [m] each, ``log_scale`` and ``rounds`` [1]."""


@dataclass(frozen=True)
class NoiseTracker:
    """Runs an estimator over rounds and averages each client's estimates.

    A client's noise level hardly changes from round to round, because it follows from the client's
    plan (eq. sigma_i^2). The tracker therefore averages the estimates of several rounds. A factor
    that is common to all clients can change, for example with a learning-rate schedule or with the
    share of the noise that PCP finds; weights do not depend on it. The model is
    log sigma_it^2 = s_t + l_i + error: the scale s_t is the median over the known clients, and the
    level l_i is averaged over rounds. The first estimate of a new client is its level. If an
    estimate differs from the level by more than the factor ``change``, the client has changed its
    noise, and the average starts again from that estimate.

    Attributes:
        estimator: the estimator for a single round.
        every: k estimates in every k-th round and in each round with a new client. ``"first"``
            estimates only in the first round in which a client takes part, as the authors' code
            does.
        memory: number of estimates over which levels are averaged; 1 for no averaging.
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
        """See `noisewise.noise.reseeding.Reseedable`."""
        return replace(self, estimator=reseeded(self.estimator, seed, "estimator"))

    def estimate(
        self, updates: Matrix, ids: Sequence[str], state: TrackerState
    ) -> tuple[NoiseEstimate, TrackerState]:
        """Estimate the noise energies of a round's clients.

        Args:
            updates: [p, n].
            ids: the n client ids, in the order of the columns.
            state: the state that the previous call returned; empty in the first round. It is not
                modified.

        Returns:
            The estimate and the state for the next round. The variances are on the scale of the
            latest estimate. The details say whether the variances are ``remembered`` from earlier
            rounds only, and how many ``estimates`` ([n]) were averaged.

        Raises:
            UpdateError: an id occurs twice, the number of ids is not n, or the estimator returned
                something else than n energies.

        Example:
            >>> from noisewise.noise import Norm
            >>> tracker, state = NoiseTracker(Norm()), {}
            >>> for scale in (2.0, 2.2):
            ...     updates = np.diag([scale, 2 * scale])
            ...     estimate, state = tracker.estimate(updates, ["a", "b"], state)
            >>> estimate.details["estimates"].tolist()
            [2.0, 2.0]
        """
        if len(set(ids)) != len(ids) or len(ids) != updates.shape[1]:
            raise UpdateError(
                f"updates has shape {tuple(updates.shape)} and there are {len(ids)} client ids, "
                f"{len(set(ids))} of them different: must be one different id for each column"
            )
        memory = _Memory.of(state)
        if self._can_reuse(ids, memory):
            estimate = memory.recall(ids, self.estimator.name)
        else:
            new = self._estimate_round(updates, ids, memory)
            estimate = self._average(new, ids, memory)
        memory.rounds += 1
        return estimate, memory.state()

    def _estimate_round(
        self, updates: Matrix, ids: Sequence[str], memory: _Memory
    ) -> NoiseEstimate:
        """Estimate from this round's updates, with a warm start if every client is known."""
        if isinstance(self.estimator, WarmStart) and all(client in memory.levels for client in ids):
            start = memory.recall(ids, self.estimator.name).variance
            estimate: object = self.estimator.estimate_from(updates, start)
        else:
            estimate = self.estimator.estimate(updates)
        return _checked(estimate, self.estimator.name, len(ids))

    def _can_reuse(self, ids: Sequence[str], memory: _Memory) -> bool:
        """Return whether no estimate is due in this round and every client is known."""
        due = self.every != "first" and memory.rounds % self.every == 0
        return not due and all(client in memory.levels for client in ids)

    def _average(self, new: NoiseEstimate, ids: Sequence[str], memory: _Memory) -> NoiseEstimate:
        """Add a new estimate to the averages in ``memory``, and return the averages."""
        usable = np.isfinite(new.variance) & (new.variance > 0)
        log_variance = np.log(np.where(usable, new.variance, 1.0))
        ratios = [
            log_variance[i] - memory.levels[client]
            for i, client in enumerate(ids)
            if usable[i] and client in memory.levels
        ]
        if ratios:
            memory.log_scale = float(np.median(ratios))
        variance = new.variance.copy()
        counts = np.zeros(len(ids))
        for i, client in enumerate(ids):
            if not usable[i]:
                continue  # a variance of 0, inf or NaN is returned as it is and not averaged
            observed = float(log_variance[i]) - memory.log_scale
            self._update(memory, client, observed)
            if self.memory > 1 or self.every == "first":
                variance[i] = math.exp(memory.log_scale + memory.levels[client])
            counts[i] = memory.counts[client]
        details = {**new.details, "remembered": False, "estimates": counts}
        return NoiseEstimate(variance, new.method, new.converged, details)

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


def _checked(estimate: object, name: str, n_clients: int) -> NoiseEstimate:
    """The result of an estimator, which users write too.

    Raises:
        UpdateError: its type or the shape of its variances is wrong.
    """
    if not isinstance(estimate, NoiseEstimate):
        kind = type(estimate).__name__
        raise UpdateError(f"estimator {name}: must return a NoiseEstimate, not {kind}")
    shape = tuple(np.shape(estimate.variance))
    if shape != (n_clients,):
        allowed = f"must have the shape ({n_clients},), not {shape}"
        raise UpdateError(f"estimator {name}: NoiseEstimate.variance {allowed}")
    return estimate


@dataclass
class _Memory:
    """The state as Python values: a copy that one call changes and converts back to arrays."""

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
