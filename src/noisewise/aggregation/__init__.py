"""The server's side of a round: screening, weights, guard and one file for each aggregator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noisewise.lazy_imports import lazy_names

if TYPE_CHECKING:
    from noisewise.aggregation.base import (
        Aggregation,
        Aggregator,
        ServerView,
        State,
        UpdateMatrix,
        weighted_sum,
    )
    from noisewise.aggregation.disclosure import Disclosure
    from noisewise.aggregation.guard import Guard, Guardable, Weighed, guarded_sum
    from noisewise.aggregation.method_facts import METHODS, MethodFacts
    from noisewise.aggregation.methods import Method, make_method, plan_clients
    from noisewise.aggregation.noise_floor import plan_noise
    from noisewise.aggregation.noisewise import NoiseWise
    from noisewise.aggregation.oracle import Oracle
    from noisewise.aggregation.pfa import PFA
    from noisewise.aggregation.robust_hdp import RobustHDP
    from noisewise.aggregation.screening import Screened, screen_updates
    from noisewise.aggregation.weighted import BudgetWeighted, ExampleWeighted, WeiAvg
    from noisewise.aggregation.weights import (
        inverse_variance_weights,
        noise_and_bias_weights,
        proportional_weights,
    )

__all__ = [
    "METHODS",
    "PFA",
    "Aggregation",
    "Aggregator",
    "BudgetWeighted",
    "Disclosure",
    "ExampleWeighted",
    "Guard",
    "Guardable",
    "Method",
    "MethodFacts",
    "NoiseWise",
    "Oracle",
    "RobustHDP",
    "Screened",
    "ServerView",
    "State",
    "UpdateMatrix",
    "WeiAvg",
    "Weighed",
    "guarded_sum",
    "inverse_variance_weights",
    "make_method",
    "noise_and_bias_weights",
    "plan_clients",
    "plan_noise",
    "proportional_weights",
    "screen_updates",
    "weighted_sum",
]

_HOMES = {
    "Aggregation": "base",
    "Aggregator": "base",
    "BudgetWeighted": "weighted",
    "Disclosure": "disclosure",
    "ExampleWeighted": "weighted",
    "Guard": "guard",
    "Guardable": "guard",
    "METHODS": "method_facts",
    "Method": "methods",
    "MethodFacts": "method_facts",
    "NoiseWise": "noisewise",
    "Oracle": "oracle",
    "PFA": "pfa",
    "RobustHDP": "robust_hdp",
    "Screened": "screening",
    "ServerView": "base",
    "State": "base",
    "UpdateMatrix": "base",
    "WeiAvg": "weighted",
    "Weighed": "guard",
    "guarded_sum": "guard",
    "inverse_variance_weights": "weights",
    "make_method": "methods",
    "noise_and_bias_weights": "weights",
    "plan_clients": "methods",
    "plan_noise": "noise_floor",
    "proportional_weights": "weights",
    "screen_updates": "screening",
    "weighted_sum": "base",
}

__getattr__ = lazy_names(__name__, _HOMES)
