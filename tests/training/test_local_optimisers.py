"""Local momentum and Adam compared with torch's, and their noise with the closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from noisewise.aggregation.noise_floor import plan_noise
from noisewise.errors import InvalidValueError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training.heads import HeadRecords, head_of, head_updates
from noisewise.training.local import TensorData, local_update
from noisewise.training.local_optimisers import SGD, LocalOptimiser
from noisewise.training.parameters import ParameterLayout

LOSS = nn.functional.cross_entropy
MOMENTUM, ADAM = LocalOptimiser("momentum", beta1=0.8), LocalOptimiser("adam", beta2=0.9, tau=1e-6)


def data(n: int = 12) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    return TensorData(torch.randn(n, 5, generator=generator), torch.arange(n) % 3)


@pytest.mark.parametrize("optimiser", [SGD, MOMENTUM, ADAM])
def test_without_noise_and_with_all_records_it_is_the_optimiser_of_torch(
    optimiser: LocalOptimiser,
) -> None:
    torch.manual_seed(0)
    model, records, rate, steps = nn.Linear(5, 3), data(), 0.05, 6
    theta = ParameterLayout.of(model).flatten(model)
    plan = LocalPlan(1.0, len(records), steps, None, 0.0, 1, "pld", None)
    rng = SeededRandom(0, 1, "a")
    delta = local_update(model, theta, records, plan, rate, LOSS, rng, optimiser=optimiser).delta
    reference: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), rate),
        "momentum": lambda: torch.optim.SGD(model.parameters(), rate, momentum=0.8),
        "adam": lambda: torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.9), eps=1e-6),
    }[optimiser.name]()
    for _ in range(steps):
        reference.zero_grad()
        LOSS(model(records.inputs), records.targets).backward()
        reference.step()
    expected = ParameterLayout.of(model).flatten(model) - theta
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)


def noise_of(optimiser: LocalOptimiser, plan: LocalPlan, size: int) -> Tensor:
    """An update whose gradients are 0: noise alone."""
    model = nn.Linear(size, 1, bias=False)
    records = TensorData(torch.zeros(4, size), torch.zeros(4, 1))
    return local_update(
        model, torch.zeros(size), records, plan, 0.3, nn.functional.mse_loss,
        SeededRandom(3, 1, "a"), optimiser=optimiser,
    ).delta  # fmt: skip


def test_the_noise_energy_of_momentum_is_the_closed_form() -> None:
    plan = LocalPlan(0.5, 2, 7, 0.5, 1.3, 10, "pld", PrivacyBudget(1.0, 1e-5))
    size = 30_000
    measured = float(noise_of(MOMENTUM, plan, size).double().square().sum())
    expected = plan_noise(plan, size, 0.3, noise_steps=MOMENTUM.noise_steps(7))
    assert measured == pytest.approx(expected, rel=0.04)
    # Power: the formula of SGD, and that of an infinite number of steps, are far off.
    assert abs(measured / plan_noise(plan, size, 0.3) - 1) > 1
    assert abs(measured / (expected * 7 / sum(1 / 0.2**2 for _ in range(7))) - 1) > 0.04
    plain = float(noise_of(SGD, plan, size).double().square().sum())
    assert plain == pytest.approx(plan_noise(plan, size, 0.3), rel=0.04)


def test_adam_has_no_closed_form() -> None:
    assert ADAM.noise_steps(3) is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"name": "rmsprop"}, "name"), ({"name": "adam", "beta1": 1.0}, "beta1"),
     ({"name": "adam", "beta2": -0.1}, "beta2"), ({"name": "adam", "tau": 0.0}, "tau")],
)  # fmt: skip
def test_invalid_values_are_named(fields: dict[str, float], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        LocalOptimiser(**fields)  # type: ignore[arg-type]


def test_heads_agree_with_the_engine_under_automatic_clipping() -> None:
    torch.manual_seed(0)
    model, records = nn.Linear(5, 3), data(40)
    head = head_of(model, LOSS)
    assert head is not None
    prepared = HeadRecords.of(head, records)
    assert prepared is not None
    theta = ParameterLayout.of(model).flatten(model)
    budget = PrivacyBudget(1.0, 1e-5)
    plan, plain = (
        LocalPlan(0.5, 20, 3, 0.5, 0.3, 10, "pld", budget, rule) for rule in ("normalise", "norm")
    )
    (fast,) = head_updates(head, [theta], prepared, [plan], [0.3], SeededRandom(1, 1, "a"))
    slow = local_update(model, theta, records, plan, 0.3, LOSS, SeededRandom(1, 1, "a")).delta
    assert float((fast - slow).norm()) <= 1e-5 * float(slow.norm())
    other = local_update(model, theta, records, plain, 0.3, LOSS, SeededRandom(1, 1, "a")).delta
    assert float((slow - other).norm()) > 1e-3 * float(slow.norm())  # power: the rule matters
    assert np.isfinite(fast.numpy()).all()
