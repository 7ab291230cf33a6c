"""What a user would write: an own model, loss, aggregator, estimator and dataset."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.aggregation import Aggregation, Disclosure, ServerView, State, weighted_sum
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
    """Uniform weights, whatever happens."""

    needs: frozenset[Disclosure] = frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        n = view.updates.n_clients
        weights = np.full(n, 1 / n)
        return Aggregation(weighted_sum(view.updates.values, weights), weights)


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
