"""Noise of an update: its closed form and its estimators."""

from noisewise.noise.blocks import RowSource, Updates, estimate_noise
from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate
from noisewise.noise.factor import Factor
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP, PCPResult, principal_component_pursuit
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.table import ESTIMATORS, make_estimator
from noisewise.noise.variance import (
    aggregate_noise,
    common_factor,
    excess_noise,
    gradient_noise_variance,
    oracle_noise,
    update_noise_variance,
)

__all__ = [
    "ESTIMATORS",
    "PCP",
    "Estimator",
    "Factor",
    "Matrix",
    "NoiseEstimate",
    "NoiseTracker",
    "Norm",
    "PCPResult",
    "RowSource",
    "Updates",
    "aggregate_noise",
    "common_factor",
    "estimate_noise",
    "excess_noise",
    "gradient_noise_variance",
    "make_estimator",
    "oracle_noise",
    "principal_component_pursuit",
    "update_noise_variance",
]
