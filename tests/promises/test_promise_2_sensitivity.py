"""Guarantee 2 of docs/privacy.md: one record moves a sum of clipped gradients by at most c."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from dpsgd import make_test_plan, product_loss, seeded
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.errors import InvalidValueError, UnsupportedModelError
from noisewise.training import (
    FunctionalGradients,
    GradientEngine,
    ParameterLayout,
    TensorData,
    check_model,
    local_update,
    make_engine,
    make_model,
)

MakeEngine = Callable[[nn.Module, Callable[[Tensor, Tensor], Tensor]], GradientEngine]
ENGINES: list[MakeEngine] = [  # a new engine joins here
    FunctionalGradients,
    make_engine,
    partial(make_engine, isolate=False),
]
CLIP = 0.5
SIZES = [10.0**k for k in range(-8, 9)]


@dataclass(frozen=True)
class Case:
    """A model at a point, and records with gradients from 1e-8 to 1e8."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    data: TensorData

    @property
    def theta(self) -> Tensor:
        return ParameterLayout.of(self.model).flatten(self.model)


def linear_case(dtype: torch.dtype) -> Case:
    """Gradient of record j: size_j times a random direction, over two layers in parallel."""

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 1, bias=False), nn.Linear(9, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x[:, :6]) + self.right(x[:, 6:])

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(len(SIZES), 15, generator=generator, dtype=dtype)
    targets = torch.tensor(SIZES, dtype=dtype)[:, None]
    return Case(TwoLayers().to(dtype), product_loss, TensorData(inputs, targets))


def network_case(name: str, dtype: torch.dtype) -> Case:
    """A network of the package; the targets scale the gradients over 16 orders of magnitude."""
    model = make_model(name, (1, 8, 8), 3, seed=0).to(dtype)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(len(SIZES), 1, 8, 8, generator=generator, dtype=dtype)
    targets = torch.tensor(SIZES, dtype=dtype)[:, None].expand(-1, 3).clone()
    return Case(model, product_loss, TensorData(inputs, targets))


CASES = {
    "linear-32": lambda: linear_case(torch.float32),
    "linear-64": lambda: linear_case(torch.float64),
    "mlp-32": lambda: network_case("mlp", torch.float32),
    "cnn-32": lambda: network_case("cnn", torch.float32),
    "cnn-64": lambda: network_case("cnn", torch.float64),
}


def without(data: TensorData, record: int) -> TensorData:
    keep = [j for j in range(len(data)) if j != record]
    return TensorData(data.inputs[keep], data.targets[keep])


def sum_of(engine: GradientEngine, case: Case, data: TensorData) -> Tensor:
    return engine.clipped_sum(case.theta, data.inputs, data.targets, CLIP)


def check_sensitivity(make_engine: MakeEngine, case: Case) -> None:
    engine = make_engine(case.model, case.loss)
    everyone = sum_of(engine, case, case.data)
    assert everyone.dtype == torch.float64
    moves = []
    for record in range(len(case.data)):
        move = everyone - sum_of(engine, case, without(case.data, record))
        moves.append(float(move.norm()))
    assert max(moves) <= CLIP * (1 + 1e-6), "one record moves too much"
    # Power: some records are clipped, others (much smaller ones) come through as they are.
    assert max(moves) >= CLIP * (1 - 1e-5)  # a deployed client clips at c (1 - 2^-17)
    assert 0 < min(moves) < 1e-3 * CLIP


def check_bad_records_add_nothing(make_engine: MakeEngine, case: Case) -> None:
    engine = make_engine(case.model, case.loss)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for part in ("inputs", "targets"):
            inputs, targets = case.data.inputs.clone(), case.data.targets.clone()
            (inputs if part == "inputs" else targets)[4].view(-1)[0] = bad
            spoilt = TensorData(inputs, targets)
            got = sum_of(engine, case, spoilt)
            assert torch.isfinite(got).all()
            torch.testing.assert_close(
                got, sum_of(engine, case, without(case.data, 4)), rtol=0, atol=1e-6 * CLIP
            )
            only = TensorData(inputs[4:5], targets[4:5])
            assert torch.equal(sum_of(engine, case, only), torch.zeros_like(got))


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_one_record_moves_the_sum_by_at_most_c(make_engine: MakeEngine, name: str) -> None:
    check_sensitivity(make_engine, CASES[name]())


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_bad_records_add_nothing(make_engine: MakeEngine, name: str) -> None:
    check_bad_records_add_nothing(make_engine, CASES[name]())


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("size", [1e20, 1e37, 1e150, 1e300])
def test_gradients_whose_norm_overflows_are_bounded(make_engine: MakeEngine, size: float) -> None:
    """Clipped, or left out where even float64 cannot hold the squared norm."""
    case = linear_case(torch.float64 if size > 1e38 else torch.float32)
    targets = case.data.targets.clone()
    targets[3] = size
    data = TensorData(case.data.inputs, targets)
    engine = make_engine(case.model, case.loss)
    move = sum_of(engine, case, data) - sum_of(engine, case, without(data, 3))
    assert float(move.norm()) <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_zero_gradients_are_no_division_by_zero(make_engine: MakeEngine) -> None:
    case = linear_case(torch.float32)
    data = TensorData(case.data.inputs * 0, case.data.targets)
    assert torch.equal(
        sum_of(make_engine(case.model, case.loss), case, data),
        torch.zeros(15, dtype=torch.float64),
    )


class Flawed(FunctionalGradients):
    """Per-sample gradients [b, p] of a small model, for engines with planted flaws."""

    def each(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        rows = [
            super(Flawed, self).clipped_sum(theta, inputs[j : j + 1], targets[j : j + 1], None)
            for j in range(len(inputs))
        ]
        return torch.stack(rows) if rows else torch.zeros(0, len(theta), dtype=torch.float64)


def clip(gradients: Tensor, norm: float) -> Tensor:
    return gradients * (norm / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)


class NoClipping(Flawed):
    def clipped_sum(self, theta, inputs, targets, clip_norm):
        return self.each(theta, inputs, targets).sum(dim=0)


class PerLayerClipping(Flawed):
    def clipped_sum(self, theta, inputs, targets, clip_norm):
        parts = self.each(theta, inputs, targets).split(list(self.layout.sizes), dim=1)
        return torch.cat([clip(part, clip_norm) for part in parts], dim=1).sum(dim=0)


class ClipsTheSum(Flawed):
    def clipped_sum(self, theta, inputs, targets, clip_norm):
        total = self.each(theta, inputs, targets).sum(dim=0, keepdim=True)
        return clip(total, clip_norm * len(inputs))[0]


class ClipsEntries(Flawed):
    def clipped_sum(self, theta, inputs, targets, clip_norm):
        return self.each(theta, inputs, targets).clamp(-clip_norm, clip_norm).sum(dim=0)


class ClipsToTwice(Flawed):
    def clipped_sum(self, theta, inputs, targets, clip_norm):
        return clip(self.each(theta, inputs, targets), 2 * clip_norm).sum(dim=0)


class CoarseNorms(Flawed):
    """Norms in half precision: a part in a thousand too much comes through."""

    def clipped_sum(self, theta, inputs, targets, clip_norm):
        rows = self.each(theta, inputs, targets)
        norms = rows.norm(dim=1, keepdim=True).bfloat16().double()
        return (rows * (clip_norm / norms).clamp(max=1.0)).sum(dim=0)


@pytest.mark.parametrize(
    "flawed",
    [NoClipping, PerLayerClipping, ClipsTheSum, ClipsEntries, ClipsToTwice, CoarseNorms],
)
def test_planted_clipping_flaws_are_seen(flawed: type[Flawed]) -> None:
    with pytest.raises(AssertionError, match="one record moves too much"):
        check_sensitivity(flawed, linear_case(torch.float32))


class LetsBadRecordsIn(FunctionalGradients):
    """Clips as it should, but never asks whether a gradient is a number."""

    def clipped_sum(self, theta, inputs, targets, clip_norm):
        total = torch.zeros(len(theta), dtype=torch.float64)
        parameters = {n: v.clone() for n, v in self.layout.unflatten(theta).items()}
        for name in parameters:
            parameters[name].requires_grad_()
        for x, y in zip(inputs, targets, strict=True):
            loss = product_loss(functional_call(self.model, parameters, (x[None],)), y[None])
            found = torch.autograd.grad(loss, [parameters[n] for n in self.layout.names])
            row = torch.cat([g.reshape(-1) for g in found]).double()
            total += row * min(1.0, clip_norm / float(row.norm()))
        return total

    def __init__(self, model: nn.Module, loss: object) -> None:
        super().__init__(model, loss)
        self.model = model


def test_planted_bad_records_are_seen() -> None:
    check_sensitivity(LetsBadRecordsIn, linear_case(torch.float32))  # sound on sound records
    with pytest.raises(AssertionError):
        check_bad_records_add_nothing(LetsBadRecordsIn, linear_case(torch.float32))


# ---------------------------------------------------------------- layers that mix records


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_batch_norm_is_refused_with_the_remedy(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(UnsupportedModelError, match=r"1\.1.*GroupNorm"):
        check_model(model)
    data = TensorData(torch.zeros(5, 4), torch.zeros(5, 4))
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        local_update(model, torch.zeros(20), data, make_test_plan(), 0.1, product_loss, seeded())


def test_batch_norm_is_refused_in_evaluation_mode_too() -> None:
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Identity()], ids=lambda m: type(m).__name__
)
def test_other_norms_are_welcome(layer: nn.Module) -> None:
    check_model(nn.Sequential(nn.Linear(4, 4), layer))


def test_a_model_without_parameters_is_named() -> None:
    with pytest.raises(InvalidValueError, match="no trainable parameter"):
        check_model(nn.ReLU())


class OwnBatchNorm(nn.Module):
    """Hides from `check_model`: running statistics written by a function, and used at once."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(x, self.mean, self.variance, training=True)
        return self.dense((y + self.mean[:, None]).flatten(1))


class RunningMean(nn.Module):
    """What one batch leaves behind is subtracted from the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 2)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        outputs = self.dense(x - self.mean)
        self.mean.copy_(0.5 * self.mean + 0.5 * x.detach().mean(dim=0))
        return outputs


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("kind", ["own", "instance", "running mean"])
def test_records_do_not_meet_in_buffers(make_engine: MakeEngine, kind: str) -> None:
    """Either the model is refused, or one record stays without influence on the others."""
    torch.manual_seed(0)
    model: nn.Module = RunningMean() if kind == "running mean" else OwnBatchNorm()
    if kind == "instance":
        norm = nn.InstanceNorm1d(3, track_running_stats=True)
        model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs = 10 * torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    inputs[0] *= 100
    case = Case(model, product_loss, TensorData(inputs, torch.full((8, 2), 10.0)))
    try:
        engine = make_engine(case.model, case.loss)
        everyone = sum_of(engine, case, case.data)
    except UnsupportedModelError:
        return
    for record in range(8):
        move = everyone - sum_of(engine, case, without(case.data, record))
        assert float(move.norm()) <= CLIP * (1 + 1e-6)
    assert torch.equal(sum_of(engine, case, case.data), everyone)  # nothing stays in the engine
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), f"{name} keeps statistics of raw records"


# ---------------------------------------------------------------- physical batches


def update_in_parts(case: Case, physical_batch: int) -> Tensor:
    plan = make_test_plan(n=len(case.data), batch=12, steps=4, clip=CLIP, z=0.5)
    reply = local_update(
        case.model, case.theta, case.data, plan, 0.1, case.loss, seeded(),
        physical_batch=physical_batch,
    )  # fmt: skip
    return reply.delta


@pytest.mark.parametrize("name", CASES)
def test_physical_batches_change_nothing(name: str) -> None:
    case = CASES[name]()
    together = update_in_parts(case, 1000)
    assert float(together.norm()) > 0
    for size in (1, 7):
        torch.testing.assert_close(
            update_in_parts(case, size), together, rtol=0, atol=1e-6 * float(together.norm())
        )


def test_physical_batches_have_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that clips what it gets at once (a microbatch) differs between batch sizes."""
    monkeypatch.setattr("noisewise.training.local.make_engine", ClipsTheSum)
    with pytest.raises(AssertionError):
        test_physical_batches_change_nothing("linear-32")
