"""Fast engines for per-record gradients: exact flat clipping at about the cost of SGD.

A step of `FastGradients`:

1. `network` runs a copy of the model and records the input of each layer.
2. `loss_gradients` computes the gradient of each record's loss at the model's outputs.
3. One backward pass gives the gradient at each layer's output, and no gradient of a weight.
4. From input and output gradient, the layer's rule makes `pieces`: per-record gradients in the
   cheapest form (`cost_model`), with their norms and weighted sums.

| file | contents |
|---|---|
| `fast_gradients` | `FastGradients`, which does these steps |
| `linear_model` | the closed form for a single linear layer |
| `isolated_gradients` | `IsolatedGradients`, for deployed clients |
| `network`, `rewrites` | the engine's copy of a model, and how it is made faster |
| `loss_gradients` | gradients of the loss |
| `layer_interface` | what a layer rule is |
| `layer_rules` | the rules of linear layers and embeddings, and the table of all rules |
| `norm_rules`, `attention`, `recurrent`, `volume_convolution` | more rules |
| `convolution`, `patch_products` | the rule of convolutions, and its products |
| `shared_values`, `shared_functions` | parameters outside of layers: tokens, tables, scales |
| `reference_layer` | a submodule that `torch.func` differentiates |
| `record_axes` | on which axis of a tensor the records lie |
| `record_separation` | checks that a model keeps its records apart and that the rules apply |
| `pieces` | per-record gradients, their norms and sums |
| `cost_model` | which form of gradients is cheapest |
| `padded_linear` | linear layers on padded memory |

A submodule whose parameters are used in a way that torch does not report runs as a
`ReferenceLayer`. `FastGradients` uses the reference engine, `FunctionalGradients`, only for a model
that mixes records or cannot be copied.

A new layer rule is a subclass of `LayerRule` or `CompositeRule` and an entry of
`layer_rules.LAYER_RULES`. The tests compare every rule with one backward pass for each record.
"""

from __future__ import annotations

from torch import nn

from noisewise.training.engine.fast_gradients import FastGradients
from noisewise.training.engine.isolated_gradients import IsolatedGradients
from noisewise.training.engine.linear_model import LinearGradients, fast_engine
from noisewise.training.gradients import GradientEngine, Loss

__all__ = ["FastGradients", "IsolatedGradients", "LinearGradients", "make_engine"]


def make_engine(model: nn.Module, loss: Loss, *, isolate: bool = True) -> GradientEngine:
    """Make the engine that trains a model: fast if the layer rules cover it, else the reference.

    An engine can be reused for later rounds of the same model and loss, by one thread at a time,
    which saves its preparation.

    Args:
        model: to train.
        loss: mean loss of a batch.
        isolate: whether a record's contribution must have the same bits whatever the other records
            are. A deployed client needs this because the server chooses the parameters. Without it,
            sums are computed a little faster and are equal up to rounding at usual parameters; the
            simulator, which has no adversary, trains without it.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
        InvalidValueError: the model has no trainable parameter.

    Example:
        >>> import torch
        >>> engine = make_engine(nn.Linear(3, 2), nn.functional.cross_entropy)
        >>> theta, inputs, targets = torch.zeros(8), torch.rand(5, 3), torch.zeros(5).long()
        >>> engine.clipped_sum(theta, inputs, targets, clip_norm=1.0).shape
        torch.Size([8])
    """
    return IsolatedGradients(model, loss) if isolate else fast_engine(model, loss)
