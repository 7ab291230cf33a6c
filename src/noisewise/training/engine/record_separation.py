"""Checks that a model keeps its records apart: row i of every layer must depend on record i alone.

The layer rules are exact only for such models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noisewise.training.engine.layer_interface import NotCoveredError
from noisewise.training.engine.network import Network
from noisewise.training.torch_random import torch_seed

__all__ = ["check_records_stay_apart"]

_TOLERANCE = 1e-3


def check_records_stay_apart(network: Network, inputs: Tensor) -> None:
    """Run three records through the model twice, with random parameters.

    The gradients of record 1 must be 0 in the other rows of every layer, which fails for models
    that have time before records or mix records. Row 0 of every layer's input must not change with
    records 1 and 2, which fails for batch statistics without a gradient. A model that moves records
    to other rows fails one of the two checks. The network has random parameters afterwards; torch's
    generators are restored.

    Args:
        network: the copy to check.
        inputs: [b, ...] records; only the first three are read.

    Raises:
        NotCoveredError: the model mixes records.
    """
    rows = inputs[torch.arange(3, device=inputs.device) % len(inputs)]
    if rows.is_floating_point():
        rows = torch.nan_to_num(rows, nan=0.0, posinf=1.0, neginf=-1.0).clamp_(-1e3, 1e3)
        others = 0.5 - rows
    else:
        others = rows.flip(-1) if rows.dim() > 1 else rows[[0, 2, 1]]
    others[0] = rows[0]
    with torch_seed(0, network.device), torch.enable_grad():
        network.randomise()
        with torch_seed(1, network.device):
            seen = [network(rows), *(use.kept for use in network.uses)]
        outputs = seen[0]
        weights = torch.zeros_like(outputs)
        weights[1] = torch.randn_like(weights[1])
        for use, gradient in network.output_gradients(outputs, weights):
            if bool(gradient[0].any()) or bool(gradient[2].any()):
                raise NotCoveredError(f"the model mixes records after layer '{use.name}'")
        with torch_seed(1, network.device):  # the same dropout
            again = [network(others), *(use.kept for use in network.uses)]
        network.uses.clear()
    if len(again) != len(seen) or not all(map(_same, seen, again)):
        raise NotCoveredError("the input of a layer for one record depends on the other records")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether row 0 is the same, up to rounding."""
    one, other = one[0].detach(), other[0].detach()
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if one.numel() == 0:
        return True
    scale = float(one.abs().max())
    return float((one - other).abs().max()) <= _TOLERANCE * scale
