"""`make_engine`: which engine trains a model."""

from __future__ import annotations

from torch import nn

from noisewise.training.engine.fast import FastGradients
from noisewise.training.engine.isolated import IsolatedGradients
from noisewise.training.engine.linear import LinearGradients, is_linear
from noisewise.training.gradients import GradientEngine, Loss

__all__ = ["make_engine"]


def make_engine(model: nn.Module, loss: Loss, *, isolate: bool = True) -> GradientEngine:
    """The engine to train with: fast where exact rules cover the model, else the reference.

    An engine may be used again for later rounds of the same model and loss, by one thread at a
    time; what it learns about the model is then learnt once.

    Args:
        model: to train.
        loss: mean loss of a batch.
        isolate: whether a record's contribution must be the same to the bit whatever the other
            records are. A deployed client needs it, since the server chooses the parameters.
            Without it the sums are a little faster, and equal up to rounding at usual parameters;
            the simulator, which has no adversary, trains so.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
    """
    if isolate:
        return IsolatedGradients(model, loss)
    return LinearGradients(model, loss) if is_linear(model, loss) else FastGradients(model, loss)
