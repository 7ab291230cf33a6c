"""`Guard`: screens updates against the noise floor of the federation's policy.

With weights of 1/sigma^2, a client that sends no noise gets almost the whole weight. But every
honest client adds at least the noise of some plan that the federation permits. An update did
therefore not come from an honest client if it has less energy than this noise, if it has too many
coordinates close to zero, or if it is closer to another update than independent noise allows. (The
coordinates are counted because an update without noise can have the energy of noise, but not in
every coordinate.)

An update can have all the required noise and still point in a chosen direction. The guard therefore
also compares the clients over rounds (`AgreementTracker`): no client moves the model back by more
than 1/n of what a typical client moves it forward, as far as the server can detect this at two
standard errors of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.agreement import AgreementTracker
from noisewise.aggregation.base import Aggregation, Aggregator, ServerView, State, weighted_sum
from noisewise.aggregation.drop_reason import DropKind, DropReason
from noisewise.aggregation.weights import capped_weights
from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError, NoHonestUpdateError
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.gram import gram_matrix

__all__ = ["Guard", "Guardable", "Weighed", "as_guardable", "guarded_sum"]

_OWN = 0.95  # least energy of an update over F; its relative standard deviation is sqrt(2/p)
_PAIR = 1.9  # least squared distance of two updates over F, for independent noise
_CAP = 0.4
_SIGNAL, _NOISE = 2.25, 1.1  # limits: 1.5^2 times the common signal, 1.1 times the noise energy
_SMALL = (
    0.1,
    0.3,
    1.0,
)  # limits of a small coordinate, in standard deviations of the floor's noise
_ROWS = 1 << 18
_PREFIX = "guard."
_ERRORS = 5.0  # standard errors of margin before an update is refused
_ALONG = 3.0  # the same before an update is shrunk, which costs an honest client little


@dataclass(frozen=True)
class Guard:
    """Screening and bounds that any noise-aware aggregator can use.

    Args:
        floor: F, the least noise energy of an honest update; see `noise_floor`.
        tolerated_attackers: f >= 1; no client gets a weight above 0.4 / f (see `cap`).
        clip: whether to shrink updates that are larger than signal and noise explain. Only for
            updates that are divided by their number of steps, whose signals have the same size.

    Example:
        >>> guard = Guard(floor=2.0, tolerated_attackers=1)
        >>> guard.variance(np.array([0.1, 5.0])).tolist()
        [2.0, 5.0]
    """

    floor: float
    tolerated_attackers: int = 1
    clip: bool = False

    def __post_init__(self) -> None:
        positive_number("floor", self.floor)
        positive_int("tolerated_attackers", self.tolerated_attackers)

    def check(self, n_clients: int) -> None:
        """Check that n weights of at most 0.4 / f can sum to 1.

        Raises:
            InvalidValueError: f is too large for n clients.
        """
        if _CAP / self.tolerated_attackers * n_clients < 1:
            allowed = f"must be at most {int(_CAP * n_clients)} for {n_clients} clients"
            raise InvalidValueError("tolerated_attackers", self.tolerated_attackers, allowed)

    def cap(self, n_updates: int) -> float:
        """Return w_max, the largest weight in a round with ``n_updates`` accepted updates.

        It is 0.4 / f, or 1 / n_updates if that is larger. Without the second case a few refused
        updates could end the round, and an attacker could stop the training.
        """
        return max(_CAP / self.tolerated_attackers, 1 / n_updates)

    def trusted(
        self, weights: NDArray[np.float64], trust: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Lower the weights by the trust factors and give the rest to the other clients.

        The cap is raised to 1 / sum(trust) if that is larger. Otherwise the trusted clients could
        not reach a sum of 1, and the rest would go back to the clients that are not trusted.

        Args:
            weights: [m], summing to 1.
            trust: [m] factors in (0, 1], see `AgreementTracker`.

        Returns:
            [m], summing to 1.
        """
        if np.all(trust == 1):
            return weights
        return capped_weights(weights * trust, max(self.cap(len(weights)), 1 / trust.sum()))

    def refuse(self, values: Tensor, gram: NDArray[np.float64]) -> dict[int, str]:
        """Find the updates that cannot come from an honest client.

        Args:
            values: [p, n] updates.
            gram: [n, n] their inner products.

        Returns:
            The reason for each refused column, by number of the column.
        """
        energy = np.diagonal(gram)
        refused: dict[int, str] = {
            int(i): _too_quiet(
                f"has too little noise: energy {energy[i]:.3g}, policy minimum {self.floor:.3g}"
            )
            for i in np.flatnonzero(energy < _OWN * self.floor)
        }
        for j in np.flatnonzero(self._too_many_small(values)):
            refused.setdefault(
                int(j),
                _too_quiet("has more coordinates close to zero than the policy's noise allows"),
            )
        distance = energy[:, None] + energy[None, :] - 2 * gram
        close = distance < _PAIR * self.floor
        np.fill_diagonal(close, False)
        for i in refused:  # an update that is close to a refused one may be honest
            close[i, :] = close[:, i] = False
        for j in np.flatnonzero(close.any(axis=1)):
            refused[int(j)] = _too_quiet("is too close to another update to have independent noise")
        return refused

    def _too_many_small(self, values: Tensor) -> NDArray[np.bool_]:
        """Return which columns have more coordinates close to zero than the floor's noise allows.

        Every coordinate of an honest update is signal plus normal noise of variance F/p or more. By
        Anderson's inequality, a signal that does not depend on the noise cannot make
        |signal + noise| <= t more likely. The gradients of later steps do depend on the noise of
        earlier steps and reduce it a little; the margin of 2% allows for this
        (docs/hostile_clients.md).
        """
        p = len(values)
        deviation = math.sqrt(self.floor / p)
        too_many = np.zeros(values.shape[1], dtype=bool)
        for t in _SMALL:
            chance = math.erf(t / math.sqrt(2.0))
            margin = _ERRORS * math.sqrt(p * chance * (1.0 - chance)) + 0.02 * p * chance
            counts = count_small(values, t * deviation)
            too_many |= counts > p * chance + margin
        return too_many

    def variance(self, estimate: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the estimated noise energies ([m]), each raised to at least the floor."""
        return np.maximum(estimate, self.floor)

    def factors(
        self,
        gram: NDArray[np.float64],
        weights: NDArray[np.float64],
        variance: NDArray[np.float64],
        size: int,
    ) -> NDArray[np.float64]:
        """Compute the factors that shrink updates to the size that signal and noise explain.

        Let G be the energy of the common signal: the median of <d_i, d_j> over pairs, weighted by
        w_i w_j, which a minority of the weight cannot control. After shrinking,

        1. ||d_i||^2 <= 2.25 G + 1.1 sigma_i^2;
        2. |<d_i, m>| <= 1.5 G + 3 sigma_i ||m|| / sqrt(p), where m is the aggregate of the other
           clients. In one direction the noise is small, so no client moves the model back by much
           more than 1.5 times what an average client moves it forward.

        Args:
            gram: [m, m] inner products of the updates that were not refused.
            weights: [m] weights of the aggregate.
            variance: [m] noise energies.
            size: p.

        Returns:
            [m] factors in [0, 1]; all 1 without ``clip``.
        """
        n = len(gram)
        if not self.clip or n < 2:
            return np.ones(n)
        upper = np.triu_indices(n, 1)
        signal = max(_weighted_median(gram[upper], np.outer(weights, weights)[upper]), 0.0)
        energy = np.maximum(np.diagonal(gram), 1e-300)
        factors = np.sqrt(np.minimum(1.0, (_SIGNAL * signal + _NOISE * variance) / energy))
        for i in np.flatnonzero(weights > 0):
            others = np.where(np.arange(n) == i, 0.0, weights)
            total = others.sum()
            if total <= 0:
                continue
            others = others / total
            along = abs(float(gram[i] @ others))
            length = math.sqrt(max(float(others @ gram @ others), 0.0))
            noise = _ALONG * math.sqrt(variance[i] / size) * length
            bound = math.sqrt(_SIGNAL) * signal + noise
            factors[i] = min(factors[i], bound / max(along, 1e-300))
        return factors


@runtime_checkable
class Guardable(Aggregator, Protocol):
    """An aggregator that weights by noise and can have a `Guard`, which `guarded_sum` applies.

    Your own aggregator needs no base class, only these two members and those of `Aggregator`.
    """

    @property
    def guard(self) -> Guard | None:
        """The guard, or None."""
        ...

    def with_guard(self, guard: Guard) -> Self:
        """Return a copy of the aggregator with this guard."""
        ...


def _too_quiet(text: str) -> DropReason:
    return DropReason(text, DropKind.TOO_QUIET)


def as_guardable(aggregator: Aggregator, method: str) -> Guardable:
    """Return the aggregator if it can have a guard.

    Args:
        aggregator: built-in or your own.
        method: name of its method, for the error message.

    Raises:
        InvalidValueError: a member of `Guardable` is missing; the message names it.
    """
    if isinstance(aggregator, Guardable):
        return aggregator
    members = ("needs", "aggregate", "guard", "with_guard")
    missing = [member for member in members if not hasattr(aggregator, member)]
    raise InvalidValueError(
        "method.name",
        method,
        f"cannot be guarded: its aggregator {type(aggregator).__name__} has no "
        f"{' and no '.join(missing)}. Choose a method that weights by noise, or add `guard` and "
        "`with_guard(guard)` to the aggregator (docs/own_aggregators.md)",
    )


def count_small(values: Tensor, limit: float) -> NDArray[np.int64]:
    """Count the coordinates within +-limit in each column of values [p, n]; returns [n]."""
    counts = np.zeros(values.shape[1], dtype=np.int64)
    for start in range(0, len(values), _ROWS):
        block = values[start : start + _ROWS]
        counts += (block.abs() <= limit).sum(0).cpu().numpy()
    return counts


def _weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(cumulative, 0.5 * cumulative[-1]))])


@dataclass(frozen=True)
class Weighed:
    """The weights that an aggregator computes for the m accepted updates of a round.

    Attributes:
        weights: [m], summing to 1.
        noise: the noise estimate that the weights were computed from, [m].
        state: the aggregator's state for the next round.
    """

    weights: NDArray[np.float64]
    noise: NoiseEstimate
    state: State


Weigh = Callable[[Tensor, tuple[str, ...], float], Weighed]
"""(updates [p, m], their ids, largest weight) -> weights. It applies `Guard.variance` itself."""


def guarded_sum(view: ServerView, guard: Guard | None, weigh: Weigh, state: State) -> Aggregation:
    """Compute the weighted sum of a round's updates, with or without a guard.

    The guard's part of the state has names that begin with ``guard.``.

    Args:
        view: the round's updates.
        guard: refuses updates and limits weights; None for no guard.
        weigh: computes the weights of the accepted updates; see `Weigh`.
        state: the state that the previous round returned.

    Returns:
        The aggregation; its ``refused`` has the reasons for the refused updates.

    Raises:
        NoHonestUpdateError: the guard refuses every update.
    """
    values, ids = view.updates.values, view.updates.ids
    if guard is None:
        weighed = weigh(values, ids, 1.0)
        delta = weighted_sum(values, weighed.weights)
        return Aggregation(delta, weighed.weights, weighed.noise, weighed.state)
    gram = gram_matrix(values).matrix
    refused = guard.refuse(values, gram)
    accepted = [i for i in range(len(ids)) if i not in refused]
    reasons = {ids[i]: reason for i, reason in sorted(refused.items())}
    if not accepted:
        listed = "; ".join(f"{client} {reason}" for client, reason in reasons.items())
        raise NoHonestUpdateError(
            _too_quiet(f"no update of this round can come from an honest client: {listed}")
        )
    accepted_values = values if not refused else values[:, accepted]
    kept_ids = tuple(ids[i] for i in accepted)
    weighed = weigh(accepted_values, kept_ids, guard.cap(len(accepted)))
    variance = guard.variance(weighed.noise.variance)
    kept_gram = gram[np.ix_(accepted, accepted)]
    tracker = AgreementTracker(tolerated_attackers=guard.tolerated_attackers)
    guard_state = {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}
    trust, next_guard_state = tracker.judge(
        accepted_values, kept_ids, variance, weighed.weights, guard_state
    )
    trusted = guard.trusted(weighed.weights, trust)
    factors = guard.factors(kept_gram, trusted, variance, len(values))
    weights = np.zeros(len(ids))
    weights[accepted] = trusted
    delta = weighted_sum(accepted_values, trusted * factors)
    next_state = {
        **weighed.state,
        **{_PREFIX + name: array for name, array in next_guard_state.items()},
    }
    return Aggregation(delta, weights, weighed.noise, next_state, refused=reasons)
