"""`Guard`: what differential privacy itself says about which updates an honest client can send.

Weights of 1/sigma^2 invite a client without noise, which takes the whole round. But every honest
client adds at least the noise of some plan that the federation permits, so an update with less
energy than that, too many coordinates close to zero, or two updates closer to each other than
that, did not come from honest clients. (The count of small coordinates is there because an update
without noise can have the energy of noise, but not in every coordinate.)

An update can have all of that noise and still point in a chosen direction. Clients are therefore
also judged over rounds (`AgreementTracker`): each pulls the model back by at most 1/n of what a
typical client moves it forward, as far as two standard errors of the noise let the server see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.agreement import AgreementTracker
from noisewise.aggregation.base import Aggregation, ServerView, State, weighted_sum
from noisewise.aggregation.weights import capped_weights
from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError, NoHonestUpdateError
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.gram import gram_matrix

__all__ = ["Guard", "Weighed", "guarded_sum"]

_OWN = 0.95  # of F: an honest update's energy has a relative deviation of sqrt(2/p)
_PAIR = 1.9  # of F: the same for the difference of two independent ones
_CAP = 0.4
_SIGNAL, _NOISE = 2.25, 1.1  # room for 1.5 times the common signal and for the noise's deviation
_SMALL = (0.1, 0.3, 1.0)  # what counts as a small coordinate, in deviations of the floor's noise
_ROWS = 1 << 18
_PREFIX = "guard."
_ERRORS = 5.0  # standard errors of room before an update is refused
_ALONG = 3.0  # the same before one is shrunk, which costs an honest client little


@dataclass(frozen=True)
class Guard:
    """Screening and bounds that any noise-aware aggregator can use.

    Args:
        floor: F, see `noise_floor`.
        tolerated_attackers: f >= 1; no client gets a weight above 0.4 / f (see `cap`).
        clip: bound each update's energy by what signal and noise can explain. Only for updates that
            are divided by their number of steps, whose signals have one size.
    """

    floor: float
    tolerated_attackers: int = 1
    clip: bool = False

    def __post_init__(self) -> None:
        positive_number("floor", self.floor)
        positive_int("tolerated_attackers", self.tolerated_attackers)

    def check(self, n_clients: int) -> None:
        """Refuse a policy whose cap cannot hold even if all n clients send sound updates."""
        if _CAP / self.tolerated_attackers * n_clients < 1:
            allowed = f"must be at most {int(_CAP * n_clients)} for {n_clients} clients"
            raise InvalidValueError("tolerated_attackers", self.tolerated_attackers, allowed)

    def cap(self, n_sound: int) -> float:
        """w_max = 0.4 / f, or equal weights where a round has too few sound updates for that.

        An update that was refused must not end the round: whoever sent it would end the training.
        """
        return max(_CAP / self.tolerated_attackers, 1 / n_sound)

    def trusted(
        self, weights: NDArray[np.float64], trust: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Weights [m] lowered by ``trust`` [m]; the others take over the rest, within the cap.

        The cap is loosened where those who are trusted could not reach a sum of 1 otherwise: they
        would have to pass weight on to those who are not.
        """
        if np.all(trust == 1):
            return weights
        return capped_weights(weights * trust, max(self.cap(len(weights)), 1 / trust.sum()))

    def refuse(self, values: Tensor, gram: NDArray[np.float64]) -> dict[int, str]:
        """Which columns no honest client sends, and why.

        Args:
            values: [p, n] updates.
            gram: [n, n] their inner products.
        """
        energy = np.diagonal(gram)
        refused = {
            int(i): f"has too little noise: energy {energy[i]:.3g}, policy minimum {self.floor:.3g}"
            for i in np.flatnonzero(energy < _OWN * self.floor)
        }
        for j in np.flatnonzero(self._too_many_small(values)):
            refused.setdefault(int(j), "has coordinates without the noise that the policy demands")
        distance = energy[:, None] + energy[None, :] - 2 * gram
        close = distance < _PAIR * self.floor
        np.fill_diagonal(close, False)
        for i in refused:  # whoever comes close to a refused update may be honest
            close[i, :] = close[:, i] = False
        for j in np.flatnonzero(close.any(axis=1)):
            refused[int(j)] = "is too close to another update to have noise of its own"
        return refused

    def _too_many_small(self, values: Tensor) -> NDArray[np.bool_]:
        """Columns with more coordinates near zero than noise of the floor leaves there.

        Every coordinate of an honest update is some signal plus normal noise of variance F/p or
        more, and by Anderson's inequality no signal that does not depend on the noise makes
        |signal + noise| <= t more likely. The gradients of later steps do depend on earlier noise
        and pull it back a little, hence the room of 2 % (docs/noisewise_method.md).
        """
        p = len(values)
        deviation = math.sqrt(self.floor / p)
        found = np.zeros(values.shape[1], dtype=bool)
        for t in _SMALL:
            chance = math.erf(t / math.sqrt(2.0))
            room = _ERRORS * math.sqrt(p * chance * (1.0 - chance)) + 0.02 * p * chance
            counts = count_small(values, t * deviation)
            found |= counts > p * chance + room
        return found

    def variance(self, estimate: NDArray[np.float64]) -> NDArray[np.float64]:
        """Estimates raised to the floor: nobody is quieter than the policy allows."""
        return np.maximum(estimate, self.floor)

    def factors(
        self,
        gram: NDArray[np.float64],
        weights: NDArray[np.float64],
        variance: NDArray[np.float64],
        size: int,
    ) -> NDArray[np.float64]:
        """By how much to shrink each update so that it is as large as signal and noise explain.

        With G the energy of the common signal (the median of <d_i, d_j> over pairs, weighted by
        w_i w_j, of which a minority of the weight cannot decide):

        1. ||d_i||^2 <= 2.25 G + 1.1 sigma_i^2;
        2. |<d_i, m>| <= 1.5 G + 3 sigma_i ||m|| / sqrt(p) for the others' aggregate m. Noise hardly
           shows along one direction, so nobody pulls the model back by more than 1.5 times what
           an average client moves it forward.

        Args:
            gram: [m, m] of the updates that were not refused.
            weights: [m] of the aggregate.
            variance: [m] noise energies.
            size: p.
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


def count_small(values: Tensor, limit: float) -> NDArray[np.int64]:
    """How many coordinates of each column of values [p, n] lie within +-limit."""
    counts = np.zeros(values.shape[1], dtype=np.int64)
    for start in range(0, len(values), _ROWS):
        block = values[start : start + _ROWS]
        counts += (block.abs() <= limit).sum(0).cpu().numpy()
    return counts


def _weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(reached, 0.5 * reached[-1]))])


@dataclass(frozen=True)
class Weighed:
    """What an aggregator makes of the sound updates of a round.

    Attributes:
        weights: [m], summing to 1.
        noise: the estimate that they rest on, [m].
        state: for the next round.
    """

    weights: NDArray[np.float64]
    noise: NoiseEstimate
    state: State


Weigh = Callable[[Tensor, tuple[str, ...], float], Weighed]
"""(updates [p, m], their ids, largest weight) -> weights; the guard's floor is up to the caller."""


def guarded_sum(view: ServerView, guard: Guard | None, weigh: Weigh, state: State) -> Aggregation:
    """The weighted sum of a round's updates, behind a guard or without one.

    The guard keeps its part of the state under names that begin with ``guard.``.

    Raises:
        NoHonestUpdateError: if the guard refuses every update.
    """
    values, ids = view.updates.values, view.updates.ids
    if guard is None:
        found = weigh(values, ids, 1.0)
        delta = weighted_sum(values, found.weights)
        return Aggregation(delta, found.weights, found.noise, found.state)
    gram = gram_matrix(values).matrix
    refused = guard.refuse(values, gram)
    sound = [i for i in range(len(ids)) if i not in refused]
    reasons = {ids[i]: why for i, why in sorted(refused.items())}
    if not sound:
        told = "; ".join(f"{client} {why}" for client, why in reasons.items())
        raise NoHonestUpdateError(f"no update of this round can come from an honest client: {told}")
    kept = values if not refused else values[:, sound]
    found = weigh(kept, tuple(ids[i] for i in sound), guard.cap(len(sound)))
    variance = guard.variance(found.noise.variance)
    among = gram[np.ix_(sound, sound)]
    tracker = AgreementTracker(tolerated_attackers=guard.tolerated_attackers)
    own = {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}
    names = tuple(ids[i] for i in sound)
    trust, following = tracker.judge(kept, names, variance, found.weights, own)
    trusted = guard.trusted(found.weights, trust)
    factors = guard.factors(among, trusted, variance, len(values))
    weights = np.zeros(len(ids))
    weights[sound] = trusted
    delta = weighted_sum(kept, trusted * factors)
    later = {**found.state, **{_PREFIX + name: array for name, array in following.items()}}
    return Aggregation(delta, weights, found.noise, later, refused=reasons)
