"""Parts that a user could write: model, loss, aggregators, estimator, dataset and metric."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.aggregation import (
    Aggregation,
    Disclosure,
    Guard,
    ServerView,
    State,
    Weighed,
    guarded_sum,
    inverse_variance_weights,
    weighted_sum,
)
from noisewise.data import Dataset, Examples
from noisewise.noise import Matrix, NoiseEstimate


def tiny(input_shape: tuple[int, ...], n_classes: int, width: int = 4) -> nn.Module:
    size = int(np.prod(input_shape))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, width), nn.Tanh(), nn.Linear(width, n_classes)
    )


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = nn.functional.one_hot(targets, outputs.shape[-1]).to(outputs)
    return ((outputs - wanted) ** 2).sum(dim=-1).mean()


class Median:
    """Equal weights in every round."""

    needs: frozenset[Disclosure] = frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        n = view.updates.n_clients
        weights = np.full(n, 1 / n)
        return Aggregation(weighted_sum(view.updates.values, weights), weights)


class ByNoise:
    """Weights by 1 / squared norm; can be guarded and deployed, without a base class."""

    needs: frozenset[Disclosure] = frozenset()
    reads_all_coordinates = True

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard

    def with_guard(self, guard: Guard) -> ByNoise:
        return type(self)(guard)

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        def weigh(values: Tensor, ids: tuple[str, ...], cap: float) -> Weighed:
            energy = values.double().square().sum(dim=0).numpy()
            variance = energy if self.guard is None else self.guard.variance(energy)
            weights = inverse_variance_weights(variance, cap=cap)
            return Weighed(weights, NoiseEstimate(energy, "length"), {})

        return guarded_sum(view, self.guard, weigh, state)


class Guess:
    name = "guess"

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        return NoiseEstimate(np.arange(1.0, updates.shape[1] + 1), self.name)


def blobs() -> Dataset:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 120)
    inputs = rng.normal(size=(120, 5)) + targets[:, None]
    return Dataset("blobs", Examples(inputs.astype(np.float32), targets.astype(np.int64)), None, 3)


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
