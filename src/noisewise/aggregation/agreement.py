"""`AgreementTracker`: compares each client's past updates with the other clients' later updates.

An attacker can add the noise that the policy requires and still choose the direction of its update.
One round does not show this, because in any direction the noise of one update hides a small
contribution. But noise is independent between rounds, and a harmful direction is not. Let C_i be
the sum of what client i sent in earlier rounds, and d_j the update that client j sends now. Their
inner product is <C_i, g> plus noise that client i cannot know, where g is the clients' common
direction of improvement. To first order, <C_i, g> is how much the earlier updates of client i lower
the other clients' loss now. It is negative for an attacker that does harm, whatever direction the
attacker chose.
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

_HUBER = 0.25  # threshold of the Huber mean in standard errors: it is close to a median
_INEFFICIENCY = 1.179  # standard error of this mean relative to the plain mean, for normal values
_MINORITY = 1 / 3  # largest share of the votes for f clients
_ITERATIONS = 30
_ROWS = 1 << 16  # rows of a sketch; updates up to this size are stored without a sketch
_LARGEST = 1e300  # upper limit of a variance: an infinite one would never decay


@dataclass(frozen=True)
class Agreement:
    """How much each client's past updates agree with the other clients' current ones.

    There is one such result for each memory of the tracker.

    Attributes:
        value: [n] the benefit of client i: robust mean over j != i of sum_t <C_i, d_j>.
        error: [n] standard error of ``value`` that is due to noise; infinite without observations.
        typical: robust mean of ``value`` over the clients.
        typical_error: standard error of ``typical``.
    """

    value: Vector
    error: Vector
    typical: float
    typical_error: float

    def trust(self, weights: Vector, errors: float) -> Vector:
        """Compute the factors in (0, 1] by which to lower the weights.

        A client's benefit is at most ``value + errors * error``. If that is negative, the client
        moves the model back by w_i times that amount. The factor limits this to 1/n of what a
        typical client with weight 1 moves the model forward. So a client with weight 1/n whose
        benefit is the negative of the typical one keeps its weight, and no client is excluded.

        Args:
            weights: [n], summing to 1.
            errors: number of standard errors added in favour of a client.

        Returns:
            [n] factors.
        """
        best = self.value + errors * self.error
        allowed = (max(self.typical, 0.0) + self.typical_error) / len(weights)
        pull = np.where(np.isfinite(best), -best, 0.0) * weights
        factors = np.ones(len(weights))
        np.divide(allowed, pull, out=factors, where=pull > allowed)
        return factors


@dataclass(frozen=True)
class AgreementTracker:
    """Computes the benefit of each client from products of past and current updates.

    C_i = sum_s decay^(age of s) d_i^s / v_i^s over the rounds s in which client i took part. The
    noise energies v weight each round as in the model, so one update with much noise cannot hide
    the client's later updates. B_ij = sum_t decay^(age of t) <C_i^(t-1), d_j^t> has noise of
    variance sum_t decay^(2 age of t) ||C_i||^2 v_j^t / p. The benefit of client i is v_i times a
    Huber mean of B_ij over the other clients j, in which j has the vote 1 / error. The smallest
    errors are raised until no f clients have more than a third of the votes, or until all votes are
    equal, so f attackers can shift the mean by a bounded number of standard errors only. There are
    several memories: a short one detects a client that changes its behaviour, a long one detects a
    small harmful contribution.

    Attributes:
        decays: decay of each memory, in [0, 1).
        tolerated_attackers: f.
        errors: number of standard errors added in favour of a client.
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
        """Compute the factors for this round's weights.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            variance: [n] noise energy of each update, > 0.
            weights: [n] the round's weights, summing to 1.
            state: the state that the previous call returned; empty in the first round. It is not
                modified.

        Returns:
            [n] factors in (0, 1], and the state for the next round: ``ids`` [m] of all clients so
            far, the ``key`` of the sketch, and for each memory k ``sent{k}`` [min(p, 65536), m],
            ``product{k}`` [m, m] and ``noise{k}`` [m, m].
        """
        memory = _Memory.of(state, updates, len(self.decays))
        rows = sketch(updates, memory.key)
        columns = memory.columns(ids)
        trust = np.ones(len(ids))
        for k, decay in enumerate(self.decays):
            memory.compare(k, decay, rows, columns, variance * _noise_share(len(updates)))
            agreement = self.agreement(memory.product[k], memory.noise[k], columns, variance)
            trust = np.minimum(trust, agreement.trust(weights, self.errors))
            memory.add(k, decay, rows / variance, columns)
        return trust, memory.state()

    def agreement(
        self, product: Vector, noise: Vector, columns: Sequence[int], variance: Vector
    ) -> Agreement:
        """Compute the benefits of n clients from one memory's tables.

        Args:
            product: [m, m] B.
            noise: [m, m] variance of B that is due to noise; 0 without observations.
            columns: [n] positions of the clients in the tables.
            variance: [n] v_i.

        Returns:
            The benefits and their errors.
        """
        table = np.ix_(columns, columns)
        observed = (noise[table] > 0) & np.isfinite(noise[table])
        np.fill_diagonal(observed, False)
        error = np.where(observed, np.sqrt(np.where(observed, noise[table], 1.0)), np.inf)
        error = _limited_votes(error, self.tolerated_attackers)
        value, value_error = huber_mean(np.where(observed, product[table], 0.0), error)
        value, value_error = value * variance, value_error * variance
        typical, typical_error = huber_mean(value[None, :], value_error[None, :])
        none_observed = not np.isfinite(typical_error[0])
        return Agreement(
            value, value_error, float(typical[0]), 0.0 if none_observed else float(typical_error[0])
        )


def _limited_votes(errors: Vector, f: int) -> Vector:
    """Raise errors in each row of [n, n] until no f votes 1 / error exceed a third of the row."""
    limited = errors.copy()
    for row in limited:
        finite = np.isfinite(row)
        n_voters = int(np.count_nonzero(finite))
        if n_voters > 1:
            votes = row[finite].min() / row[finite]
            shares = capped_weights(votes, max(_MINORITY / f, 1 / n_voters))
            row[finite] *= votes / shares * (shares / votes).max()
    return limited


def sketch(updates: Tensor, key: str) -> Vector:
    """Return updates [p, n] unchanged up to 65,536 rows, and otherwise a count sketch.

    Each row is added, with a random sign, to a random row of the result. This preserves inner
    products on average. Clients cannot predict the signs and rows, because ``key`` is a digest of
    all updates of the first round.

    Args:
        updates: [p, n].
        key: hexadecimal number that seeds the signs and rows.

    Returns:
        [min(p, 65536), n] in float64.
    """
    p, n = updates.shape
    if p <= _ROWS:
        return np.ascontiguousarray(updates.double().cpu().numpy())
    rng = np.random.default_rng(int(key, 16))
    target_rows = torch.from_numpy(rng.integers(0, _ROWS, p))
    signs = torch.from_numpy(rng.integers(0, 2, p) * 2.0 - 1.0)
    result = torch.zeros((_ROWS, n), dtype=torch.float64)
    for start in range(0, p, _ROWS):
        part = slice(start, start + _ROWS)
        block = updates[part].cpu().double() * signs[part, None]
        result.index_add_(0, target_rows[part], block)
    return result.numpy()


def _noise_share(p: int) -> float:
    """Return the variance of <c, d> divided by ||c||^2 v, for noise d of energy v.

    It is 1/p, and larger with a sketch.
    """
    return 1 / p + (1 / _ROWS if p > _ROWS else 0.0)


def huber_mean(values: Vector, errors: Vector) -> tuple[Vector, Vector]:
    """Compute the Huber mean of each row.

    The influence of a value on the mean stops growing at a distance of a quarter of its standard
    error.

    Args:
        values: [r, n].
        errors: [r, n] standard errors > 0; an infinite one excludes the value.

    Returns:
        The means [r] and their standard errors [r]; 0 and infinity for a row without values.
    """
    scale = np.min(errors, axis=1, keepdims=True)
    scale = np.where(np.isfinite(scale), scale, 1.0)
    values, errors = values / scale, errors / scale  # prevents underflow and overflow
    precision = (1 / errors) ** 2
    total = precision.sum(axis=1)
    mean = _row_medians(values, 1 / errors)
    for _ in range(_ITERATIONS):
        distance = np.abs(values - mean[:, None])
        with np.errstate(invalid="ignore"):
            weight = precision * np.minimum(1.0, _HUBER * errors / np.maximum(distance, 1e-300))
        weight = np.where(precision > 0, weight, 0.0)
        mean = (weight * values).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-300)
    with np.errstate(divide="ignore"):
        error = np.where(total > 0, _INEFFICIENCY / np.sqrt(total), np.inf)
    return mean * scale[:, 0], error * scale[:, 0]


def _row_medians(values: Vector, weights: Vector) -> Vector:
    """Return the weighted median of each row of [r, n]."""
    order = np.argsort(values, axis=1, kind="stable")
    cumulative = np.cumsum(np.take_along_axis(weights, order, 1), axis=1)
    middle = np.argmax(cumulative >= 0.5 * cumulative[:, -1:], axis=1)
    return np.asarray(np.take_along_axis(values, order, 1)[np.arange(len(values)), middle])


@dataclass
class _Memory:
    """The state as arrays: a copy that one call changes and converts back."""

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

    def columns(self, ids: Sequence[str]) -> list[int]:
        """Return the clients' positions in the tables; new clients are added."""
        if new := [client for client in ids if client not in set(self.ids)]:
            self.ids += new
            wide, square = ((0, 0), (0, len(new))), ((0, len(new)), (0, len(new)))
            self.sent = [np.pad(table, wide) for table in self.sent]
            self.product = [np.pad(table, square) for table in self.product]
            self.noise = [np.pad(table, square) for table in self.noise]
        return [self.ids.index(client) for client in ids]

    def compare(
        self, k: int, decay: float, rows: Vector, columns: Sequence[int], variance: Vector
    ) -> None:
        """Add the products of all clients' past updates with the current updates.

        Args:
            k: number of the memory.
            decay: decay of the memory.
            rows: [r, n] sketch of the current updates.
            columns: [n] positions of their clients in the tables.
            variance: [n] variance of their noise in one direction.
        """
        sent = self.sent[k]
        self.product[k][:, columns] = decay * self.product[k][:, columns] + sent.T @ rows
        energy = np.einsum("ij,ij->j", sent, sent)
        with np.errstate(over="ignore"):
            added = np.minimum(np.outer(energy, variance), _LARGEST)
        self.noise[k][:, columns] = decay**2 * self.noise[k][:, columns] + added

    def add(self, k: int, decay: float, rows: Vector, columns: Sequence[int]) -> None:
        """Add the current updates, divided by their noise energies, to the past ones."""
        self.sent[k][:, columns] = decay * self.sent[k][:, columns] + rows

    def state(self) -> State:
        arrays: dict[str, NDArray[Any]] = {
            "ids": np.array(self.ids, dtype=np.str_),
            "key": np.array([self.key], dtype=np.str_),
        }
        for part in ("sent", "product", "noise"):
            arrays |= {f"{part}{k}": table for k, table in enumerate(getattr(self, part))}
        return arrays


def _digest(updates: Tensor) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(updates), _ROWS):
        digest.update(updates[start : start + _ROWS].cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()
