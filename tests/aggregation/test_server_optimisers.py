"""Server optimisers compared with loops over single numbers; factors of schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from noisewise.aggregation.auto_steps import AutoSteps
from noisewise.aggregation.methods import make_method
from noisewise.aggregation.schedules import SCHEDULES, Schedule
from noisewise.aggregation.server_optimisers import SERVER_OPTIMISERS, ServerOptimiser
from noisewise.errors import InvalidValueError

DELTAS = np.random.default_rng(0).standard_normal((5, 4)) * [1e-6, 0.01, 1.0, 100.0]


def by_hand(optimiser: ServerOptimiser, deltas: list[float]) -> list[float]:
    """One parameter, in plain Python (Reddi et al. 2021, Algorithm 2)."""
    m, v, changes = 0.0, optimiser.tau**2, []
    for d in deltas:
        if optimiser.name == "momentum":
            m = optimiser.beta1 * m + d
            changes.append(optimiser.rate * m)
            continue
        m = optimiser.beta1 * m + (1 - optimiser.beta1) * d
        if optimiser.name == "fedadam":
            v = optimiser.beta2 * v + (1 - optimiser.beta2) * d * d
        else:
            sign = 1 if v > d * d else -1 if v < d * d else 0
            v = v - (1 - optimiser.beta2) * d * d * sign
        changes.append(optimiser.rate * m / (math.sqrt(v) + optimiser.tau))
    return changes


@pytest.mark.parametrize("name", SERVER_OPTIMISERS)
def test_steps_are_those_of_the_formula(name: str) -> None:
    optimiser, state = ServerOptimiser(name, rate=0.7, beta1=0.8, beta2=0.9), {}
    changes = []
    for delta in DELTAS:
        change, state = optimiser.step(delta, state)
        changes.append(change)
    expected = np.array([by_hand(optimiser, list(column)) for column in DELTAS.T]).T
    np.testing.assert_allclose(np.array(changes), expected, rtol=1e-12)


def test_momentum_is_that_of_torch() -> None:
    optimiser, state = ServerOptimiser("momentum", rate=0.5, beta1=0.9), {}
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    torchs, ours = torch.optim.SGD([theta], 0.5, momentum=0.9), np.zeros(4)
    for delta in DELTAS:
        theta.grad = torch.from_numpy(-delta)
        torchs.step()
        change, state = optimiser.step(delta, state)
        ours = ours + change
    np.testing.assert_allclose(ours, theta.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("field", ["name", "rate", "beta1", "beta2", "tau"])
def test_invalid_values_are_named(field: str) -> None:
    values = {"name": "fedadam", field: "sgd" if field == "name" else -1.0}
    with pytest.raises(InvalidValueError, match=field):
        ServerOptimiser(**values)  # type: ignore[arg-type]


def test_it_cannot_be_combined_with_automatic_steps() -> None:
    from dataclasses import replace

    method = replace(make_method("DPFedAvg"), auto=AutoSteps(10))
    with pytest.raises(InvalidValueError, match="server_optimiser"):
        replace(method, optimiser=ServerOptimiser("momentum"))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_factors_are_above_0_and_at_most_1(name: str, warmup: int) -> None:
    factors = Schedule(name, rounds=20, warmup_rounds=warmup, decay=1e-3).factors()
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[warmup] == 1.0
    assert all(a >= b for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))


def test_shapes() -> None:
    cosine = Schedule("cosine", rounds=10, final=0.1)
    assert cosine.factor(6) == pytest.approx(0.55)  # half of the way
    assert cosine.factor(11) == cosine.factor(10)
    assert Schedule("step", rounds=6, every=2).factors() == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"name": "zigzag"}, "name"), ({"warmup_rounds": 10}, "warmup_rounds"),
     ({"final": 2.0}, "final"), ({"every": 0}, "every"), ({"decay": 0.0}, "decay")],
)  # fmt: skip
def test_invalid_schedules_are_named(fields: dict[str, float], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        Schedule(**{"name": "linear", "rounds": 10, **fields})  # type: ignore[arg-type]
