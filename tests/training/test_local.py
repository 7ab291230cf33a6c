"""Local DP-SGD compared with a slow loop in plain Python; its inputs are not modified."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dpsgd import Update, flawed_update, make_test_plan, product_loss, seeded
from torch import Tensor, nn

from noisewise.data import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.privacy import LocalPlan, non_private_plan
from noisewise.randomness import RandomSource, SecureRandom, SeededRandom
from noisewise.training import (
    FunctionalGradients,
    GradientEngine,
    ParameterLayout,
    TensorData,
    local_update,
    make_engine,
    make_model,
)

Loss = Callable[[Tensor, Tensor], Tensor]
RATE = 0.5


def slow_update(
    model: nn.Module,
    data: TensorData,
    plan: LocalPlan,
    rate: float,
    loss: Loss,
    rng: RandomSource,
    margin: float,
) -> Tensor:
    """DP-SGD record by record with autograd, on the model itself; returns the change [p]."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trainable]
    for step in range(plan.steps_per_round):
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in trainable]
        for j in rng.poisson_sample(step, len(data), plan.sample_rate):
            value = loss(model(data.inputs[j : j + 1]), data.targets[j : j + 1])
            gradients = [g.double() for g in torch.autograd.grad(value, trainable)]
            length = sum(float((g * g).sum()) for g in gradients) ** 0.5
            factor = 1.0
            if plan.clip_norm is not None and length > plan.clip_norm * (1 - margin):
                factor = plan.clip_norm * (1 - margin) / length
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor * gradient
        if plan.is_private:
            noise = torch.from_numpy(rng.normal(step, sum(p.numel() for p in trainable))).double()
            offset = 0
            for total in sums:
                part = noise[offset : offset + total.numel()].view(total.shape)
                deviation = plan.clip_norm * plan.noise_multiplier
                grid = 2.0 ** (math.floor(math.log2(deviation)) - 20)
                total.copy_(torch.round((total + deviation * part) / grid) * grid)
                offset += total.numel()
        with torch.no_grad():
            for parameter, total in zip(trainable, sums, strict=True):
                parameter -= (rate / plan.expected_batch * total).to(parameter.dtype)
    change = [(p.detach() - s).reshape(-1) for p, s in zip(trainable, start, strict=True)]
    with torch.no_grad():
        for parameter, value in zip(trainable, start, strict=True):
            parameter.copy_(value)
    return torch.cat(change)


class Mixed(nn.Module):
    """Frozen parameters, a buffer, a norm, tied weights and parameters out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.hidden.weight
        self.out = nn.Linear(8, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.frozen(x.flatten(1))) + self.shift)
        return self.out(torch.tanh(self.again(torch.tanh(self.hidden(x)))))


def mixed() -> nn.Module:
    torch.manual_seed(4)
    return Mixed()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: make_model("softmax", (1, 2, 4), 3, seed=0),
    "mlp": lambda: make_model("mlp", (1, 2, 4), 3, seed=0, hidden=[6, 5]),
    "cnn": lambda: make_model("cnn", (1, 8, 8), 3, seed=0),
    "mixed": mixed,
}


def records(model_name: str, dtype: torch.dtype, n: int = 40) -> TensorData:
    generator = torch.Generator().manual_seed(9)
    shape = (1, 8, 8) if model_name == "cnn" else (1, 2, 4)
    inputs = 2 * torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (n,), generator=generator)
    return TensorData(inputs.to(dtype), targets)


def simulated_update(model: nn.Module, theta: Tensor, data: TensorData, *more: Any, **named: Any):
    """`local_update` with the simulator's engine."""
    loss = more[2]
    engine = make_engine(model, loss, isolate=False)
    return local_update(model, theta, data, *more, **named, engine=engine)


class OwnEngine(GradientEngine):
    """An own engine has one member; the protocol gives `clipped_sum` to those who inherit it."""

    def __init__(self, model: nn.Module, loss: Loss, factor: float = 1.0) -> None:
        self.inner, self.factor = FunctionalGradients(model, loss), factor

    def add_clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None, total: Tensor
    ) -> None:
        total += self.factor * self.inner.clipped_sum(theta, inputs, targets, clip_norm)


def own_update(factor: float) -> Update:
    def update(model: nn.Module, theta: Tensor, data: TensorData, *more: Any, **named: Any):
        return local_update(
            model, theta, data, *more, **named, engine=OwnEngine(model, more[2], factor)
        )

    return update


def check_against_loop(
    update: Update,
    name: str,
    dtype: torch.dtype,
    plan: LocalPlan,
    tolerance: float,
    margin: float = 2.0**-17,
) -> None:
    model = MODELS[name]().to(dtype)
    data = records(name, dtype)
    theta = ParameterLayout.of(model).flatten(model)
    loss = nn.functional.cross_entropy
    expected = slow_update(model, data, plan, RATE, loss, seeded(), margin)
    got = update(model, theta, data, plan, RATE, loss, seeded(), physical_batch=5).delta
    assert got.dtype == dtype
    assert float(expected.norm()) > 1e-3
    error = float((got - expected).norm() / expected.norm())
    assert error < tolerance, f"off by {error:.1e}"


PRIVATE = make_test_plan(n=40, batch=8, steps=6, clip=0.8, z=0.1)
WITHOUT = non_private_plan(ClientSpec("a", 40, 8, 1.0, 1e-5), rounds=1)


@pytest.mark.parametrize("plan", [PRIVATE, WITHOUT], ids=["private", "without privacy"])
@pytest.mark.parametrize("name", MODELS)
def test_against_the_loop(name: str, plan: LocalPlan) -> None:
    check_against_loop(simulated_update, name, torch.float64, plan, 1e-10, margin=0.0)
    check_against_loop(simulated_update, name, torch.float32, plan, 1e-4, margin=0.0)
    # A deployed client rounds norms up by a share of 2^-30 where positions may cancel.
    check_against_loop(local_update, name, torch.float64, plan, 1e-7)
    check_against_loop(local_update, name, torch.float32, plan, 1e-4)


@pytest.mark.parametrize(
    "flaw", ["noise x 0.8", "noise reused", "realised divisor", "rate from data"]
)
def test_the_loop_sees_planted_flaws(flaw: str) -> None:
    check_against_loop(flawed_update(None), "mlp", torch.float64, PRIVATE, 1e-10)
    plan = make_test_plan(n=50, batch=8, steps=6, clip=0.8, z=0.1)  # not the 40 that are there
    with pytest.raises(AssertionError, match="off by"):
        check_against_loop(flawed_update(flaw), "mlp", torch.float64, plan, 1e-10)


def test_the_loop_sees_clipping_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("noisewise.training.gradients", "noisewise.training.engine.fast_gradients"):
        monkeypatch.setattr(f"{home}.clip_factors", lambda norms, clip: torch.ones_like(norms))
    with pytest.raises(AssertionError, match="off by"):
        check_against_loop(local_update, "mlp", torch.float64, PRIVATE, 1e-10)


def test_an_own_engine_needs_one_member() -> None:
    check_against_loop(own_update(1.0), "mlp", torch.float64, PRIVATE, 1e-10, margin=0.0)
    with pytest.raises(AssertionError, match="off by"):
        check_against_loop(own_update(1.01), "mlp", torch.float64, PRIVATE, 1e-10, margin=0.0)
    model, data = MODELS["mlp"](), records("mlp", torch.float32)
    arguments = (ParameterLayout.of(model).flatten(model), data.inputs, data.targets, 0.8)
    engines = (
        kind(model, nn.functional.cross_entropy) for kind in (OwnEngine, FunctionalGradients)
    )
    own, reference = (engine.clipped_sum(*arguments) for engine in engines)
    assert torch.equal(own, reference)


# ---------------------------------------------------------------- what stays as it was


def test_nothing_of_the_callers_changes() -> None:
    model = mixed()
    data = records("mixed", torch.float32)
    theta = ParameterLayout.of(model).flatten(model)
    before = [
        theta.clone(), data.inputs.clone(), data.targets.clone(),
        *(t.clone() for t in model.state_dict().values()),
    ]  # fmt: skip
    torch.manual_seed(77)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    loss = nn.functional.cross_entropy
    first = local_update(model, theta, data, PRIVATE, RATE, loss, seeded()).delta
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    after = [theta, data.inputs, data.targets, *model.state_dict().values()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(78)  # and the global generator plays no part in the result
    assert torch.equal(first, local_update(model, theta, data, PRIVATE, RATE, loss, seeded()).delta)


def test_the_models_own_parameters_are_not_read() -> None:
    model, data = mixed(), records("mixed", torch.float32)
    theta = ParameterLayout.of(model).flatten(model)
    loss = nn.functional.cross_entropy
    first = local_update(model, theta, data, PRIVATE, RATE, loss, seeded()).delta
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(7.0)
    again = local_update(model, theta, data, PRIVATE, RATE, loss, seeded()).delta
    assert torch.equal(first, again)


# ---------------------------------------------------------------- dropout


def dropout_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))


def dropout_delta(model: nn.Module, rng: RandomSource) -> Tensor:
    theta = ParameterLayout.of(model).flatten(model)
    plan = make_test_plan(n=40, batch=20, steps=3, z=1e-9)
    data = records("mlp", torch.float32)
    return local_update(model, theta, data, plan, RATE, nn.functional.cross_entropy, rng).delta


def test_dropout_is_keyed_and_leaves_the_global_generator_alone() -> None:
    model = dropout_model().train()
    state = torch.random.get_rng_state()
    first, again = dropout_delta(model, seeded()), dropout_delta(model, seeded())
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again)

    class OtherMasks(SeededRandom):
        def model_seed(self) -> int:
            return 12345

    assert not torch.equal(first, dropout_delta(model, OtherMasks(0, 1, "a")))
    assert torch.isfinite(dropout_delta(model, SecureRandom())).all()
    model.eval()  # without dropout the seed of the masks plays no part
    assert torch.equal(dropout_delta(model, seeded()), dropout_delta(model, OtherMasks(0, 1, "a")))


def test_every_record_has_its_own_dropout_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1, bias=False))
    engine = FunctionalGradients(model, product_loss)
    torch.manual_seed(0)
    n = 4000
    inputs, targets = torch.ones(n, 6), torch.ones(n, 1)
    total = engine.clipped_sum(torch.zeros(6), inputs, targets, None)
    # The gradient of a record is 2 or 0 by its mask: with one mask for all, 0 or 2 n.
    assert ((total / n - 1).abs() < 0.15).all()


# ---------------------------------------------------------------- bad values


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None, True, "0.1"])
def test_bad_learning_rates_are_named(value: object) -> None:
    model, data = mixed(), records("mixed", torch.float32)
    theta = ParameterLayout.of(model).flatten(model)
    with pytest.raises(InvalidValueError, match="learning_rate"):
        local_update(model, theta, data, PRIVATE, value, product_loss, seeded())


def test_other_bad_values_are_named() -> None:
    model, data = mixed(), records("mixed", torch.float32)
    theta = ParameterLayout.of(model).flatten(model)
    loss = nn.functional.cross_entropy
    for size in (0, -1, 2.5, True):
        with pytest.raises(InvalidValueError, match="physical_batch"):
            local_update(model, theta, data, PRIVATE, RATE, loss, seeded(), physical_batch=size)
    with pytest.raises(InvalidValueError, match="theta"):
        local_update(model, theta[:-1], data, PRIVATE, RATE, loss, seeded())


def test_layout_round_trip() -> None:
    model = mixed()
    layout = ParameterLayout.of(model)
    assert not any(name.startswith(("frozen", "again", "shift")) for name in layout.names)
    theta = torch.arange(float(layout.size))
    layout.load(model, theta)
    assert torch.equal(layout.flatten(model), theta)
    by_name = layout.unflatten(theta)
    assert list(by_name) == list(layout.names)
    assert torch.equal(torch.cat([v.reshape(-1) for v in by_name.values()]), theta)
    assert torch.equal(model.again.weight, model.hidden.weight)


def test_overflow_in_training_is_survived() -> None:
    """A huge learning rate makes a useless update, but no error."""
    model, data = mixed(), records("mixed", torch.float32)
    theta = ParameterLayout.of(model).flatten(model)
    loss = nn.functional.cross_entropy
    delta = local_update(model, theta, data, PRIVATE, 1e30, loss, seeded()).delta
    assert delta.shape == theta.shape
