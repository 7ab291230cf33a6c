"""Averages with weights from what the clients disclose: WeiAvg, BudgetAvg, DPFedAvg and FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State, weighted_sum
from noisewise.aggregation.weights import proportional_weights

__all__ = ["BudgetWeighted", "ExampleWeighted", "WeiAvg"]


def _average(view: ServerView, what: Disclosure, state: State) -> Aggregation:
    weights = proportional_weights(view.disclosure(what))
    return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)


@dataclass(frozen=True)
class WeiAvg:
    """w_i ~ epsilon_i (Liu et al., VLDB 2021; the paper's algorithm WeiAvg).

    The server does not check the epsilons that clients report.
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
    """w_i ~ N_i (McMahan et al., 2017): the aggregator of DPFedAvg, MinEpsilon and FedAvg."""

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
    """w_i ~ (N_i epsilon_i)^2: close to the best weights for step-normalised updates.

    With equal rounds and delta, the noise of a client's mean gradient is about 1 / (N epsilon)^2
    for any batch size. Clients have to disclose both numbers, and the server does not check them.
    """

    reads_all_coordinates: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The clients' epsilons and dataset sizes."""
        return frozenset({Disclosure.EPSILON, Disclosure.N_EXAMPLES})

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        sizes, epsilons = (
            view.disclosure(Disclosure.N_EXAMPLES),
            view.disclosure(Disclosure.EPSILON),
        )
        relative = (sizes / sizes.max()) * (epsilons / epsilons.max())
        weights = proportional_weights(relative**2)
        return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)
