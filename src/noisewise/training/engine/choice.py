"""`make_engine`: which engine trains a model."""

from __future__ import annotations

from torch import nn

from noisewise.training.engine.fast import FastGradients
from noisewise.training.engine.linear import LinearGradients, is_linear
from noisewise.training.gradients import GradientEngine, Loss

__all__ = ["make_engine"]


def make_engine(model: nn.Module, loss: Loss) -> GradientEngine:
    """The engine to train with: fast where exact rules cover the model, else the reference.

    An engine may be used again for later rounds of the same model and loss, by one thread at a
    time; what it learns about the model (a few milliseconds) is then learnt once.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
    """
    return LinearGradients(model, loss) if is_linear(model, loss) else FastGradients(model, loss)
