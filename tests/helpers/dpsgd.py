"""Helpers of the privacy tests: plans, small models, recorders, and DP-SGD with planted flaws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.privacy import LocalPlan, PrivacyBudget
from noisewise.randomness import RandomSource, SeededRandom
from noisewise.training import LocalUpdate, TensorData, make_engine
from noisewise.training.local import noise_grid

Update = Callable[..., LocalUpdate]


def make_test_plan(
    *,
    n: int = 100,
    batch: int = 10,
    steps: int = 5,
    clip: float = 1.0,
    z: float = 1.0,
) -> LocalPlan:
    """Make a plan without calibration."""
    budget = PrivacyBudget(1.0, 1e-5)
    return LocalPlan(batch / n, batch, steps, clip, z, 10, "pld", budget)


def product_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient with respect to the outputs is the targets, so of any wanted size."""
    return (outputs * targets).sum(dim=1).mean()


def zero_gradient_case(p: int, n: int) -> tuple[nn.Module, Tensor, TensorData]:
    """Return a linear model with p parameters, its parameters, and n records with gradient 0."""
    model = nn.Linear(p, 1, bias=False)
    data = TensorData(torch.zeros(n, p), torch.ones(n, 1))
    return model, torch.zeros(p), data


@dataclass
class RecordingRandom:
    """Passes on the randomness of another source, and records the calls and their results."""

    inner: RandomSource
    samples: list[np.ndarray] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    noises: list[np.ndarray] = field(default_factory=list)

    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        self.rates.append(rate)
        self.sizes.append(size)
        self.samples.append(self.inner.poisson_sample(step, size, rate))
        return self.samples[-1]

    def normal(self, step: int, size: int) -> np.ndarray:
        self.noises.append(self.inner.normal(step, size))
        return self.noises[-1]

    def model_seed(self) -> int:
        return self.inner.model_seed()


class Adding:
    """Implements `add_clipped_sum` with `clipped_sum`."""

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        total += self.clipped_sum(theta, inputs, targets, clip_norm)


class ZeroEngine(Adding):
    """Every gradient is 0."""

    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        return torch.zeros(theta.shape, dtype=torch.float64)


class CountingEngine(Adding):
    """Every record's gradient is c e_0, so the sum shows the number of records."""

    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        total = torch.zeros(theta.shape, dtype=torch.float64)
        total[0] = len(inputs) * (clip_norm or 1.0)
        return total


FLAWS = (
    "steps from data",
    "divisor from data",
    "realised divisor",
    "rate from data",
    "noise from data",
    "noise x 0.8",
    "noise reused",
    "skips empty batches",
    "batch decides noise",
)


def flawed_update(flaw: str | None) -> Update:
    """Return a plain DP-SGD with one of `FLAWS`, or without a flaw for None."""
    assert flaw is None or flaw in FLAWS, flaw

    def update(
        model: nn.Module,
        theta: Tensor,
        data: TensorData,
        plan: LocalPlan,
        learning_rate: float,
        loss: Callable[[Tensor, Tensor], Tensor],
        rng: RandomSource,
        *,
        physical_batch: int = 256,
        engine: object = None,
    ) -> LocalUpdate:
        engine = engine or make_engine(model, loss)
        delta = torch.zeros(theta.shape, dtype=torch.float64)
        steps = plan.steps_per_round
        if flaw == "steps from data":
            steps = math.ceil(len(data) / plan.expected_batch)
        for step in range(steps):
            rate = plan.sample_rate
            if flaw == "rate from data":
                rate = plan.expected_batch / len(data)
            index = torch.from_numpy(rng.poisson_sample(step, len(data), rate))
            if flaw == "skips empty batches" and len(index) == 0:
                continue
            now = (theta.double() + delta).to(theta.dtype)
            total = engine.clipped_sum(now, data.inputs[index], data.targets[index], plan.clip_norm)
            deviation = plan.noise_std
            if flaw == "noise from data":
                deviation *= plan.sample_rate * len(data) / plan.expected_batch
            if flaw == "noise x 0.8":
                deviation *= 0.8
            if flaw == "batch decides noise" and len(index) == 0:
                deviation = 0.0
            noise = rng.normal(0 if flaw == "noise reused" else step, len(theta)).astype(np.float64)
            divisor = float(plan.expected_batch)
            if flaw == "divisor from data":
                divisor = plan.sample_rate * len(data)
            if flaw == "realised divisor":
                divisor = float(max(1, len(index)))
            noised = total + deviation * torch.from_numpy(noise)
            if plan.is_private:
                grid = noise_grid(plan.noise_std)
                noised = torch.round(noised / grid) * grid
            delta -= learning_rate / divisor * noised
        return LocalUpdate(delta.to(theta.dtype))

    return update


def seeded(seed: int = 0, round_number: int = 1, client: str = "a") -> SeededRandom:
    return SeededRandom(seed, round_number, client)
