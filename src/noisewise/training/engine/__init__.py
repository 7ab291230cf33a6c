"""The fast engine of per-sample gradients."""

from noisewise.training.engine.fast import FastGradients, make_engine

__all__ = ["FastGradients", "make_engine"]
