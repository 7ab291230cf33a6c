"""The server's side of a round: screening, weights, guard and one file for each aggregator."""

from noisewise.aggregation.base import (
    Aggregation,
    Aggregator,
    Disclosure,
    ServerView,
    State,
    UpdateMatrix,
    weighted_sum,
)
from noisewise.aggregation.guard import Guard, Guardable, Weighed, guarded_sum
from noisewise.aggregation.methods import METHODS, Method, make_method, plan_clients
from noisewise.aggregation.noise_floor import noise_floor, plan_noise
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
    "noise_floor",
    "plan_clients",
    "plan_noise",
    "proportional_weights",
    "screen_updates",
    "weighted_sum",
]
