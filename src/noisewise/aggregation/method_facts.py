"""`METHODS`: all methods, how each is built and what clients disclose under it, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from noisewise.aggregation.disclosure import Disclosure
from noisewise.data.specs import ClientSpec

__all__ = ["METHODS", "Adapt", "MethodFacts", "smallest_epsilon", "unchanged"]

_EPSILON, _N_EXAMPLES = Disclosure.EPSILON, Disclosure.N_EXAMPLES

Adapt = Callable[[Sequence[ClientSpec]], tuple[ClientSpec, ...]]


def unchanged(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Return the specs unchanged: every client keeps its own budget."""
    return tuple(specs)


def smallest_epsilon(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Return the specs with the smallest epsilon for every client: the baseline MinEpsilon."""
    smallest = min(spec.epsilon for spec in specs)
    return tuple(replace(spec, epsilon=smallest) for spec in specs)


@dataclass(frozen=True)
class MethodFacts:
    """How a method is built, and what a table says about it.

    Attributes:
        factory: the path ``"package.module:name"`` of the aggregator, or of a class or function
            that makes it. It is imported when the method is made, because that imports torch.
        summary: one line that describes the method.
        needs: what clients disclose to the server besides their updates.
        adapt: changes the clients' specs before they make their plans.
        private: False only for the reference without privacy.
        shares_model: False if every client trains its own model.
        normalise: whether clients divide their updates by their steps, unless an option says so.
        unnormalised: default options for updates that are not divided by their steps.
    """

    factory: str
    summary: str
    needs: tuple[Disclosure, ...] = ()
    adapt: Adapt = unchanged
    private: bool = True
    shares_model: bool = True
    normalise: bool = False
    unnormalised: Mapping[str, Any] = field(default_factory=dict)


METHODS: Mapping[str, MethodFacts] = MappingProxyType(
    {
        "NoiseWise": MethodFacts(
            "noisewise.aggregation.noisewise:NoiseWise",
            "the best signal-to-noise ratio from estimated noise, on step-normalised updates",
            normalise=True,
            unnormalised={"signal": "loadings"},
        ),
        "RobustHDP": MethodFacts(
            "noisewise.aggregation.robust_hdp:RobustHDP",
            "weights from the noise that the server estimates",
        ),
        "WeiAvg": MethodFacts(
            "noisewise.aggregation.weighted:WeiAvg",
            "weights by the epsilons that clients report",
            (_EPSILON,),
        ),
        "PFA": MethodFacts(
            "noisewise.aggregation.pfa:PFA",
            "as WeiAvg; updates of small-epsilon clients are projected on those of the others",
            (_EPSILON,),
        ),
        "BudgetAvg": MethodFacts(
            "noisewise.aggregation.weighted:BudgetWeighted",
            "weights by (N epsilon)^2 on step-normalised updates",
            (_EPSILON, _N_EXAMPLES),
            normalise=True,
        ),
        "DPFedAvg": MethodFacts(
            "noisewise.aggregation.weighted:ExampleWeighted",
            "weights by dataset size",
            (_N_EXAMPLES,),
        ),
        "MinEpsilon": MethodFacts(
            "noisewise.aggregation.weighted:ExampleWeighted",
            "as DPFedAvg; every client uses the smallest epsilon of all clients",
            (_N_EXAMPLES,),
            adapt=smallest_epsilon,
        ),
        "Alone": MethodFacts(
            # A client knows its own noise, and the oracle's weight of a single update is 1.
            "noisewise.aggregation.oracle:Oracle",
            "every client trains its own model with its own budget and shares nothing",
            shares_model=False,
        ),
        "FedAvg": MethodFacts(
            "noisewise.aggregation.weighted:ExampleWeighted",
            "as DPFedAvg without privacy: a reference",
            (_N_EXAMPLES,),
            private=False,
        ),
        "Oracle": MethodFacts(
            "noisewise.aggregation.oracle:Oracle",
            "weights from the true noise, which no real server knows: a reference",
            (Disclosure.TRUE_VARIANCE,),
        ),
    }
)
"""All methods by name, in the order of tables. `make_method` builds one."""
