"""Local DP-SGD of one client in one round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.checks import positive_int, positive_number
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.training.gradients import FunctionalGradients, GradientEngine, Loss

__all__ = ["LocalUpdate", "TensorData", "local_update"]

DEFAULT_PHYSICAL_BATCH = 256


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
    plan, never from the data; an empty sample takes its step on noise alone.

    Args:
        model: gives the structure; its own parameters are not read.
        theta: [p] the round's global parameters; not changed.
        data: the client's records.
        plan: what the accountant counted.
        learning_rate: eta.
        loss: mean loss of a batch.
        rng: sampling and noise.
        physical_batch: gradients held in memory at once; changes nothing but rounding.
        engine: computes clipped sums; the reference engine by default.
    """
    positive_number("learning_rate", learning_rate)
    positive_int("physical_batch", physical_batch)
    engine = engine or FunctionalGradients(model, loss)
    theta = theta.detach()  # or the update would drag along a graph that holds the records
    delta = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
    cuda = [theta.device] if theta.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # for dropout; the caller's generator stays as it is
        torch.manual_seed(rng.model_seed())
        for step in range(plan.steps_per_round):
            current = (theta.double() + delta).to(theta.dtype)
            total = _noisy_sum(engine, current, data, plan, rng, step, physical_batch)
            delta -= learning_rate / plan.expected_batch * total
    return LocalUpdate(delta.to(theta.dtype))


def _noisy_sum(
    engine: GradientEngine,
    theta: Tensor,
    data: TensorData,
    plan: LocalPlan,
    rng: RandomSource,
    step: int,
    physical_batch: int,
) -> Tensor:
    """Clipped gradients of one Poisson sample, summed over physical batches, plus noise: [p]."""
    index = torch.from_numpy(rng.poisson_sample(step, len(data), plan.sample_rate))
    index = index.to(data.inputs.device)
    total = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
    for start in range(0, len(index), physical_batch):
        part = index[start : start + physical_batch]
        total += engine.clipped_sum(theta, data.inputs[part], data.targets[part], plan.clip_norm)
    if plan.is_private:
        noise = torch.from_numpy(rng.normal(step, len(theta))).to(theta.device)
        total += plan.noise_std * noise
    return total
