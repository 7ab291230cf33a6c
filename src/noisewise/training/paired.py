"""Local DP-SGD of softmax regression for several runs at once that share a client's randomness.

Runs of one seed that differ in the method or the learning rate draw the same samples and the same
normals at a client (that is what makes their comparison paired). Sampling, noise and reading the
records then need to be done once, and what is left is one product for all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.training.gradients import clip_factors
from noisewise.training.local import TensorData

__all__ = ["FlatRecords", "paired_key", "paired_linear_updates"]


@dataclass(frozen=True)
class FlatRecords:
    """A client's records, made ready once: (x, 1) [n, d + 1], targets [n], ||(x, 1)||^2 [n]."""

    inputs: Tensor
    targets: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, data: TensorData) -> FlatRecords:
        """From records of any shape, on a processor."""
        flat = data.inputs.flatten(1)
        inputs = torch.cat([flat, flat.new_ones(len(flat), 1)], 1)
        return cls(inputs, data.targets, inputs.double().square().sum(1).to(flat.dtype))


def paired_key(plan: LocalPlan) -> tuple[float, float, int, float | None]:
    """What plans must have in common to be trained together; their noise may differ."""
    return plan.sample_rate, plan.expected_batch, plan.steps_per_round, plan.clip_norm


@torch.no_grad()
def paired_linear_updates(
    thetas: Sequence[Tensor],
    classes: int,
    data: FlatRecords,
    plans: Sequence[LocalPlan],
    learning_rates: Sequence[float],
    rng: RandomSource,
) -> list[Tensor]:
    """The updates that `local_update` gives for each run alone, up to rounding.

    For simulations: sums are taken in the records' precision, not in float64 as in `local_update`,
    whose bound on what one record can do to a sum holds for a deployed client.

    Args:
        thetas: [p] each, the runs' global parameters: weights [classes, d], then biases [classes].
        classes: outputs of the linear layer.
        data: the client's records.
        plans: of the client in each run, alike in their `paired_key`.
        learning_rates: eta of each run.
        rng: the randomness that the runs share.
    """
    runs, plan, wide = len(thetas), plans[0], data.inputs.dtype
    start = torch.stack([_with_bias(theta.detach().to(wide), classes) for theta in thetas])
    layers = start.flatten(0, 1).clone()  # [runs * classes, d + 1]
    steps = torch.tensor(learning_rates, dtype=torch.float64) / plan.expected_batch
    noise_steps = steps * torch.tensor([p.noise_std for p in plans], dtype=torch.float64)
    steps, noise_steps = steps.to(wide)[:, None], noise_steps.to(wide)
    for step in range(plan.steps_per_round):
        index = torch.from_numpy(rng.poisson_sample(step, len(data.targets), plan.sample_rate))
        if batch := len(index):
            x = data.inputs.index_select(0, index)
            slopes = torch.softmax((layers @ x.t()).view(runs, classes, batch), 1)
            slopes[:, data.targets[index], torch.arange(batch)] -= 1.0
            norms = slopes.square().sum(1) * data.lengths[index]  # [runs, batch]
            slopes *= (clip_factors(norms, plan.clip_norm) * steps)[:, None]
            if not torch.isfinite(norms.sum()):  # such records count for nothing, as in clipping
                slopes.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            layers.addmm_(slopes.view(runs * classes, batch), x, alpha=-1.0)
        if noise_steps.any():
            noise = torch.from_numpy(rng.normal(step, len(thetas[0]))).to(wide)
            flat = _with_bias(noise, classes).flatten()
            layers.view(runs, -1).addr_(noise_steps, flat, alpha=-1.0)
    changes = layers.view(start.shape) - start
    return [
        torch.cat([change[:, :-1].flatten(), change[:, -1]]).to(theta.dtype)
        for change, theta in zip(changes, thetas, strict=True)
    ]


def _with_bias(theta: Tensor, classes: int) -> Tensor:
    """[classes, d + 1]: weights with the biases as a last column."""
    inner = len(theta) - classes
    return torch.cat([theta[:inner].view(classes, -1), theta[inner:, None]], 1)
