"""Server steps of one length, whatever the noise, the clients' budgets and hostile updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from noisewise.aggregation import make_method
from noisewise.aggregation.auto_steps import STRENGTH, AutoSteps, auto_local_rate
from noisewise.aggregation.base import UpdateMatrix
from noisewise.aggregation.screening import Screened
from noisewise.errors import InvalidValueError
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.server_step import server_step
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan

SIZE, ROUNDS = 500, 8


def normals(count: int, seed: int = 0) -> Tensor:
    return torch.randn(SIZE, count, generator=torch.Generator().manual_seed(seed))


def play(method: str, updates: Tensor, rounds: int = 1) -> Snapshot:
    """The state after some rounds with the same updates."""
    chosen = replace(make_method(method), auto=AutoSteps(ROUNDS))
    ids = tuple(f"c{column}" for column in range(updates.shape[1]))
    state = Snapshot(0, torch.zeros(SIZE), {}, dict.fromkeys(ids, 0))
    for _ in range(rounds):
        screened = Screened(UpdateMatrix(updates, ids), {})
        state = server_step(chosen, state, screened, lambda ids: {}).snapshot
    return state


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("method", ["NoiseWise", "RobustHDP"])
def test_a_step_has_one_length_whatever_the_scale_of_the_updates(method: str, scale: float) -> None:
    length = float(play(method, scale * normals(5)).theta.norm())
    assert length == pytest.approx(STRENGTH * (SIZE / ROUNDS) ** 0.5, rel=1e-5)


def test_noise_alone_gives_each_parameter_the_strength_after_all_rounds() -> None:
    step, total = AutoSteps(rounds=200), torch.zeros(SIZE)
    for number in range(200):
        total += step.scaled(normals(1, seed=number)[:, 0])
    assert float(total.std()) == pytest.approx(STRENGTH, rel=0.1)


def test_a_hostile_update_cannot_change_the_length() -> None:
    hostile = normals(5)
    hostile[:, 0] *= 1e6
    honest, attacked = play("NoiseWise", normals(5)), play("NoiseWise", hostile)
    assert float(attacked.theta.norm()) == pytest.approx(float(honest.theta.norm()), rel=1e-5)


def test_an_update_of_zeros_leaves_the_model_as_it_was() -> None:
    assert torch.equal(AutoSteps(4).scaled(torch.zeros(3)), torch.zeros(3))


def test_the_released_model_is_the_mean_of_the_last_quarter() -> None:
    models, average = [], torch.zeros(3, dtype=torch.float64)
    step = AutoSteps(rounds=12)
    for number in range(1, 13):
        models.append(torch.full((3,), float(number), dtype=torch.float64))
        average += step.newest_share(number) * (models[-1] - average)
    assert torch.allclose(average, torch.stack(models[-3:]).mean(0))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_run_of_few_rounds_releases_its_last_model(rounds: int) -> None:
    assert AutoSteps(rounds).newest_share(rounds) == 1.0


def test_server_and_average_follow_the_rule_in_a_run() -> None:
    states = [play("RobustHDP", normals(4), rounds) for rounds in range(1, ROUNDS + 1)]
    assert torch.equal(states[5].released, states[5].theta)
    expected = (states[6].theta + states[7].theta) / 2
    assert torch.allclose(states[7].released, expected, atol=1e-6)


def test_the_local_rate_makes_the_steps_of_a_round_one() -> None:
    plans = [
        LocalPlan(0.5, 5, steps, 1.0, 1.2, 10, "pld", PrivacyBudget(1.0, 1e-5))
        for steps in (4, 10, 100)
    ]
    assert auto_local_rate(plans) == 0.1


@pytest.mark.parametrize("fields", [{"rounds": 0}, {"rounds": 5, "strength": -1.0}])
def test_invalid_fields_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match="must be"):
        AutoSteps(**fields)  # type: ignore[arg-type]


def test_a_step_keeps_the_direction() -> None:
    delta = normals(1)[:, 0]
    scaled = AutoSteps(10).scaled(delta).numpy()
    assert np.dot(scaled, delta.numpy()) == pytest.approx(
        np.linalg.norm(scaled) * np.linalg.norm(delta), rel=1e-5
    )
