"""Any aggregator with `guard` and `with_guard` can have a guard, built-in or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_parts
import pytest
import torch

from noisewise.aggregation import (
    METHODS,
    Aggregation,
    Guard,
    Guardable,
    Method,
    ServerView,
    State,
    UpdateMatrix,
    make_method,
)
from noisewise.errors import InvalidValueError
from noisewise.experiments.attack_study import attack_methods, attack_runs
from noisewise.experiments.config import CompareConfig, ExperimentConfig, MethodConfig, load_config
from noisewise.experiments.prepare import prepare_seed
from noisewise.experiments.runner import run
from noisewise.federation.results import RunResult
from noisewise.federation.server_step import with_unforeseen_samples
from noisewise.flower.new_app import AppSettings

ROOT = Path(__file__).parents[2]
SIZE, CLIENTS, FLOOR = 4000, 8, 1.0
OWN = "own_parts:ByNoise"


class IgnoresItsGuard(own_parts.ByNoise):
    """Planted flaw: has a guard and does not use it."""

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        return own_parts.ByNoise().aggregate(view, state)


def methods() -> dict[str, Callable[[], Method]]:
    """Every method of the table that can be guarded, and one with our own aggregator."""
    known = {name: make_method(name, {"server_steps": 1.0}) for name in METHODS}
    made = {name: method for name, method in known.items() if method.can_be_guarded}
    return {name: (lambda method=method: method) for name, method in made.items()} | {
        OWN: lambda: make_method(OWN)
    }


EVERY = pytest.mark.parametrize("name", methods())


def view(quiet: int = 2) -> ServerView:
    """Updates with noise between F and 10 F, and one without noise."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(SIZE, CLIENTS)) * np.sqrt(np.geomspace(1, 10, CLIENTS) / SIZE)
    values[:, quiet] = 1e-6
    ids = tuple(f"c{k}" for k in range(CLIENTS))
    return ServerView(UpdateMatrix(torch.from_numpy(values), ids), 1)


def check_guarded(method: Method) -> None:
    """The contract of `Guardable`."""
    before = method.guard
    guarded = method.guarded(FLOOR, 1)
    assert method.guard is before, "changes the aggregator that it copies"
    assert guarded.guard == Guard(FLOOR, 1, clip=method.normalise)
    answer = guarded.aggregator.aggregate(view(quiet=2), {})
    assert answer.weights[2] == 0, "a quiet client gets weight"
    assert set(answer.refused) == {"c2"}
    assert answer.weights.sum() == pytest.approx(1)
    assert answer.weights.max() <= 0.4 + 1e-9
    assert with_unforeseen_samples(guarded).guard == guarded.guard
    again = guarded.guarded(2 * FLOOR, 2)
    assert again.guard == Guard(2 * FLOOR, 2, clip=method.normalise)


@EVERY
def test_everything_that_can_be_guarded_refuses_a_quiet_client(name: str) -> None:
    method = methods()[name]()
    assert isinstance(method.aggregator, Guardable)
    assert method.aggregator.aggregate(view(), {}).weights[2] > 0.99  # the attack works without one
    check_guarded(method)


class ChangesItself(own_parts.ByNoise):
    """Planted flaw: no copy."""

    def with_guard(self, guard: Guard) -> ChangesItself:
        self.guard = guard
        return self


@pytest.mark.parametrize("flaw", [IgnoresItsGuard, ChangesItself])
def test_the_contract_finds_planted_flaws(flaw: type[own_parts.ByNoise]) -> None:
    with pytest.raises(AssertionError):
        check_guarded(Method("own", flaw()))


# ------------------------------------------------------------ in a simulated run


def demo(**changes: Any) -> ExperimentConfig:
    return load_config(
        ROOT / "configs" / "demo.toml", {"training.rounds": 2, "data.limit": 800, **changes}
    )


def attacked_run(name: str, tolerated: int) -> RunResult:
    """Two rounds of the demo in which client-00 sends a tiny constant."""
    hostile = [{"kind": "constant", "clients": ["client-00"]}]
    config = demo(attacks=hostile, **{"policy.tolerated_attackers": tolerated})
    return run(config, MethodConfig(name=name))


def test_an_own_aggregator_behind_a_guard_gives_a_quiet_attacker_no_weight() -> None:
    guarded = attacked_run(OWN, 1)
    for record in guarded.rounds:
        assert record.weights["client-00"] == 0
        assert "too little noise" in record.dropped["client-00"]
        assert sum(record.weights.values()) == pytest.approx(1)
    bare = attacked_run(OWN, 0)
    assert bare.rounds[0].weights["client-00"] > 0.99
    flawed = attacked_run(f"{__name__}:IgnoresItsGuard", 1)
    assert flawed.rounds[0].weights["client-00"] > 0.99


def test_the_attack_study_runs_every_guardable_method_with_and_without_a_guard() -> None:
    listed = [MethodConfig(name=name) for name in (OWN, "own_parts:Median", "RobustHDP", "PFA")]
    setup = prepare_seed(demo(), 0)
    runs = attack_runs(setup, ["client-00"], methods=listed, attacks=["zero"])
    labels = list(dict.fromkeys(run.label for run in runs))
    assert labels == [
        OWN, f"{OWN} + guard", "own_parts:Median", "RobustHDP", "RobustHDP + guard", "PFA",
    ]  # fmt: skip
    unlisted = demo().model_copy(update={"compare": CompareConfig()})
    names = [method.name for method in attack_methods(unlisted)]
    assert set(METHODS) - set(names) == {"Alone", "FedAvg", "Oracle"}


def test_an_app_can_have_an_own_method_that_can_be_guarded() -> None:
    assert AppSettings(method=OWN).floor() > 0
    with pytest.raises(InvalidValueError, match=r"own_parts:Median.*Median has no guard"):
        AppSettings(method="own_parts:Median").floor()


# ------------------------------------------------------------ what cannot be guarded


class OnlyTheGuard:
    """Planted flaw: `with_guard` was forgotten."""

    needs = frozenset()
    guard = None
    aggregate = own_parts.ByNoise.aggregate


class OnlyWithGuard:
    """Planted flaw: `guard` was forgotten."""

    needs = frozenset()
    aggregate = own_parts.ByNoise.aggregate

    def with_guard(self, guard: Guard) -> OnlyWithGuard:
        return self


class ForgetsTheGuard(own_parts.ByNoise):
    """Planted flaw: the copy has no guard."""

    def with_guard(self, guard: Guard) -> ForgetsTheGuard:
        return ForgetsTheGuard()


class ReturnsNothing(own_parts.ByNoise):
    """Planted flaw: `return` was forgotten."""

    def with_guard(self, guard: Guard) -> Any:
        self.guard = guard


class Narrower(own_parts.ByNoise):
    """Planted flaw of a subclass: `with_guard` and `reseeded` make an object of the parent."""

    def with_guard(self, guard: Guard) -> Any:
        return own_parts.ByNoise(guard)

    def reseeded(self, seed: int | None) -> Any:
        return own_parts.ByNoise(self.guard)


class LosesItWhenReseeded(own_parts.ByNoise):
    """Planted flaw: the reseeded copy has no guard."""

    def reseeded(self, seed: int | None) -> LosesItWhenReseeded:
        return LosesItWhenReseeded()


def test_a_method_that_cannot_be_guarded_is_named_with_what_is_missing() -> None:
    words = r"method.name = 'WeiAvg'.*WeiAvg has no guard and no with_guard.*own_aggregators.md"
    with pytest.raises(InvalidValueError, match=words):
        make_method("WeiAvg").guarded(FLOOR, 1)
    plain = Method("mine", own_parts.Median())
    assert (plain.can_be_guarded, plain.guard) == (False, None)
    with pytest.raises(InvalidValueError, match=r"'mine'.*Median has no guard and no with_guard"):
        plain.guarded(FLOOR, 1)


def test_half_of_the_capability_is_refused_at_once() -> None:
    with pytest.raises(InvalidValueError, match=r"'mine'.*OnlyTheGuard has no with_guard\."):
        Method("mine", OnlyTheGuard())
    with pytest.raises(InvalidValueError, match=r"'mine'.*OnlyWithGuard has no guard\."):
        Method("mine", OnlyWithGuard())


def test_a_copy_of_another_class_is_refused() -> None:
    """It would aggregate in another way than the method that was named."""
    with pytest.raises(InvalidValueError, match=r"must return a copy.*, not a ByNoise"):
        Method("mine", Narrower()).guarded(FLOOR, 1)
    with pytest.raises(
        InvalidValueError, match=r"reseeded\(seed\) must return a copy, not a ByNoise"
    ):
        with_unforeseen_samples(Method("mine", Narrower()))


@pytest.mark.parametrize("flaw", [ForgetsTheGuard, ReturnsNothing])
def test_a_copy_without_the_guard_is_refused(flaw: type[own_parts.ByNoise]) -> None:
    with pytest.raises(InvalidValueError, match=r"'mine'.*with_guard\(guard\) must return a copy"):
        Method("mine", flaw()).guarded(FLOOR, 1)


def test_a_deployed_server_refuses_an_aggregator_that_loses_its_guard() -> None:
    with_unforeseen_samples(Method("mine", LosesItWhenReseeded()))
    guarded = Method("mine", LosesItWhenReseeded()).guarded(FLOOR, 1)
    with pytest.raises(InvalidValueError, match=r"'mine'.*reseeded\(seed\).*same `guard`"):
        with_unforeseen_samples(guarded)
