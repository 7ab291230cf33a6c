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

_STARTS = 10  # further fits, if the best one has a cluster of a single client


def public_clients(epsilons: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Find the "public" clients of PFA: the cluster with the larger epsilons.

    A mixture of two Gaussians is fitted to the epsilons, as in the Robust-HDP authors' code. The
    threshold is the smallest epsilon of the upper component, with two exceptions:

    - A wide upper component can also contain epsilons below a narrow lower component. In the
      authors' Dist6 it contains the smallest epsilon of all. Clients with an epsilon below the mean
      of the lower component are therefore private.
    - The likelihood of a cluster with one client has no upper bound, however close the other
      clients are. In Dist6 it exceeds the likelihood of the cluster of eleven. Such a cluster is
      used only if further fits find no two larger clusters.

    If all epsilons are equal, or one cluster contains all clients, all clients are public.

    Args:
        epsilons: [n] as the clients report them.

    Returns:
        [n] mask of the public clients, at least one.

    Example:
        >>> public_clients(np.array([0.1, 0.2, 0.15, 5.0, 5.2])).tolist()
        [False, False, False, True, True]
    """
    return np.asarray(epsilons >= _threshold(tuple(sorted(map(float, epsilons)))))


@lru_cache(maxsize=64)  # the epsilons are the same in every round
def _threshold(epsilons: tuple[float, ...]) -> float:
    """Return the smallest epsilon of the public clients; ``epsilons`` are in ascending order."""
    ordered = np.array(epsilons)
    if ordered[0] == ordered[-1]:
        return epsilons[0]
    best = _two_clusters(ordered, 3, 0)
    if best.smallest < 2:
        others = (_two_clusters(ordered, 1, seed) for seed in range(1, _STARTS + 1))
        larger = [other for other in others if other.smallest >= 2]
        best = max(larger, key=lambda other: other.likelihood, default=best)
    upper = ordered[best.upper & (ordered > best.lower_mean)]
    return float(upper.min()) if upper.size else epsilons[0]


@dataclass(frozen=True)
class _Clusters:
    """A fitted mixture: which clients are in its upper component, and how well it fits."""

    upper: NDArray[np.bool_]
    lower_mean: float
    likelihood: float

    @property
    def smallest(self) -> int:
        """Number of clients in the smaller cluster."""
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
    """Compute the leading left singular vectors of a tall matrix from its m x m Gram matrix.

    Directions without energy, up to rounding, are left out.

    Args:
        centred: [p, m] updates minus their mean.
        dimension: largest number of vectors.
        energy: energy of the updates before the mean was subtracted. If all columns are equal, only
            rounding remains, which is small compared with it.

    Returns:
        [p, k], k <= dimension.
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
    """Projects private clients' updates on the public clients' principal subspace; w ~ epsilon.

    Let m be the mean of the public updates and V their ``dimension`` leading principal directions
    around m. A private update d becomes m + V V^T (d - m). A single public client has no principal
    directions around the mean; d is then projected on that client's update. Unlike in the
    Robust-HDP authors' code, coordinates are not divided by their standard deviation over the
    public clients, which is mostly noise if there are few of them.

    Args:
        dimension: dimension of the subspace; 1 in both papers.
    """

    dimension: int = 1
    reads_all_coordinates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_int("dimension", self.dimension)

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' epsilons, for the clusters and the weights."""
        return frozenset({Disclosure.EPSILON})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        epsilons = view.disclosure(Disclosure.EPSILON)
        weights = proportional_weights(epsilons)
        public = public_clients(epsilons)
        values = view.updates.values
        if public.all():
            return Aggregation(weighted_sum(values, weights), weights, None, state)
        mask = torch.from_numpy(public).to(values.device)
        public_values, private_values = values[:, mask].double(), values[:, ~mask].double()
        single = public_values.shape[1] == 1
        mean = (
            torch.zeros_like(public_values) if single else public_values.mean(dim=1, keepdim=True)
        )
        energy = float(public_values.square().sum())
        directions = _principal_directions(public_values - mean, self.dimension, energy)
        projected = mean + directions @ (directions.T @ (private_values - mean))
        combined = torch.cat([public_values, projected], dim=1).to(values.dtype)
        delta = weighted_sum(combined, np.concatenate([weights[public], weights[~public]]))
        return Aggregation(delta, weights, None, state, is_weighted_sum=False)
