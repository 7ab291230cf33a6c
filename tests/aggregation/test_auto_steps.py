"""Server steps of one length, whatever the noise, the clients' budgets and hostile updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
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
    step = AutoSteps(rounds=20)
    for number in range(1, 21):
        models.append(torch.full((3,), float(number), dtype=torch.float64))
        average += step.newest_share(number) * (models[-1] - average)
    assert torch.allclose(average, torch.stack(models[-5:]).mean(0))


@pytest.mark.parametrize(
    ("rounds", "averaged"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4), (8, 4), (9, 5), (12, 5), (19, 5), (20, 5), (24, 6)],
)
def test_a_run_of_few_rounds_releases_the_mean_of_half_of_its_models(
    rounds: int, averaged: int
) -> None:
    step, released = AutoSteps(rounds), 0.0
    for number in range(1, rounds + 1):
        released += step.newest_share(number) * (number - released)
    assert released == pytest.approx(np.mean(range(rounds - averaged + 1, rounds + 1)))


class OldSteps(AutoSteps):
    """The rule without a limit for few rounds."""

    def scaled(self, delta: Tensor) -> Tensor:
        """Steps of the length k sqrt(p / T)."""
        length = self.strength * (len(delta) / self.rounds) ** 0.5
        return delta * (length / torch.linalg.vector_norm(delta))

    def newest_share(self, round_number: int) -> float:
        """The average of the last quarter."""
        return 1.0 / max(1, round_number - (self.rounds - self.rounds // 4))


def learn(step: AutoSteps) -> float:
    """Accuracy of a noisy softmax head on digits, minus that of the best of five fixed rates.

    The noise of a round grows with the root of the number of rounds, as for a fixed budget.
    """
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32)
    inputs, targets = inputs / inputs.norm(dim=1, keepdim=True), torch.tensor(labels)
    ones = torch.nn.functional.one_hot(targets, 10).float()
    generator = torch.Generator().manual_seed(step.rounds)

    def accuracy(move: Callable[[Tensor], Tensor], share: Callable[[int], float]) -> float:
        theta = torch.zeros(10, 64)
        released = theta
        for number, noise in enumerate(noises, start=1):
            wrong = ones[train] - torch.softmax(inputs[train] @ theta.T, dim=1)
            update = wrong.T @ inputs[train] / len(train) + 1e-3 * step.rounds**0.5 * noise
            theta = theta + move(update.flatten()).view(10, 64)
            released = released + share(number) * (theta - released)
        correct = (inputs[test] @ released.T).argmax(1) == targets[test]
        return 100 * float(correct.float().mean())

    differences = []
    for _ in range(3):
        train, test = torch.randperm(len(inputs), generator=generator).split([1200, 597])
        noises = torch.randn(step.rounds, 10, 64, generator=generator)
        rates = (20.0, 50.0, 125.0, 300.0, 750.0)
        fixed = [accuracy(lambda update, rate=rate: rate * update, lambda _: 1.0) for rate in rates]
        differences.append(accuracy(step.scaled, step.newest_share) - max(fixed))
    return float(np.mean(differences))


@pytest.mark.parametrize("rounds", range(1, 11))
def test_the_rule_does_not_collapse_with_few_rounds(rounds: int) -> None:
    assert learn(AutoSteps(rounds)) > -12.0


@pytest.mark.parametrize("rounds", range(2, 8))
def test_steps_without_a_limit_do(rounds: int) -> None:
    assert learn(OldSteps(rounds)) < -12.0


def length(step: AutoSteps, parameters: int) -> float:
    """The length of a step for a head with so many parameters."""
    return float(torch.linalg.vector_norm(step.scaled(torch.ones(parameters))))


@pytest.mark.parametrize(("rounds", "longest"), [(2, 6), (8, 18), (12, 26), (16, 34), (19, 40)])
def test_steps_of_a_large_head_have_a_limit(rounds: int, longest: float) -> None:
    assert length(AutoSteps(rounds), 39_700) == pytest.approx(longest, rel=1e-4)
    assert length(OldSteps(rounds), 39_700) > 1.2 * longest


@pytest.mark.parametrize("rounds", [20, 23, 24, 40, 60])
def test_steps_without_a_limit_are_the_same_in_longer_runs(rounds: int) -> None:
    delta = normals(1)[:3_250, 0]
    new, old = AutoSteps(rounds), OldSteps(rounds)
    assert torch.allclose(new.scaled(delta), old.scaled(delta), rtol=1e-5)
    shares = [(new.newest_share(n), old.newest_share(n)) for n in range(1, rounds + 1)]
    assert all(one == two for one, two in shares)


def averaged(rounds: int) -> int:
    """The number of models that are averaged."""
    step = AutoSteps(rounds)
    return sum(step.newest_share(number) < 1 for number in range(1, rounds + 1)) + 1


@pytest.mark.parametrize("parameters", [30, 3_250, 39_700, 1_555_300])
def test_the_rule_has_no_jump(parameters: int) -> None:
    for rounds in range(1, 100):
        shorter, longer = AutoSteps(rounds), AutoSteps(rounds + 1)
        ratio = length(longer, parameters) / length(shorter, parameters)
        assert 0.7 < ratio < 1.51
        assert averaged(rounds + 1) - averaged(rounds) in (0, 1)


def test_server_and_average_follow_the_rule_in_a_run() -> None:
    states = [play("RobustHDP", normals(4), rounds) for rounds in range(1, ROUNDS + 1)]
    assert torch.equal(states[4].released, states[4].theta)
    expected = torch.stack([state.theta for state in states[4:]]).mean(0)
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
