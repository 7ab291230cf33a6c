"""Does the model treat records apart? A rule is exact only if row i of a layer is record i's."""

from __future__ import annotations

import torch
from torch import Tensor

from noisewise.training.engine.layer import NotCoveredError
from noisewise.training.engine.network import Network
from noisewise.training.torch_random import torch_seed

__all__ = ["check_records_stay_apart"]

_TOLERANCE = 1e-3


def check_records_stay_apart(network: Network, inputs: Tensor) -> None:
    """Run three records through the model at random parameters, twice.

    The gradients of record 1 must be 0 in the other rows of every layer: models that put time
    before records, or mix records, fail here. What every layer sees in row 0 must not change when
    records 1 and 2 do: statistics of the batch that carry no gradient fail here. Whatever moves
    records to other rows fails in one or the other. The parameters of the network are random
    afterwards; torch's generators are left as they were.

    Args:
        network: the copy to examine.
        inputs: [b, ...] records; only the first three are read.

    Raises:
        NotCoveredError: records are mixed.
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
                raise NotCoveredError(f"records meet behind layer '{use.name}'")
        with torch_seed(1, network.device):  # the same dropout
            again = [network(others), *(use.kept for use in network.uses)]
        network.uses.clear()
    if len(again) != len(seen) or not all(map(_same, seen, again)):
        raise NotCoveredError("what a layer sees of a record depends on the other records")


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
