"""Local DP-SGD of one client in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.checks import positive_int, positive_number
from noisewise.data.specs import Unit
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.text import array_text, short_repr
from noisewise.training.engine import make_engine
from noisewise.training.gradients import GradientEngine, Loss, clip_bound
from noisewise.training.inputs import Inputs, select
from noisewise.training.local_optimisers import SGD, LocalOptimiser, LocalSteps
from noisewise.training.persons import Persons, add_person
from noisewise.training.torch_random import torch_seed

__all__ = ["LocalUpdate", "TensorData", "local_update", "noise_grid", "per_step"]

DEFAULT_PHYSICAL_BATCH = 256
_BLOCK = 1 << 18
_GRID_BITS = 20


@dataclass(frozen=True, repr=False)
class TensorData:
    """A client's records as tensors on one device.

    Attributes:
        inputs: [N, ...], one tensor or several (`noisewise.training.inputs`).
        targets: [N, ...] of any shape and type.
        persons: whose record each one is; None if that is not known.
    """

    inputs: Inputs
    targets: Tensor
    persons: Persons | None = None

    def __repr__(self) -> str:
        """Types and shapes, not the records."""
        inputs, targets = array_text(self.inputs), array_text(self.targets)
        return short_repr(self, inputs=inputs, targets=targets)

    def __len__(self) -> int:
        return len(self.targets)

    def count(self, unit: Unit) -> int:
        """The number of records, or of persons.

        Raises:
            InvalidValueError: persons are counted and not known.
        """
        if unit == "record":
            return len(self)
        if self.persons is None:
            raise InvalidValueError("data.persons", None, "must be given to count them")
        return len(self.persons)

    def without_records(self) -> TensorData:
        """Data of the same form without any record."""
        none = slice(0)
        persons = None if self.persons is None else self.persons.take(none)
        return TensorData(select(self.inputs, none), self.targets[none], persons)

    @property
    def tensor(self) -> Tensor:
        """The inputs of records that are one tensor.

        Raises:
            InvalidValueError: the inputs are several tensors.
        """
        if not isinstance(self.inputs, Tensor):
            kind = type(self.inputs).__name__
            raise InvalidValueError("inputs", kind, "must be one tensor for this function")
        return self.inputs


@dataclass(frozen=True, repr=False)
class LocalUpdate:
    """What leaves a client: only the noised change of the parameters [p]."""

    delta: Tensor

    def __repr__(self) -> str:
        """Its shape, not the numbers."""
        return short_repr(self, delta=array_text(self.delta))


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
    optimiser: LocalOptimiser = SGD,
) -> LocalUpdate:
    """Run E_i steps of DP-SGD from ``theta`` and return the change of the parameters.

    Step: theta <- theta - eta / b [sum_j clip(g_j, c) + N(0, c^2 z^2 I)] over a Poisson sample j
    (the paper's eq. noisy_sg and Algorithm 1). j is a record, or with ``plan.unit = "person"`` a
    person, whose g_j is the mean gradient of their records (`noisewise.training.persons`). q, b, c,
    z and the number of steps come from the plan, never from the data; a step with an empty sample
    uses noise alone. The noised sum is rounded to a public grid (`noise_grid`).

    Args:
        model: gives the structure; its own parameters are not read.
        theta: [p] the round's global parameters; not changed.
        data: the client's records; with their persons if the plan protects persons.
        plan: the plan that the accountant counts.
        learning_rate: eta.
        loss: mean loss of a batch.
        rng: draws the samples and the noise.
        physical_batch: number of records whose gradients are in memory at once. It changes only the
            order of sums.
        engine: computes clipped sums; by default `make_engine(model, loss)`, which a deployed
            client needs. Passing the same engine in every round saves its preparation.
        optimiser: moves the parameters by the noised gradients; plain SGD by default.

    Returns:
        The noised change of the parameters.

    Raises:
        InvalidValueError: a value or the shape of ``theta`` is invalid, or the plan protects
            persons and the data do not say whose records they are.
        UnsupportedModelError: the model has BatchNorm.

    Example:
        >>> from noisewise.privacy import LocalPlan, PrivacyBudget
        >>> from noisewise.randomness import SeededRandom
        >>> model = nn.Linear(3, 2)
        >>> theta = torch.zeros(8)
        >>> data = TensorData(torch.rand(10, 3), torch.zeros(10, dtype=torch.int64))
        >>> plan = LocalPlan(0.5, 5, 2, 1.0, 1.2, 10, "pld", PrivacyBudget(1.0, 1e-5))
        >>> rng = SeededRandom(0, 1, "client 1")
        >>> loss = nn.functional.cross_entropy
        >>> local_update(model, theta, data, plan, 0.1, loss, rng).delta.shape
        torch.Size([8])
    """
    positive_number("learning_rate", learning_rate)
    positive_int("physical_batch", physical_batch)
    if plan.unit == "person" and data.persons is None:
        raise InvalidValueError("data.persons", None, "must be given for a plan that protects them")
    engine = engine or make_engine(model, loss)
    theta = theta.detach()  # otherwise the update would refer to a graph with the records
    step_size = learning_rate / plan.expected_batch
    # All vectors are allocated once: for a large model, new memory costs more than the sums.
    start, point = theta.double(), theta.to(torch.float64, copy=True)
    total, current = torch.zeros_like(point), theta.clone()
    own_steps = None if optimiser.is_sgd else LocalSteps(optimiser, len(theta), theta.device)
    with torch_seed(rng.model_seed(), theta.device):  # for dropout
        for step in range(plan.steps_per_round):
            if step > 0:
                current.copy_(point)
                total.zero_()
            _add_noisy_sum(engine, current, data, plan, rng, step, physical_batch, total)
            if own_steps is None:
                point.add_(total, alpha=-step_size)
            else:
                own_steps.step(point, total.div_(plan.expected_batch), learning_rate)
    return LocalUpdate(point.sub_(start).to(theta.dtype))


def per_step(delta: Tensor, plan: LocalPlan) -> Tensor:
    """The update divided by its number of steps, which clients of NoiseWise send."""
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
    """Add a Poisson sample's clipped gradients, in physical batches, and noise to total [p]."""
    if plan.unit == "person":
        _add_persons(engine, theta, data, plan, rng, step, physical_batch, total)
    else:
        index = torch.from_numpy(rng.poisson_sample(step, len(data), plan.sample_rate))
        index = index.to(data.targets.device)
        for start in range(0, len(index), physical_batch):
            part = index[start : start + physical_batch]
            inputs, targets = select(data.inputs, part), data.targets.index_select(0, part)
            engine.add_clipped_sum(theta, inputs, targets, clip_bound(plan), total)
    if plan.is_private:
        noise = torch.from_numpy(rng.normal(step, len(theta))).to(theta.device)
        grid = noise_grid(plan.noise_std)
        # In blocks: otherwise all float32 noise of a large model would be copied to float64 first.
        for sums, normals in zip(
            torch.split(total, _BLOCK), torch.split(noise, _BLOCK), strict=True
        ):
            sums.add_(normals, alpha=plan.noise_std).div_(grid).round_().mul_(grid)


def _add_persons(
    engine: GradientEngine,
    theta: Tensor,
    data: TensorData,
    plan: LocalPlan,
    rng: RandomSource,
    step: int,
    physical_batch: int,
    total: Tensor,
) -> None:
    """Add the bounded contributions of a Poisson sample of persons to total [p], one by one."""
    assert data.persons is not None
    scratch = torch.empty_like(total)
    for records in data.persons.sample(step, plan, rng):
        index = torch.from_numpy(records).to(data.targets.device)
        own = select(data.inputs, index), data.targets.index_select(0, index)
        add_person(engine, theta, own, plan, physical_batch, total, scratch)


def noise_grid(noise_std: float) -> float:
    """The spacing of the grid to which noised sums are rounded: at most 2^-20 of ``noise_std``.

    Rounding after the noise is post-processing. It removes the lowest bits, whose pattern depends
    on the sum that the noise was added to (Mironov 2012). The spacing is a power of two, so scaling
    by it is exact.
    """
    return math.ldexp(1.0, math.frexp(noise_std)[1] - 1 - _GRID_BITS)
