"""`AgreementTracker`: whether what a client sent in the past agrees with what others send later.

An attacker can give its update the noise that the policy demands and still choose the direction.
One round does not show that: along any direction the noise of one update hides a small pull. But
noise is independent between rounds and a harmful direction is not. The inner product of what
client i sent in earlier rounds, C_i, with what client j sends now, d_j, is <C_i, g> plus noise that
client i cannot know. With g the common direction of improvement, <C_i, g> is to first order how
much the earlier updates of i lower the others' loss today. An attacker that does harm has a
negative one, whichever direction it chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError

__all__ = ["Agreement", "AgreementTracker"]

State = Mapping[str, NDArray[Any]]
Vector = NDArray[np.float64]

_HUBER = 1.345  # standard errors within which an observation counts in full
_ITERATIONS = 30


@dataclass(frozen=True)
class Agreement:
    """How much each client's past updates agree with the others' present ones, for one memory.

    Attributes:
        value: [n] robust mean over j != i of sum_t <C_i, d_j>, the benefit of client i.
        error: [n] its standard error from noise alone; infinite where nothing is known.
        bias: [n] by how much f of the others can shift it, to first order.
        typical: robust mean of ``value`` over the clients.
        typical_error: its standard error.
    """

    value: Vector
    error: Vector
    bias: Vector
    typical: float
    typical_error: float

    def trust(self, weights: Vector, errors: float) -> Vector:
        """Factors in (0, 1] by which to lower ``weights`` ([n], summing to 1).

        With the benefit b_i + errors * e_i + bias_i of a client, at best: where it is negative, the
        client pulls back by w_i times that much. The factor reduces this to 1/n of what a typical
        client with the whole weight moves forward: n clients of equal weight and opposite benefit
        are left alone, and nobody is excluded.
        """
        best = self.value + errors * self.error + self.bias
        allowed = (max(self.typical, 0.0) + self.typical_error) / len(weights)
        pull = np.where(np.isfinite(best), -best, 0.0) * weights
        return np.where(pull > allowed, allowed / np.maximum(pull, 1e-300), 1.0)


@dataclass(frozen=True)
class AgreementTracker:
    """Benefits of all clients, from products between their past updates and others' present ones.

    C_i = sum_s decay^(age of s) d_i^s over the rounds s in which client i took part, and
    B_ij = sum_t decay^(age of t) <C_i^(t-1), d_j^t>, whose noise has the variance
    sum_t decay^(2 age of t) ||C_i||^2 sigma_j^2 / p. The benefit of i is a Huber mean of B_ij over
    the others j, so that f of them can shift it by a bounded number of standard errors only.
    Several memories are kept, as a short one sees a client that changes its mind and a long one
    sees a small pull.

    Attributes:
        decays: one for each memory, in [0, 1).
        tolerated_attackers: f.
        errors: standard errors of doubt in favour of a client.
    """

    decays: tuple[float, ...] = (0.5, 0.9)
    tolerated_attackers: int = 1
    errors: float = 2.5

    def __post_init__(self) -> None:
        positive_int("tolerated_attackers", self.tolerated_attackers)
        if not self.decays or not all(0 <= decay < 1 for decay in self.decays):
            raise InvalidValueError("decays", self.decays, "must be one or more numbers in [0, 1)")

    def judge(
        self,
        updates: Tensor,
        ids: Sequence[str],
        variance: Vector,
        weights: Vector,
        state: State,
    ) -> tuple[Vector, State]:
        """Factors for this round's weights, and the state for the next round.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            variance: [n] noise energy of each update, > 0.
            weights: [n] of the round, summing to 1.
            state: what the last call returned; empty at first. It is not modified.

        Returns:
            [n] factors in (0, 1], and named arrays: ids [m] of all clients so far, and for each
            memory k sent{k} [p, m], product{k} and noise{k} [m, m].
        """
        rows = updates.double().cpu().numpy()
        memory = _Memory.of(state, rows.shape[0], len(self.decays))
        here = memory.places(ids)
        trust = np.ones(len(ids))
        for k, decay in enumerate(self.decays):
            memory.compare(k, decay, rows, here, variance)
            found = self._agreement(memory.product[k], memory.noise[k], here)
            trust = np.minimum(trust, found.trust(weights, self.errors))
            memory.add(k, decay, rows, here)
        return trust, memory.state()

    def _agreement(self, product: Vector, noise: Vector, here: Sequence[int]) -> Agreement:
        """Benefits of the clients at the places ``here`` of the memory's tables [m, m]."""
        own = np.ix_(here, here)
        known = noise[own] > 0
        np.fill_diagonal(known, False)
        error = np.where(known, np.sqrt(np.where(known, noise[own], 1.0)), np.inf)
        value, own_error = huber_mean(np.where(known, product[own], 0.0), error)
        strongest = np.sort(1 / error, axis=1)[:, ::-1][:, : self.tolerated_attackers].sum(axis=1)
        with np.errstate(invalid="ignore"):
            bias = np.where(np.isfinite(own_error), _HUBER * strongest * own_error**2, np.inf)
        typical, typical_error = huber_mean(value[None, :], own_error[None, :])
        none = not np.isfinite(typical_error[0])
        return Agreement(
            value, own_error, bias, float(typical[0]), 0.0 if none else float(typical_error[0])
        )


def huber_mean(values: Vector, errors: Vector) -> tuple[Vector, Vector]:
    """Row by row: the Huber mean of values [r, n] with standard errors [r, n], and its error.

    An observation further from the mean than 1.345 of its errors counts as if it were that far.
    Infinite errors leave an observation out; a row without any has mean 0 and an infinite error.
    """
    scale = np.min(errors, axis=1, keepdims=True)
    scale = np.where(np.isfinite(scale), scale, 1.0)
    values, errors = values / scale, errors / scale  # so that nothing under- or overflows
    precision = 1 / errors**2
    total = precision.sum(axis=1)
    mean = _row_medians(values, 1 / errors)
    for _ in range(_ITERATIONS):
        away = np.abs(values - mean[:, None])
        with np.errstate(invalid="ignore"):
            full = precision * np.minimum(1.0, _HUBER * errors / np.maximum(away, 1e-300))
        full = np.where(precision > 0, full, 0.0)
        mean = (full * values).sum(axis=1) / np.maximum(full.sum(axis=1), 1e-300)
    with np.errstate(divide="ignore"):
        error = np.where(total > 0, 1 / np.sqrt(total), np.inf)
    return mean * scale[:, 0], error * scale[:, 0]


def _row_medians(values: Vector, weights: Vector) -> Vector:
    order = np.argsort(values, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(weights, order, 1), axis=1)
    place = np.argmax(reached >= 0.5 * reached[:, -1:], axis=1)
    return np.asarray(np.take_along_axis(values, order, 1)[np.arange(len(values)), place])


@dataclass
class _Memory:
    """The state as arrays that one call fills and packs again."""

    ids: list[str]
    sent: list[Vector]
    product: list[Vector]
    noise: list[Vector]

    @classmethod
    def of(cls, state: State, size: int, memories: int) -> _Memory:
        names = [f"{part}{k}" for k in range(memories) for part in ("sent", "product", "noise")]
        if not state or any(name not in state for name in names) or len(state["sent0"]) != size:
            return cls(
                [],
                [np.zeros((size, 0)) for _ in range(memories)],
                [np.zeros((0, 0)) for _ in range(memories)],
                [np.zeros((0, 0)) for _ in range(memories)],
            )
        return cls(
            [str(client) for client in state["ids"]],
            *(
                [np.array(state[f"{part}{k}"]) for k in range(memories)]
                for part in ("sent", "product", "noise")
            ),
        )

    def places(self, ids: Sequence[str]) -> list[int]:
        """Where the clients are in the tables; new ones are added."""
        if new := [client for client in ids if client not in set(self.ids)]:
            self.ids += new
            wide, square = ((0, 0), (0, len(new))), ((0, len(new)), (0, len(new)))
            self.sent = [np.pad(table, wide) for table in self.sent]
            self.product = [np.pad(table, square) for table in self.product]
            self.noise = [np.pad(table, square) for table in self.noise]
        return [self.ids.index(client) for client in ids]

    def compare(
        self, k: int, decay: float, rows: Vector, here: Sequence[int], variance: Vector
    ) -> None:
        """Add the products of everybody's past with the present updates ``rows`` [p, n]."""
        sent = self.sent[k]
        energy = np.einsum("ij,ij->j", sent, sent)
        self.product[k][:, here] = decay * self.product[k][:, here] + sent.T @ rows
        fresh = np.outer(energy, variance / len(rows))
        self.noise[k][:, here] = decay**2 * self.noise[k][:, here] + fresh

    def add(self, k: int, decay: float, rows: Vector, here: Sequence[int]) -> None:
        """Let the present updates become the past."""
        self.sent[k][:, here] = decay * self.sent[k][:, here] + rows

    def state(self) -> State:
        packed: dict[str, NDArray[Any]] = {"ids": np.array(self.ids, dtype=np.str_)}
        for part in ("sent", "product", "noise"):
            packed |= {f"{part}{k}": table for k, table in enumerate(getattr(self, part))}
        return packed
