"""Runs in lock step give the same results as separate runs, and none waits forever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noisewise.experiments.config import ExperimentConfig, MethodConfig, load_config
from noisewise.experiments.runner import run
from noisewise.federation.lockstep import MakeExecutor, in_lock_step
from noisewise.federation.results import RunResult
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training.heads import HeadRecords, head_of, head_updates
from noisewise.training.local import TensorData, local_update
from noisewise.training.models import softmax

ROOT = Path(__file__).parents[2]
Wanted = tuple[MethodConfig, int]


def small_config(**more: Any) -> ExperimentConfig:
    fields = {"training.rounds": 3, "data.clients": 4, "population.epsilon": [1.0, 4.0, 9.0, 9.0]}
    return load_config(ROOT / "configs" / "demo.toml", fields | more)


def side_by_side(
    wanted: list[tuple[ExperimentConfig, Wanted]], folder: Path | None = None
) -> list[RunResult | BaseException]:
    def play(number: int) -> Callable[[MakeExecutor], RunResult | BaseException]:
        config, (method, seed) = wanted[number]
        where = None if folder is None else folder / str(number)

        def run_it(make: MakeExecutor) -> RunResult | BaseException:
            try:
                return run(config, method, seed, folder=where, executor=make)
            except Exception as error:
                return error

        return run_it

    return in_lock_step([play(number) for number in range(len(wanted))])


def job(name: str, rate: float = 0.01, seed: int = 0, **options: Any) -> Wanted:
    return MethodConfig(name=name, learning_rate=rate, options=options), seed


def agree(one: RunResult | BaseException, other: RunResult) -> None:
    assert isinstance(one, RunResult)
    assert one.status == other.status
    assert [r.round for r in one.rounds] == [r.round for r in other.rounds]
    for mine, theirs in zip(one.rounds, other.rounds, strict=True):
        assert mine.epsilon_spent == theirs.epsilon_spent
        assert mine.mean_train_loss == pytest.approx(theirs.mean_train_loss, rel=1e-5)
        for client, weight in theirs.weights.items():
            assert mine.weights[client] == pytest.approx(weight, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_updates_agree_with_runs_alone(clip_norm: float) -> None:
    generator = torch.Generator().manual_seed(3)
    data = TensorData(
        torch.randn(50, 1, 4, 5, generator=generator),
        torch.randint(0, 7, (50,), generator=generator),
    )
    model = softmax((1, 4, 5), 7)
    size = sum(p.numel() for p in model.parameters())
    thetas = [torch.randn(size, generator=generator) for _ in range(3)]
    plans = [
        LocalPlan(
            rounds=1, steps_per_round=9, sample_rate=0.05, noise_multiplier=z, clip_norm=clip_norm,
            expected_batch=3, budget=PrivacyBudget(1.0, 1e-5), accountant="rdp",
        )
        for z in (0.2, 0.7, 2.0)
    ]  # fmt: skip
    rates = [0.3, 0.1, 0.02]
    loss = torch.nn.functional.cross_entropy
    head = head_of(model, loss)
    assert head is not None
    records = HeadRecords.of(head, data)
    assert records is not None
    together = head_updates(head, thetas, records, plans, rates, SeededRandom(1, 2, "a"))
    for theta, plan, rate, update in zip(thetas, plans, rates, together, strict=True):
        alone = local_update(model, theta, data, plan, rate, loss, SeededRandom(1, 2, "a")).delta
        # local_update clips at c (1 - 2^-17)
        assert torch.linalg.norm(update - alone) <= 1e-5 * torch.linalg.norm(alone)


def test_whole_runs_agree() -> None:
    config = small_config()
    wanted = [
        job("NoiseWise"), job("RobustHDP"), job("WeiAvg", 0.03), job("MinEpsilon"), job("FedAvg"),
        job("WeiAvg", seed=5), job("BudgetAvg", 0.1), job("NoiseWise", average_rounds=2),
    ]  # fmt: skip
    found = side_by_side([(config, one) for one in wanted])
    for result, one in zip(found, wanted, strict=True):
        agree(result, run(config, *one))


def test_other_models_attacks_and_lengths_wait_at_the_same_barrier() -> None:
    """What cannot be shared is computed alone; long runs continue after short ones have ended."""
    wanted = [
        (small_config(), job("WeiAvg")),
        (small_config(**{"training.rounds": 5}), job("WeiAvg")),
        (small_config(**{"model.name": "mlp"}), job("DPFedAvg")),
        (
            small_config(attacks=[{"kind": "sign_flip", "clients": ["client-00"]}]),
            job("DPFedAvg"),
        ),
    ]
    for result, (config, one) in zip(side_by_side(wanted), wanted, strict=True):
        agree(result, run(config, *one))


def test_a_run_that_fails_or_is_there_already_keeps_nobody_waiting(tmp_path: Path) -> None:
    config = small_config()
    bad = small_config(**{"training.metric": "json:dumps"})  # fails when it is called
    wanted = [(config, job("WeiAvg")), (bad, job("WeiAvg")), (config, job("DPFedAvg"))]
    first, failed, third = side_by_side(wanted, tmp_path)
    assert isinstance(failed, Exception)
    again = side_by_side(wanted, tmp_path)
    for old, new in ((first, again[0]), (third, again[2])):
        assert isinstance(old, RunResult)
        agree(new, old)


def test_a_run_that_diverges_leaves_the_others_alone() -> None:
    config = small_config()
    wild, sound = job("FedAvg", 1e30), job("WeiAvg")
    found = side_by_side([(config, wild), (config, sound)])
    agree(found[1], run(config, *sound))
    assert isinstance(found[0], RunResult)
    assert found[0].status == run(config, *wild).status


def test_an_error_is_raised_when_all_have_ended() -> None:
    done = []

    def sound(make: MakeExecutor) -> None:
        run(small_config(), *job("WeiAvg"), executor=make)
        done.append("sound")

    def bad(make: MakeExecutor) -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        in_lock_step([bad, sound])
    assert done == ["sound"]
    assert in_lock_step([]) == []
