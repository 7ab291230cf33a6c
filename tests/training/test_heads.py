"""Heads compared with a slow reference: autograd in float64, one record after the other.

Stated tolerance: an update differs from the reference by at most 1e-5 of its norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gradient_cases import clipped, single_gradients
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training import heads, models
from noisewise.training.engine import FastGradients
from noisewise.training.gradients import Loss
from noisewise.training.heads import Head, HeadRecords, head_of, head_outputs, head_updates
from noisewise.training.local import TensorData, local_update
from noisewise.training.models import softmax
from noisewise.training.tasks import TASKS

TOLERANCE = 1e-5
LOSSES: dict[str, tuple[Loss, int]] = {
    "softmax": (functional.cross_entropy, 4),
    "one class": (functional.cross_entropy, 1),
    "binary": (functional.binary_cross_entropy_with_logits, 1),
    "multilabel": (functional.binary_cross_entropy_with_logits, 3),
    "regression": (functional.mse_loss, 1),
    "regression of several numbers": (functional.mse_loss, 3),
    "task binary": (TASKS["binary"].loss, 1),
    "task regression": (TASKS["regression"].loss, 3),
    "softmax module": (nn.CrossEntropyLoss(), 4),
    "multilabel module": (nn.BCEWithLogitsLoss(), 3),
    "regression module": (nn.MSELoss(), 3),
}
PLAN = LocalPlan(0.5, 5, 3, 0.5, 0.3, 10, "pld", PrivacyBudget(1.0, 1e-5))


@dataclass(frozen=True)
class Case:
    """A head with records and parameters."""

    model: nn.Module
    loss: Loss
    head: Head
    data: TensorData
    theta: Tensor

    @property
    def records(self) -> HeadRecords:
        records = HeadRecords.of(self.head, self.data)
        assert records is not None
        return records

    def update(self, plan: LocalPlan = PLAN, rate: float = 0.3) -> Tensor:
        rng = SeededRandom(1, 2, "a")
        return head_updates(self.head, [self.theta], self.records, [plan], [rate], rng)[0]

    def reference(self, plan: LocalPlan = PLAN, rate: float = 0.3) -> Tensor:
        """DP-SGD in float64, with one backward pass for each record."""
        rng, point = SeededRandom(1, 2, "a"), self.theta.double()
        for step in range(plan.steps_per_round):
            index = rng.poisson_sample(step, len(self.data), plan.sample_rate)
            total = torch.from_numpy(rng.normal(step, len(point))).double() * plan.noise_std
            targets = self.data.targets[index]
            if len(index):
                gradients = single_gradients(
                    self.model,
                    point,
                    self.data.inputs[index].double(),
                    targets.double() if targets.is_floating_point() else targets,
                    self.loss,
                )
                finite = gradients[gradients.isfinite().all(1)]
                total += clipped(finite, plan.clip_norm)
            point = point - rate / plan.expected_batch * total
        return point - self.theta.double()


def make_case(
    name: str, n: int = 12, d: int = 7, flat: bool = False, constant: float | None = None
) -> Case:
    loss, k = LOSSES[name]
    generator = torch.Generator().manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(d, k)) if flat else nn.Linear(d, k)
    if constant is not None:
        model = models.head((d,), k, constant)
    head = head_of(model, loss)
    assert head is not None
    inputs = torch.randn(n, d, generator=generator)
    targets = torch.randint(0, k, (n,), generator=generator)
    if head.loss != "softmax":
        targets = torch.rand(n, k, generator=generator).round(decimals=1)
    theta = 0.3 * torch.randn(head.size, generator=generator)
    return Case(model, loss, head, TensorData(inputs, targets), theta)


def agree(one: Tensor, other: Tensor) -> None:
    assert torch.isfinite(one).all()
    assert float((one - other).norm()) <= TOLERANCE * float(other.norm())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clip_norm", [0.5, 1e6, None])
def test_every_loss_agrees_with_autograd(name: str, clip_norm: float | None) -> None:
    plan = replace(PLAN, clip_norm=clip_norm or 1.0, noise_multiplier=1e-3)
    if clip_norm is None:
        plan = replace(PLAN, clip_norm=None, noise_multiplier=0.0, budget=None)
    case = make_case(name)
    agree(case.update(plan), case.reference(plan))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("constant", [0.1, 0.0, -3.0])
def test_an_appended_constant_in_place_of_a_bias(name: str, constant: float) -> None:
    case = make_case(name, constant=constant)
    assert case.head.constant == constant
    assert case.head.size == sum(parameter.numel() for parameter in case.model.parameters())
    agree(case.update(), case.reference())


def test_outputs_of_a_head_with_a_constant() -> None:
    case = make_case("softmax", constant=0.1)
    with torch.no_grad():
        case.model[-1].weight.copy_(case.theta.view(4, 8))  # type: ignore[index]
        expected = case.model(case.data.inputs)
    outputs = head_outputs(case.head, [case.theta, case.theta], case.data.inputs)
    assert torch.allclose(outputs, expected.expand(2, -1, -1), atol=1e-6)


@pytest.mark.parametrize(("n", "d"), [(1, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("name", ["softmax", "one class", "binary", "multilabel", "regression"])
def test_the_smallest_shapes(name: str, n: int, d: int) -> None:
    case, plan = make_case(name, n, d), replace(PLAN, sample_rate=1.0)
    agree(case.update(plan), case.reference(plan))


@pytest.mark.parametrize("name", ["softmax", "binary", "multilabel", "regression"])
@pytest.mark.parametrize("size", [1e-8, 1e-4, 1e4, 1e8])
def test_clip_factors_of_any_size(name: str, size: float) -> None:
    """Records whose gradients are far below and far above the clipping norm."""
    case, plan = make_case(name), replace(PLAN, sample_rate=1.0, noise_multiplier=1e-9)
    case.data.inputs[::2] *= size
    plan = replace(plan, steps_per_round=1)
    agree(case.update(plan), case.reference(plan))
    one = replace(case, data=TensorData(case.data.inputs[:1], case.data.targets[:1]))
    limit = 0.3 / plan.expected_batch * 0.5
    assert float(one.update(plan).norm()) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("distance", [1e8, 1e20, 1e35])
def test_targets_far_away(distance: float) -> None:
    case = make_case("regression")
    case.data.targets[3] = distance
    agree(case.update(), case.reference())


@pytest.mark.parametrize("name", ["softmax", "binary", "multilabel", "regression"])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_records_that_are_not_finite_contribute_nothing(name: str, rate: float) -> None:
    case, plan = make_case(name), replace(PLAN, sample_rate=rate)
    case.data.inputs[1], case.data.inputs[4, 2] = float("nan"), float("inf")
    if case.head.loss != "softmax":
        case.data.targets[6] = float("nan")
    agree(case.update(plan), case.reference(plan))


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_sample_uses_noise_alone(name: str) -> None:
    case, plan = make_case(name), replace(PLAN, sample_rate=1e-12, steps_per_round=1)
    noise = SeededRandom(1, 2, "a").normal(0, case.head.size)
    expected = -0.3 / plan.expected_batch * plan.noise_std * torch.from_numpy(noise)
    torch.testing.assert_close(case.update(plan), expected, rtol=1e-6, atol=0.0)


def test_no_records_at_all() -> None:
    case = make_case("softmax", n=0)
    agree(case.update(), case.reference())


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize(
    ("d", "k", "runs", "n"),
    [
        (2000, 10, 1, 300),  # several blocks and tiles of rows
        (5000, 9, 1, 90),  # tiles of features
        (2000, 10, 7, 300),  # many outputs: one product
        (6000, 10, 4, 800),  # many outputs, several blocks
        (9, 2, 3, 2500),
    ],
)
def test_runs_together_agree_with_local_update(
    d: int, k: int, runs: int, n: int, rate: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    model, loss = softmax((d,), k), functional.cross_entropy
    head = head_of(model, loss)
    assert head is not None
    inputs = functional.normalize(torch.randn(n, d, generator=generator))
    data = TensorData(inputs, torch.randint(0, k, (n,), generator=generator))
    thetas = [0.1 * torch.randn(head.size, generator=generator) for _ in range(runs)]
    plan = replace(PLAN, sample_rate=rate, expected_batch=round(rate * n))
    plans = [replace(plan, noise_multiplier=run + 1.0) for run in range(runs)]
    rates, records = [0.1 * (run + 1) for run in range(runs)], HeadRecords.of(head, data)
    assert records is not None
    rng = SeededRandom(1, 2, "a")
    updates = head_updates(head, thetas, records, plans, rates, rng)
    engine = FastGradients(model, loss)
    for theta, plan, eta, update in zip(thetas, plans, rates, updates, strict=True):
        agree(update, local_update(model, theta, data, plan, eta, loss, rng, engine=engine).delta)
    outputs = head_outputs(head, thetas, inputs)
    for theta, output in zip(thetas, outputs, strict=True):
        weight, bias = theta[: k * d].view(k, d), theta[k * d :]
        torch.testing.assert_close(output, inputs @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "k", "targets"),
    [
        ("binary", 1, torch.arange(12) % 2),
        ("binary", 1, torch.arange(12)[:, None] % 2),
        ("regression", 1, torch.linspace(-2, 2, 12)),
        ("regression", 4, torch.linspace(-2, 2, 48).reshape(12, 2, 2)),
        ("binary", 1, torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_targets_of_a_task_have_the_closed_form(task: str, k: int, targets: Tensor) -> None:
    model, loss = nn.Linear(7, k), TASKS[task].loss
    head = head_of(model, loss)
    assert head is not None
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(len(targets), 7, generator=generator)
    case = Case(model, loss, head, TensorData(inputs, targets), torch.linspace(-1, 1, head.size))
    rng = SeededRandom(1, 2, "a")
    engine = FastGradients(model, loss)
    general = local_update(model, case.theta, case.data, PLAN, 0.3, loss, rng, engine=engine)
    agree(case.update(), general.delta)


def test_large_parameters_do_not_round_the_update() -> None:
    """The change is summed by itself: parameters of 1e4 have steps of 1e-3."""
    case, plan = make_case("softmax"), replace(PLAN, noise_multiplier=1.0)
    large = replace(case, theta=case.theta + 1e4)
    rate = 1e-4
    reference = large.reference(plan, rate)
    assert float(reference.abs().max()) < 1e-4
    assert float((large.update(plan, rate) - reference).norm()) <= 1e-2 * float(reference.norm())


def test_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has power: a norm without the bias's gradient is 1 too small."""

    def flawed(
        slopes: NDArray[np.float64],
        squared_norms: NDArray[np.float64],
        clip_norm: float | None,
        steps: NDArray[np.float64],
    ) -> None:
        sound(slopes, squared_norms - 1.0, clip_norm, steps)

    sound = heads._clip
    monkeypatch.setattr(heads, "_clip", flawed)
    case = make_case("softmax")
    with pytest.raises(AssertionError):
        agree(case.update(), case.reference())


def test_records_are_not_copied() -> None:
    case = make_case("softmax", flat=True)
    assert case.records.inputs.ctypes.data == case.data.inputs.data_ptr()
    images = TensorData(torch.rand(4, 1, 7, 1), torch.zeros(4).long())
    records = HeadRecords.of(case.head, images)
    assert records is not None
    assert records.inputs.ctypes.data == images.inputs.data_ptr()


def test_what_is_a_head() -> None:
    loss = functional.cross_entropy
    for model in (
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(3, 2)),
    ):
        assert head_of(model, loss) is not None
    hooked = nn.Linear(3, 2)
    hooked.register_forward_hook(lambda *_: None)
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    for model in (
        hooked, frozen, nn.Linear(3, 2, bias=False), nn.Linear(3, 2).double(),
        nn.Sequential(), nn.Sequential(nn.Flatten(2), nn.Linear(3, 2)),
        nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), nn.Flatten(),
    ):  # fmt: skip
        assert head_of(model, loss) is None
    for other in (
        nn.CrossEntropyLoss(label_smoothing=0.1), nn.MSELoss(reduction="sum"),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), functional.l1_loss, nn.L1Loss(),
    ):  # fmt: skip
        assert head_of(nn.Linear(3, 2), other) is None


@pytest.mark.parametrize(
    ("name", "inputs", "targets"),
    [
        ("softmax", torch.rand(2, 7), torch.tensor([0, -100])),
        ("softmax", torch.rand(2, 7), torch.tensor([0, 4])),
        ("softmax", torch.rand(2, 7), torch.rand(2, 4)),
        ("softmax", torch.rand(2, 3, 7), torch.zeros(2).long()),
        ("softmax", torch.rand(2, 8), torch.zeros(2).long()),
        ("softmax", torch.rand(2, 7).double(), torch.zeros(2).long()),
        ("binary", torch.rand(2, 7), torch.rand(2)),
        ("multilabel", torch.rand(2, 7), torch.ones(2, 3).long()),
        ("regression module", torch.rand(2, 7), torch.rand(2)),
    ],
)
def test_records_of_another_form_use_the_general_engine(
    name: str, inputs: Tensor, targets: Tensor
) -> None:
    assert HeadRecords.of(make_case(name).head, TensorData(inputs, targets)) is None
