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
    """A client's records, made ready once: inputs [n, d], targets [n] and ||(x, 1)||^2 [n]."""

    inputs: Tensor
    targets: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, data: TensorData) -> FlatRecords:
        """From records of any shape, on a processor."""
        inputs = data.inputs.flatten(1)
        return cls(inputs, data.targets, inputs.double().square().sum(1) + 1.0)


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

    Args:
        thetas: [p] each, the runs' global parameters: weights [classes, d], then biases [classes].
        classes: outputs of the linear layer.
        data: the client's records.
        plans: of the client in each run, alike in their `paired_key`.
        learning_rates: eta of each run.
        rng: the randomness that the runs share.
    """
    runs, plan = len(thetas), plans[0]
    start = torch.stack([theta.detach() for theta in thetas]).double()  # [runs, p]
    inner = start.shape[1] - classes
    weights = start[:, :inner].reshape(runs * classes, -1).clone()
    biases = start[:, inner:].clone()
    steps = torch.tensor(learning_rates, dtype=torch.float64) / plan.expected_batch
    noise_steps = steps * torch.tensor([p.noise_std for p in plans], dtype=torch.float64)
    for step in range(plan.steps_per_round):
        index = torch.from_numpy(rng.poisson_sample(step, len(data.targets), plan.sample_rate))
        if len(index):
            x = data.inputs.index_select(0, index)
            outputs = (x @ weights.to(x.dtype).t()).view(-1, runs, classes)
            slopes = torch.softmax(outputs.double() + biases, 2)
            slopes.scatter_(
                2, data.targets[index][:, None, None].expand(-1, runs, 1), -1.0, reduce="add"
            )
            norms = slopes.square().sum(2) * data.lengths[index][:, None]  # [b, runs]
            slopes *= (clip_factors(norms, plan.clip_norm) * steps)[:, :, None]
            if not torch.isfinite(norms.sum()):  # a run that diverges leaves the others alone
                slopes.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            weights.addmm_(slopes.view(-1, runs * classes).t(), x.double(), alpha=-1.0)
            biases -= slopes.sum(0)
        if noise_steps.any():
            noise = torch.from_numpy(rng.normal(step, start.shape[1])).double()
            weights.view(runs, inner).addr_(noise_steps, noise[:inner], alpha=-1.0)
            biases.addr_(noise_steps, noise[inner:], alpha=-1.0)
    end = torch.cat([weights.view(runs, inner), biases], 1)
    return [change.to(theta.dtype) for change, theta in zip(end - start, thetas, strict=True)]
