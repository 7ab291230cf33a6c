"""A deployed server reads no coordinates that clients can predict, or rejects the estimator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from noisewise.aggregation import Aggregation, ServerView, UpdateMatrix, weighted_sum
from noisewise.aggregation.base import Aggregator, Disclosure, State
from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.errors import InvalidValueError
from noisewise.federation.server_step import with_unforeseen_samples
from noisewise.noise import (
    ESTIMATORS,
    PCP,
    Factor,
    Matrix,
    NoiseEstimate,
    NoiseTracker,
    Norm,
    ReadsAllCoordinates,
    Reseedable,
    make_estimator,
)

ROWS, SAMPLE, CLIENTS = 20_000, 1_000, 4


def updates(quiet: int | None = None) -> torch.Tensor:
    """[p, n] noise; the client ``quiet`` has none in the coordinates of a sample with seed 0."""
    values = np.random.default_rng(1).normal(size=(ROWS, CLIENTS)).astype(np.float32)
    if quiet is not None:
        from noisewise.noise.sampling import sample_index

        values[sample_index(ROWS, SAMPLE, 0), quiet] *= 1e-3
    return torch.from_numpy(values)


class PlainSampler:
    """Your own estimator, not a dataclass, that draws rows with a seed."""

    name = "plain"

    def __init__(self, seed: int | None = 0) -> None:
        self.seed = seed

    def reseeded(self, seed: int | None) -> PlainSampler:
        return PlainSampler(seed)

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        return Norm(SAMPLE, self.seed).estimate(updates)


@dataclass(frozen=True)
class OwnSampler:
    """The same as a dataclass."""

    seed: int | None = 0

    @property
    def name(self) -> str:
        return "own"

    def reseeded(self, seed: int | None) -> OwnSampler:
        return replace(self, seed=seed)

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        return Norm(SAMPLE, self.seed).estimate(updates)


class Silent:
    """Your own estimator that does not declare what it reads."""

    name = "silent"

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        return Norm(SAMPLE, 0).estimate(updates)


@dataclass(frozen=True)
class SilentDataclass(Silent):
    """The same as a dataclass; its field ``seed`` must not be changed by reflection."""

    seed: int | None = 0


class Denies(Silent):
    """Declares that it does not read all coordinates."""

    reads_all_coordinates = False


class Complete(Silent):
    """Your own estimator that reads all coordinates and declares it."""

    reads_all_coordinates = True

    def estimate(self, updates: Matrix) -> NoiseEstimate:
        return Norm(None).estimate(updates)


@dataclass(frozen=True)
class OwnAggregator:
    """Your own aggregator with an estimator that is smoothed over rounds."""

    tracker: NoiseTracker = field(default_factory=lambda: NoiseTracker(OwnSampler()))

    @property
    def needs(self) -> frozenset[Disclosure]:
        return frozenset()

    def reseeded(self, seed: int | None) -> OwnAggregator:
        return OwnAggregator(self.tracker.reseeded(seed))

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        noise, following = self.tracker.estimate(view.updates.values, view.updates.ids, state)
        weights = 1 / noise.variance
        weights /= weights.sum()
        return Aggregation(weighted_sum(view.updates.values, weights), weights, noise, following)


class SilentAggregator:
    """Your own aggregator that does not declare what it reads."""

    needs: frozenset[Disclosure] = frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        return RobustHDP().aggregate(view, state)


SAMPLING: dict[str, Aggregator] = {
    "norm": RobustHDP(Norm(SAMPLE)),
    "pcp": RobustHDP(PCP(SAMPLE)),
    "factor": NoiseWise(Factor(SAMPLE)),
    "smoothed": RobustHDP(Norm(SAMPLE), smooth=5),
    "every second round": RobustHDP(Norm(SAMPLE), estimate=2),
    "plain class": RobustHDP(PlainSampler()),
    "own dataclass": NoiseWise(OwnSampler()),
    "nested in an own aggregator": OwnAggregator(),
    "plain class, nested": OwnAggregator(NoiseTracker(PlainSampler(), memory=3)),
}


def quiet_weight(aggregator: Aggregator) -> float:
    """Return the weight of a client without noise in the coordinates of a sample with seed 0."""
    ids = tuple(str(k) for k in range(CLIENTS))
    view = ServerView(UpdateMatrix(updates(quiet=0), ids), 1)
    return float(aggregator.aggregate(view, {}).weights[0])


@pytest.mark.parametrize("name", SAMPLING)
def test_a_client_that_foresees_the_sample_wins_the_round_unless_the_server_draws_it_anew(
    name: str,
) -> None:
    method = Method(name, SAMPLING[name])
    assert quiet_weight(method.aggregator) > 0.9  # the attack works if the seed is known
    deployed = with_unforeseen_samples(method)
    assert quiet_weight(deployed.aggregator) < 0.5
    assert quiet_weight(method.aggregator) > 0.9  # the caller's object is unchanged


@pytest.mark.parametrize(
    "estimator", [Silent(), SilentDataclass(), Denies()], ids=lambda part: type(part).__name__
)
@pytest.mark.parametrize("around", [RobustHDP, NoiseWise], ids=lambda kind: kind.__name__)
def test_an_estimator_that_declares_nothing_is_refused_with_the_remedy(
    estimator: Any, around: Any
) -> None:
    for aggregator in (around(estimator), around(estimator, smooth=3)):
        with pytest.raises(InvalidValueError) as caught:
            with_unforeseen_samples(Method("own", aggregator))
        assert caught.value.field == "estimator"
        assert type(estimator).__name__ in str(caught.value)
        assert "reads_all_coordinates = True" in str(caught.value)
        assert "reseeded(seed)" in str(caught.value)


def test_an_aggregator_that_declares_nothing_is_refused_too() -> None:
    with pytest.raises(InvalidValueError, match=r"method = 'SilentAggregator'.*reseeded"):
        with_unforeseen_samples(Method("own", SilentAggregator()))
    with pytest.raises(InvalidValueError, match="estimator = 'Silent'"):
        with_unforeseen_samples(Method("own", OwnAggregator(NoiseTracker(Silent()))))


def test_a_part_that_reads_everything_is_taken_as_it_is() -> None:
    estimator = Complete()
    deployed = with_unforeseen_samples(Method("own", RobustHDP(estimator)))
    assert deployed.aggregator.estimator is estimator  # type: ignore[attr-defined]


def test_sub_matrices_are_refused_since_everybody_knows_their_rows() -> None:
    method = make_method("RobustHDP", {"estimator": PCP(submatrix_rows=100, submatrices=1)})
    with pytest.raises(InvalidValueError, match=r"submatrix_rows = 100.*set sample"):
        with_unforeseen_samples(method)


def test_every_method_and_estimator_of_the_package_can_be_deployed_in_this_respect() -> None:
    for name in METHODS:
        options = {"server_steps": 1.0} if name == "NoiseWise" else {}
        made = make_method(name, options)
        assert isinstance(made.aggregator, Reseedable | ReadsAllCoordinates), name
        with_unforeseen_samples(made)
    for name in ESTIMATORS:
        estimator = make_estimator(name)
        assert isinstance(estimator, Reseedable), name
        assert estimator.reseeded(7).seed == 7  # type: ignore[attr-defined]
        assert estimator.reseeded(None).seed is None  # type: ignore[attr-defined]
