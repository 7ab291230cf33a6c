"""Noise of an update: its closed form and its estimators."""

from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP, PCPResult, principal_component_pursuit
from noisewise.noise.table import ESTIMATORS, make_estimator
from noisewise.noise.variance import (
    aggregate_noise,
    excess_noise,
    gradient_noise_variance,
    oracle_noise,
    update_noise_variance,
)

__all__ = [
    "ESTIMATORS",
    "PCP",
    "Estimator",
    "Matrix",
    "NoiseEstimate",
    "Norm",
    "PCPResult",
    "aggregate_noise",
    "excess_noise",
    "gradient_noise_variance",
    "make_estimator",
    "oracle_noise",
    "principal_component_pursuit",
    "update_noise_variance",
]
