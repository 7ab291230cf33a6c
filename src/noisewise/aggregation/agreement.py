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

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.weights import capped_weights
from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError

__all__ = ["Agreement", "AgreementTracker"]

State = Mapping[str, NDArray[Any]]
Vector = NDArray[np.float64]

_HUBER = 0.25  # standard errors within which an observation counts in full: nearly a median
_INEFFICIENCY = 1.179  # error of such a mean of normal observations, over that of the plain mean
_MINORITY = 1 / 3  # of the votes: at most this much for f clients
_ITERATIONS = 30
_ROWS = 1 << 16  # of a sketch: updates up to this size are remembered as they are
_LARGEST = 1e300  # of a variance: an infinite one would never be forgotten


@dataclass(frozen=True)
class Agreement:
    """How much each client's past updates agree with the others' present ones, for one memory.

    Attributes:
        value: [n] robust mean over j != i of sum_t <C_i, d_j>, the benefit of client i.
        error: [n] its standard error from noise alone; infinite where nothing is known.
        typical: robust mean of ``value`` over the clients.
        typical_error: its standard error.
    """

    value: Vector
    error: Vector
    typical: float
    typical_error: float

    def trust(self, weights: Vector, errors: float) -> Vector:
        """Factors in (0, 1] by which to lower ``weights`` ([n], summing to 1).

        A client's benefit is at best ``value + errors * error``. Where that is negative, the client
        pulls back by w_i times that much. The factor reduces this to 1/n of what a typical
        client with the whole weight moves forward: n clients of equal weight and opposite benefit
        are left alone, and nobody is excluded.
        """
        best = self.value + errors * self.error
        allowed = (max(self.typical, 0.0) + self.typical_error) / len(weights)
        pull = np.where(np.isfinite(best), -best, 0.0) * weights
        factors = np.ones(len(weights))
        np.divide(allowed, pull, out=factors, where=pull > allowed)
        return factors


@dataclass(frozen=True)
class AgreementTracker:
    """Benefits of all clients, from products between their past updates and others' present ones.

    C_i = sum_s decay^(age of s) d_i^s / v_i^s over the rounds s in which client i took part, with
    noise energies v, so that a round counts as it counted in the model: one loud update cannot
    blur what a client sends later. B_ij = sum_t decay^(age of t) <C_i^(t-1), d_j^t> has noise of
    variance sum_t decay^(2 age of t) ||C_i||^2 v_j^t / p. The benefit of i is v_i times a Huber
    mean of B_ij over the others j. The errors of the quietest are raised until no f clients have
    more than a third of the votes 1 / error (or all have the same), so that f attackers shift the
    mean by a bounded number of standard errors. Several memories are kept: a short one sees a
    client that changes its behaviour, a long one sees a small pull.

    Attributes:
        decays: one for each memory, in [0, 1).
        tolerated_attackers: f.
        errors: standard errors of doubt in favour of a client.
    """

    decays: tuple[float, ...] = (0.5, 0.9)
    tolerated_attackers: int = 1
    errors: float = 2.0

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
            [n] factors in (0, 1], and named arrays: ids [m] of all clients so far, the key of the
            sketch, and for each memory k sent{k} [min(p, 65536), m], product{k}, noise{k} [m, m].
        """
        memory = _Memory.of(state, updates, len(self.decays))
        rows = sketch(updates, memory.key)
        here = memory.places(ids)
        trust = np.ones(len(ids))
        for k, decay in enumerate(self.decays):
            memory.compare(k, decay, rows, here, variance * _noise_share(len(updates)))
            found = self.agreement(memory.product[k], memory.noise[k], here, variance)
            trust = np.minimum(trust, found.trust(weights, self.errors))
            memory.add(k, decay, rows / variance, here)
        return trust, memory.state()

    def agreement(
        self, product: Vector, noise: Vector, here: Sequence[int], variance: Vector
    ) -> Agreement:
        """Benefits of the n clients at the places ``here`` of a memory's tables [m, m].

        Args:
            product: B.
            noise: its variance; 0 where nothing is known.
            here: n places.
            variance: [n] v_i.
        """
        own = np.ix_(here, here)
        known = (noise[own] > 0) & np.isfinite(noise[own])
        np.fill_diagonal(known, False)
        error = np.where(known, np.sqrt(np.where(known, noise[own], 1.0)), np.inf)
        error = _limited_votes(error, self.tolerated_attackers)
        value, own_error = huber_mean(np.where(known, product[own], 0.0), error)
        value, own_error = value * variance, own_error * variance
        typical, typical_error = huber_mean(value[None, :], own_error[None, :])
        none = not np.isfinite(typical_error[0])
        return Agreement(
            value, own_error, float(typical[0]), 0.0 if none else float(typical_error[0])
        )


def _limited_votes(errors: Vector, f: int) -> Vector:
    """Errors [n, n], raised row by row until no f of the votes 1 / error exceed a third of all."""
    limited = errors.copy()
    for row in limited:
        known = np.isfinite(row)
        voters = int(np.count_nonzero(known))
        if voters > 1:
            votes = row[known].min() / row[known]
            shares = capped_weights(votes, max(_MINORITY / f, 1 / voters))
            row[known] *= votes / shares * (shares / votes).max()
    return limited


def sketch(updates: Tensor, key: str) -> Vector:
    """Updates [p, n] as they are up to 65,536 rows; a count sketch of so many rows beyond.

    Each row is added, with a random sign, to a random row of the result, which keeps inner products
    on average. Signs and places follow from ``key``, which no client can foresee: it is a digest of
    all updates of the first round.
    """
    p, n = updates.shape
    if p <= _ROWS:
        return np.ascontiguousarray(updates.double().cpu().numpy())
    rng = np.random.default_rng(int(key, 16))
    places = torch.from_numpy(rng.integers(0, _ROWS, p))
    signs = torch.from_numpy(rng.integers(0, 2, p) * 2.0 - 1.0)
    result = torch.zeros((_ROWS, n), dtype=torch.float64)
    for start in range(0, p, _ROWS):
        part = slice(start, start + _ROWS)
        block = updates[part].cpu().double() * signs[part, None]
        result.index_add_(0, places[part], block)
    return result.numpy()


def _noise_share(p: int) -> float:
    """Variance of <c, d> over ||c||^2 v, for noise d of energy v: 1/p, and more from a sketch."""
    return 1 / p + (1 / _ROWS if p > _ROWS else 0.0)


def huber_mean(values: Vector, errors: Vector) -> tuple[Vector, Vector]:
    """Row by row: the Huber mean of values [r, n] with standard errors [r, n], and its error.

    An observation further from the mean than a quarter of its error counts as if it were that far.
    Infinite errors leave an observation out; a row without any has mean 0 and an infinite error.
    """
    scale = np.min(errors, axis=1, keepdims=True)
    scale = np.where(np.isfinite(scale), scale, 1.0)
    values, errors = values / scale, errors / scale  # so that nothing under- or overflows
    precision = (1 / errors) ** 2
    total = precision.sum(axis=1)
    mean = _row_medians(values, 1 / errors)
    for _ in range(_ITERATIONS):
        away = np.abs(values - mean[:, None])
        with np.errstate(invalid="ignore"):
            full = precision * np.minimum(1.0, _HUBER * errors / np.maximum(away, 1e-300))
        full = np.where(precision > 0, full, 0.0)
        mean = (full * values).sum(axis=1) / np.maximum(full.sum(axis=1), 1e-300)
    with np.errstate(divide="ignore"):
        error = np.where(total > 0, _INEFFICIENCY / np.sqrt(total), np.inf)
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
    key: str
    sent: list[Vector]
    product: list[Vector]
    noise: list[Vector]

    @classmethod
    def of(cls, state: State, updates: Tensor, memories: int) -> _Memory:
        names = [f"{part}{k}" for k in range(memories) for part in ("sent", "product", "noise")]
        size = min(len(updates), _ROWS)
        if any(name not in state for name in names) or len(state["sent0"]) != size:
            empty = [np.zeros((0, 0)) for _ in range(memories)]
            sent = [np.zeros((size, 0)) for _ in range(memories)]
            return cls([], _digest(updates), sent, list(empty), list(empty))
        return cls(
            [str(client) for client in state["ids"]],
            str(state["key"][0]),
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
        self, k: int, decay: float, rows: Vector, here: Sequence[int], along: Vector
    ) -> None:
        """Add the products of everybody's past with the present updates.

        Args:
            k: number of the memory.
            decay: of the memory.
            rows: [r, n] present updates.
            here: [n] their places in the tables.
            along: [n] variance of their noise along one direction.
        """
        sent = self.sent[k]
        self.product[k][:, here] = decay * self.product[k][:, here] + sent.T @ rows
        energy = np.einsum("ij,ij->j", sent, sent)
        with np.errstate(over="ignore"):
            fresh = np.minimum(np.outer(energy, along), _LARGEST)
        self.noise[k][:, here] = decay**2 * self.noise[k][:, here] + fresh

    def add(self, k: int, decay: float, rows: Vector, here: Sequence[int]) -> None:
        """Let the present updates, divided by their noise energies, become the past."""
        self.sent[k][:, here] = decay * self.sent[k][:, here] + rows

    def state(self) -> State:
        packed: dict[str, NDArray[Any]] = {
            "ids": np.array(self.ids, dtype=np.str_),
            "key": np.array([self.key], dtype=np.str_),
        }
        for part in ("sent", "product", "noise"):
            packed |= {f"{part}{k}": table for k, table in enumerate(getattr(self, part))}
        return packed


def _digest(updates: Tensor) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(updates), _ROWS):
        digest.update(updates[start : start + _ROWS].cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()
