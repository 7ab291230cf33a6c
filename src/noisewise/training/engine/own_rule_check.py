"""Check the layer rules that users registered: their gradients must be those of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from noisewise.training.engine.layer_interface import NotCoveredError
from noisewise.training.engine.network import Network
from noisewise.training.engine.pieces import combined
from noisewise.training.engine.record_axes import PROBE_SIZES
from noisewise.training.inputs import Inputs, select
from noisewise.training.operation_trace import NoMasks
from noisewise.training.parameters import ParameterLayout
from noisewise.training.torch_random import torch_seed

__all__ = ["check_own_rules"]

_COMPARED = 2  # records; the gradients of all would need much memory
_TOLERANCE = 1e-3  # of the largest gradient of a parameter
_ROUNDING = 1e-5  # of the largest gradient of all parameters


def check_own_rules(
    network: Network,
    layout: ParameterLayout,
    model: Callable[[Inputs], Tensor],
    theta: Tensor,
    inputs: Inputs,
) -> None:
    """Compare gradients and norms of a few records with backpropagation through the model.

    The check finds a rule that is wrong for most records. It misses one that is wrong for few
    records only, so rules remain trusted code.

    Args:
        network: the engine's copy of a model with rules of users, with ``theta`` loaded.
        layout: the order of the trainable parameters.
        model: computes the model's outputs at ``theta``.
        theta: [p] that requires gradients.
        inputs: valid records.

    Raises:
        NotCoveredError: a rule gives other gradients or norms, or fails; names a layer.
    """
    rows = select(inputs, slice(PROBE_SIZES[0][0]))
    with torch.enable_grad(), NoMasks(), torch_seed(1, network.device):
        outputs = model(rows)
    with torch_seed(2, network.device):
        weights = torch.randn_like(outputs)
    expected = _by_backpropagation(outputs, weights, theta)
    try:
        gradients, squares = _by_rules(network, rows, weights, layout)
    except NotCoveredError:
        raise
    except Exception as error:
        text = f"an own layer rule fails ({type(error).__name__}: {error})"
        raise NotCoveredError(text, network.own_rules[0]) from error
    largest = float(expected.abs().max())
    tolerance = max(_TOLERANCE, 8 * torch.finfo(theta.dtype).eps)
    sizes = list(layout.sizes)
    parts = zip(torch.split(expected, sizes, 1), torch.split(gradients, sizes, 1), strict=True)
    for name, (part, ours) in zip(layout.names, parts, strict=True):
        limit = tolerance * float(part.abs().max()) + _ROUNDING * largest
        if not float((ours - part).abs().max()) <= limit:
            layer = name.rpartition(".")[0]
            layer = layer if layer in network.own_rules else network.own_rules[0]
            raise NotCoveredError(f"an own layer rule gives other gradients of '{name}'", layer)
    norms = expected.norm(dim=1)
    limits = tolerance * norms + _ROUNDING * largest
    if not bool(((squares.sqrt() - norms).abs() <= limits).all()):
        raise NotCoveredError("an own layer rule gives other norms", network.own_rules[0])


def _by_backpropagation(outputs: Tensor, weights: Tensor, theta: Tensor) -> Tensor:
    """The gradients of the first records: [n, p] float64."""
    records = [
        torch.autograd.grad(
            outputs[row], theta, weights[row], retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )[0]
        for row in range(_COMPARED)
    ]  # fmt: skip
    return torch.stack(records).double()


def _by_rules(
    network: Network, rows: Inputs, weights: Tensor, layout: ParameterLayout
) -> tuple[Tensor, Tensor]:
    """The gradients [n, p] and squared norms [n] of the first records."""
    with torch.enable_grad(), NoMasks(), torch_seed(1, network.device):
        outputs = network(rows)
    with torch.no_grad():
        uses = network.output_gradients(outputs, weights)
        pieces = combined([piece for use, g in uses for piece in use.pieces(g)])
        squares = torch.zeros(len(weights), dtype=torch.float64, device=network.device)
        for piece in pieces:
            squares += piece.squared_norms()
        records = torch.zeros(_COMPARED, layout.size, dtype=torch.float64, device=network.device)
        only_one = torch.eye(len(weights), dtype=torch.float64, device=network.device)
        for factors, record in zip(only_one, records, strict=False):
            for piece in pieces:
                piece.add_sum(factors, torch.split(record, list(layout.sizes)))
    return records, squares[:_COMPARED]
