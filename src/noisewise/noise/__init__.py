"""Noise of an update: its closed form and its estimators."""

from noisewise.noise.estimate import Estimator, Matrix, NoiseEstimate

__all__ = ["Estimator", "Matrix", "NoiseEstimate"]
