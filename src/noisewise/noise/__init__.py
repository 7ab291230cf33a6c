"""The noise in clients' updates: its closed form and its estimators."""

from noisewise.noise.blocks import RowSource, Updates, estimate_noise
from noisewise.noise.convergence import ConvergenceBound, convergence_bound
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate, WarmStart
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.pcp_estimator import PCP, PCPResult, principal_component_pursuit
from noisewise.noise.registry import ESTIMATORS, make_estimator
from noisewise.noise.reseeding import ReadsAllCoordinates, Reseedable
from noisewise.noise.signal import SignalTracker
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.update_spread import SpreadTracker
from noisewise.noise.variance import (
    aggregate_noise,
    common_factor,
    excess_noise,
    gradient_noise_variance,
    oracle_noise,
    signal_share,
    update_noise_variance,
)

__all__ = [
    "ESTIMATORS",
    "PCP",
    "ConvergenceBound",
    "Estimator",
    "Factor",
    "Matrix",
    "NoiseEstimate",
    "NoiseTracker",
    "Norm",
    "PCPResult",
    "ReadsAllCoordinates",
    "Reseedable",
    "RowSource",
    "SignalTracker",
    "SpreadTracker",
    "Updates",
    "WarmStart",
    "aggregate_noise",
    "common_factor",
    "convergence_bound",
    "estimate_noise",
    "excess_noise",
    "gradient_noise_variance",
    "make_estimator",
    "oracle_noise",
    "principal_component_pursuit",
    "signal_share",
    "update_noise_variance",
]
