"""Local DP-SGD of one client in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.checks import positive_int, positive_number
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.training.engine import make_engine
from noisewise.training.gradients import GradientEngine, Loss
from noisewise.training.torch_random import torch_seed

__all__ = ["LocalUpdate", "TensorData", "local_update", "noise_grid", "per_step"]

DEFAULT_PHYSICAL_BATCH = 256
_BLOCK = 1 << 18
_GRID_BITS = 20


@dataclass(frozen=True)
class TensorData:
    """A client's records as tensors on one device: inputs [N, ...], targets [N, ...]."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class LocalUpdate:
    """What leaves a client: the noised change of the parameters [p] and nothing else."""

    delta: Tensor


def local_update(
    model: nn.Module,
    theta: Tensor,
    data: TensorData,
    plan: LocalPlan,
    learning_rate: float,
    loss: Loss,
    rng: RandomSource,
    *,
    physical_batch: int = DEFAULT_PHYSICAL_BATCH,
    engine: GradientEngine | None = None,
) -> LocalUpdate:
    """Run E_i steps of DP-SGD from ``theta`` and return the change of the parameters.

    Step: theta <- theta - eta / b [sum_j clip(g_j, c) + N(0, c^2 z^2 I)] over a Poisson sample j
    (the paper's eq. noisy_sg and Algorithm 1). q, b, c, z and the number of steps come from the
    plan, never from the data; an empty sample takes its step on noise alone. The noised sum is
    rounded to a public grid (`noise_grid`).

    Args:
        model: gives the structure; its own parameters are not read.
        theta: [p] the round's global parameters; not changed.
        data: the client's records.
        plan: what the accountant counted.
        learning_rate: eta.
        loss: mean loss of a batch.
        rng: sampling and noise.
        physical_batch: records whose gradients are held in memory at once; changes nothing but the
            order of sums.
        engine: computes clipped sums; `make_engine`, as a deployed client needs it, by default.
            Passing the same one in every round saves its preparation.
    """
    positive_number("learning_rate", learning_rate)
    positive_int("physical_batch", physical_batch)
    engine = engine or make_engine(model, loss)
    theta = theta.detach()  # or the update would drag along a graph that holds the records
    step_size = learning_rate / plan.expected_batch
    # All vectors are made once: a large model would spend more on fresh memory than on the sums.
    start, point = theta.double(), theta.to(torch.float64, copy=True)
    total, current = torch.zeros_like(point), theta.clone()
    with torch_seed(rng.model_seed(), theta.device):  # for dropout
        for step in range(plan.steps_per_round):
            if step > 0:
                current.copy_(point)
                total.zero_()
            _add_noisy_sum(engine, current, data, plan, rng, step, physical_batch, total)
            point.add_(total, alpha=-step_size)
    return LocalUpdate(point.sub_(start).to(theta.dtype))


def per_step(delta: Tensor, plan: LocalPlan) -> Tensor:
    """The update divided by its number of steps, as clients of NoiseWise send it."""
    return delta / plan.steps_per_round


def _add_noisy_sum(
    engine: GradientEngine,
    theta: Tensor,
    data: TensorData,
    plan: LocalPlan,
    rng: RandomSource,
    step: int,
    physical_batch: int,
    total: Tensor,
) -> None:
    """Add one Poisson sample's clipped gradients, by physical batches, and noise to total [p]."""
    index = torch.from_numpy(rng.poisson_sample(step, len(data), plan.sample_rate))
    index = index.to(data.inputs.device)
    for start in range(0, len(index), physical_batch):
        part = index[start : start + physical_batch]
        inputs, targets = data.inputs.index_select(0, part), data.targets.index_select(0, part)
        engine.add_clipped_sum(theta, inputs, targets, plan.clip_norm, total)
    if plan.is_private:
        noise = torch.from_numpy(rng.normal(step, len(theta))).to(theta.device)
        grid = noise_grid(plan.noise_std)
        # By blocks: float32 noise of a large model would be copied to float64 as a whole first.
        for sums, normals in zip(
            torch.split(total, _BLOCK), torch.split(noise, _BLOCK), strict=True
        ):
            sums.add_(normals, alpha=plan.noise_std).div_(grid).round_().mul_(grid)


def noise_grid(noise_std: float) -> float:
    """The spacing of the grid that noised sums are rounded to: 2^-20 of the noise, or less.

    Rounding after the noise is post-processing. It removes the lowest bits, whose pattern depends
    on the sum that the noise was added to (Mironov 2012). A power of two, so that scaling is exact.
    """
    return math.ldexp(1.0, math.frexp(noise_std)[1] - 1 - _GRID_BITS)
