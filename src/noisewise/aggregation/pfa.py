"""PFA: projected federated averaging (Liu, Lou, Liu and Zhu, VLDB 2021)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, weighted_sum
from noisewise.aggregation.weights import proportional_weights
from noisewise.checks import positive_int

__all__ = ["PFA", "public_clients"]

_STARTS = 10  # of further fits where the best one leaves a client alone


def public_clients(epsilons: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Who counts as "public": the cluster of larger epsilons.

    A mixture of two Gaussians is fitted to the epsilons, as the Robust-HDP authors do, and the
    smallest epsilon of its upper component is the threshold. (A wide upper component can claim
    epsilons below a narrow lower one, as in the authors' Dist6, where the client with the least
    epsilon of all would count as public: what lies below the lower mean stays private.) A cluster
    of one client has a likelihood without bound, however near its neighbours are, and in Dist6 it
    beats the cluster of eleven: it is taken only where no start finds two larger ones. With a
    single value, or where one cluster takes everybody, all clients are public.

    Args:
        epsilons: [n] as reported.

    Returns:
        [n] mask with at least one True.
    """
    return np.asarray(epsilons >= _threshold(tuple(sorted(map(float, epsilons)))))


@lru_cache(maxsize=64)  # a federation asks the same in every round
def _threshold(epsilons: tuple[float, ...]) -> float:
    """The least epsilon of the public clients, from all in ascending order."""
    ordered = np.array(epsilons)
    if ordered[0] == ordered[-1]:
        return epsilons[0]
    found = _two_clusters(ordered, 3, 0)
    if found.smallest < 2:
        others = (_two_clusters(ordered, 1, start) for start in range(1, _STARTS + 1))
        larger = [other for other in others if other.smallest >= 2]
        found = max(larger, key=lambda other: other.likelihood, default=found)
    upper = ordered[found.upper & (ordered > found.lower_mean)]
    return float(upper.min()) if upper.size else epsilons[0]


@dataclass(frozen=True)
class _Clusters:
    """A fitted mixture: who is in the upper of its two components, and how well it fits."""

    upper: NDArray[np.bool_]
    lower_mean: float
    likelihood: float

    @property
    def smallest(self) -> int:
        """Clients in the smaller cluster."""
        return int(min(self.upper.sum(), (~self.upper).sum()))


def _two_clusters(values: NDArray[np.float64], starts: int, seed: int) -> _Clusters:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    column = values[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture = GaussianMixture(n_components=2, n_init=starts, random_state=seed).fit(column)
    means = mixture.means_[:, 0]
    upper = np.asarray(mixture.predict(column) == np.argmax(means))
    return _Clusters(upper, float(means.min()), float(mixture.score(column)))


def _principal_directions(centred: Tensor, dimension: int, energy: float) -> Tensor:
    """The ``dimension`` leading left singular vectors [p, k] of a tall matrix [p, m].

    By the m x m Gram matrix; directions of (numerically) no energy are left out, where ``energy``
    is that of the matrix before centring: identical columns leave nothing but rounding.
    """
    gram = centred.T @ centred
    values, vectors = torch.linalg.eigh(gram)
    keep = values > max(float(values.max()) * 1e-10, energy * 1e-24)
    order = torch.argsort(values, descending=True)
    order = order[keep[order]][:dimension]
    directions: Tensor = centred @ (vectors[:, order] / values[order].sqrt())
    return directions


@dataclass(frozen=True)
class PFA:
    """Private clients' updates are projected on the public ones' principal subspace; w ~ epsilon.

    With m the mean of the public updates and V their ``dimension`` leading principal directions
    around m, a private update d becomes m + V V^T (d - m). With a single public client there is no
    spread around the mean, and d is projected on that client's update itself. Unlike the
    Robust-HDP authors' code, coordinates are not scaled by their spread over the public clients:
    with a handful of them, that spread is noise.

    Args:
        dimension: of the projection; 1 as in both papers.
    """

    dimension: int = 1
    reads_all_coordinates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_int("dimension", self.dimension)

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' epsilons, for clusters and weights."""
        return frozenset({Disclosure.EPSILON})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        epsilons = view.told(Disclosure.EPSILON)
        weights = proportional_weights(epsilons)
        public = public_clients(epsilons)
        values = view.updates.values
        if public.all():
            return Aggregation(weighted_sum(values, weights), weights, None, state)
        mask = torch.from_numpy(public).to(values.device)
        seen, hidden = values[:, mask].double(), values[:, ~mask].double()
        alone = seen.shape[1] == 1
        mean = torch.zeros_like(seen) if alone else seen.mean(dim=1, keepdim=True)
        energy = float(seen.square().sum())
        directions = _principal_directions(seen - mean, self.dimension, energy)
        projected = mean + directions @ (directions.T @ (hidden - mean))
        combined = torch.cat([seen, projected], dim=1).to(values.dtype)
        delta = weighted_sum(combined, np.concatenate([weights[public], weights[~public]]))
        return Aggregation(delta, weights, None, state, is_weighted_sum=False)
