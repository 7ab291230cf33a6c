"""What the server does with the updates: weights, screening and one file for each aggregator."""

from noisewise.aggregation.base import (
    Aggregation,
    Aggregator,
    Disclosure,
    ServerView,
    State,
    UpdateMatrix,
    weighted_sum,
)
from noisewise.aggregation.methods import METHODS, Method, make_method, plan_clients
from noisewise.aggregation.oracle import Oracle
from noisewise.aggregation.pfa import PFA
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.aggregation.screening import Screened, screen_updates
from noisewise.aggregation.weighted import ExampleWeighted, WeiAvg
from noisewise.aggregation.weights import inverse_variance_weights, proportional_weights

__all__ = [
    "METHODS",
    "PFA",
    "Aggregation",
    "Aggregator",
    "Disclosure",
    "ExampleWeighted",
    "Method",
    "Oracle",
    "RobustHDP",
    "Screened",
    "ServerView",
    "State",
    "UpdateMatrix",
    "WeiAvg",
    "inverse_variance_weights",
    "make_method",
    "plan_clients",
    "proportional_weights",
    "screen_updates",
    "weighted_sum",
]
