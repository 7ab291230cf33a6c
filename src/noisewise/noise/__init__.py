"""Noise of an update: its closed form and its estimators."""

from noisewise.noise.blocks import RowSource, Updates, estimate_noise
from noisewise.noise.convergence import ConvergenceBound, convergence_bound
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate
from noisewise.noise.factor import Factor
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP, PCPResult, principal_component_pursuit
from noisewise.noise.signal import SignalTracker
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.spread import SpreadTracker
from noisewise.noise.table import ESTIMATORS, make_estimator
from noisewise.noise.unforeseen import ReadsAllCoordinates, Reseedable
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
