"""Models, per-record gradients and local DP-SGD."""

from noisewise.training.engine import FastGradients, IsolatedGradients, make_engine
from noisewise.training.gradients import FunctionalGradients, GradientEngine, Loss
from noisewise.training.local import LocalUpdate, TensorData, local_update
from noisewise.training.models import make_model, model_names
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = [
    "FastGradients",
    "FunctionalGradients",
    "GradientEngine",
    "IsolatedGradients",
    "LocalUpdate",
    "Loss",
    "ParameterLayout",
    "TensorData",
    "check_model",
    "local_update",
    "make_engine",
    "make_model",
    "model_names",
]
