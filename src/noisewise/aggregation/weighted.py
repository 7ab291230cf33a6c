"""Averages with weights that the clients' own words decide: WeiAvg, DPFedAvg and FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, weighted_sum
from noisewise.aggregation.weights import proportional_weights

__all__ = ["BudgetWeighted", "ExampleWeighted", "WeiAvg"]


def _average(view: ServerView, told: Disclosure, state: State) -> Aggregation:
    weights = proportional_weights(view.told(told))
    return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)


@dataclass(frozen=True)
class WeiAvg:
    """w_i ~ epsilon_i (Liu et al., VLDB 2021; the paper's algorithm WeiAvg).

    Believes whatever epsilon a client reports.
    """

    reads_all_coordinates: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' epsilons."""
        return frozenset({Disclosure.EPSILON})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        return _average(view, Disclosure.EPSILON, state)


@dataclass(frozen=True)
class ExampleWeighted:
    """w_i ~ N_i (McMahan et al., 2017): the server of DPFedAvg, minimum epsilon and FedAvg."""

    reads_all_coordinates: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' dataset sizes."""
        return frozenset({Disclosure.N_EXAMPLES})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        return _average(view, Disclosure.N_EXAMPLES, state)


@dataclass(frozen=True)
class BudgetWeighted:
    """w_i ~ (N_i epsilon_i)^2: about the information that a step-normalised update carries.

    At equal rounds and delta the noise of an average gradient over all a client's records is about
    1 / (N epsilon)^2 whatever its batch size, so these weights come close to the optimum for
    updates that are divided by their steps. They need both numbers disclosed, and believe them.
    """

    reads_all_coordinates: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' epsilons and dataset sizes."""
        return frozenset({Disclosure.EPSILON, Disclosure.N_EXAMPLES})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        sizes, epsilons = view.told(Disclosure.N_EXAMPLES), view.told(Disclosure.EPSILON)
        relative = (sizes / sizes.max()) * (epsilons / epsilons.max())
        weights = proportional_weights(relative**2)
        return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)
