"""The closed form of a single linear layer compared with one backward pass for each record."""

from __future__ import annotations

import pytest
import torch
from gradient_cases import clipped, single_gradients, theta_of
from torch import nn
from torch.nn import functional

from noisewise.training.engine import FastGradients, LinearGradients, make_engine
from noisewise.training.models import make_model

LOSS = functional.cross_entropy


def softmax_model(dtype: torch.dtype) -> nn.Module:
    return make_model("softmax", (1, 4, 5), 3, seed=1).to(dtype)


def records(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(n, 1, 4, 5, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("clip", [None, 0.3, 1e6])
@pytest.mark.parametrize("n", [0, 1, 9])
def test_against_the_loop(dtype: torch.dtype, tolerance: float, clip: float | None, n: int) -> None:
    model, (x, y) = softmax_model(dtype), records(n, dtype)
    engine = make_engine(model, LOSS, isolate=False)
    assert type(engine) is LinearGradients
    theta = theta_of(model, dtype)
    expected = torch.zeros(len(theta), dtype=torch.float64)
    if n:
        expected = clipped(single_gradients(model, theta, x, y, LOSS), clip)
    got = engine.clipped_sum(theta, x, y, clip)
    assert float((got - expected).norm()) <= tolerance * max(1.0, float(expected.norm()))


def test_hostile_records_contribute_nothing() -> None:
    model, (x, y) = softmax_model(torch.float32), records(6, torch.float32)
    engine, theta = make_engine(model, LOSS, isolate=False), theta_of(model, torch.float32)
    sound = engine.clipped_sum(theta, x[:4], y[:4], 0.5)
    x[4], x[5, 0, 0, 0] = float("nan"), float("inf")
    torch.testing.assert_close(engine.clipped_sum(theta, x, y, 0.5), sound)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_influence_is_bounded(size: float) -> None:
    model, (x, y) = softmax_model(torch.float32), records(9, torch.float32)
    engine, theta = make_engine(model, LOSS, isolate=False), theta_of(model, torch.float32)
    x[0] *= size
    both = [engine.clipped_sum(theta, x[k:], y[k:], 0.5) for k in (0, 1)]
    assert float((both[0] - both[1]).norm()) <= 0.5 * (1 + 1e-6)


def test_ignored_targets_follow_torch() -> None:
    """Class -100 is torch's "ignore": the general way knows what a loss of nothing is."""
    model, (x, y) = softmax_model(torch.float32), records(5, torch.float32)
    y[2] = -100
    theta = theta_of(model, torch.float32)
    ours = make_engine(model, LOSS, isolate=False).clipped_sum(theta, x, y, 0.5)
    torch.testing.assert_close(ours, FastGradients(model, LOSS).clipped_sum(theta, x, y, 0.5))


def _frozen() -> nn.Module:
    model = softmax_model(torch.float32)
    model[1].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    return model


def _hooked() -> nn.Module:
    model = softmax_model(torch.float32)
    model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    "model",
    [
        _frozen(), _hooked(), nn.Linear(20, 3), nn.Sequential(nn.Linear(20, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(20, 3, bias=False)),
        nn.Sequential(nn.Flatten(2), nn.Linear(20, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(20, 5), nn.ReLU(), nn.Linear(5, 3)),
    ],
)  # fmt: skip
def test_other_models_go_the_general_way(model: nn.Module) -> None:
    assert type(make_engine(model, LOSS, isolate=False)) is FastGradients


def test_other_losses_go_the_general_way() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert type(make_engine(softmax_model(torch.float32), loss, isolate=False)) is FastGradients
