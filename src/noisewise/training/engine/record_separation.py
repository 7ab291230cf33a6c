"""Checks that a model keeps its records apart: row i of every layer must depend on record i alone.

The layer rules are exact only for such models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from noisewise.training.engine.layer_interface import NotCoveredError
from noisewise.training.engine.network import Network
from noisewise.training.engine.record_axes import PROBE_SIZES, arranged
from noisewise.training.inputs import Inputs, concatenate, form_of, select
from noisewise.training.operation_trace import NoMasks
from noisewise.training.torch_random import torch_seed

__all__ = ["PROBE_RECORDS", "check_outputs_agree", "check_records_stay_apart"]

PROBE_RECORDS = 2 * PROBE_SIZES[-1][0]
"""Number of records that `check_records_stay_apart` needs."""

_TOLERANCE = 1e-3


def check_records_stay_apart(network: Network, inputs: Inputs) -> None:
    """Find out where the records are, and run some of them twice, with random parameters.

    The gradients of record 1 must be 0 in the other rows of every layer, which fails for models
    that mix records. Row 0 of every layer's input must not change with the other records, which
    fails for batch statistics without a gradient. A model that moves records to other rows fails
    one of the two checks. The network has random parameters afterwards; torch's generators are
    restored.

    Args:
        network: the copy to check.
        inputs: `PROBE_RECORDS` valid records.

    Raises:
        NotCoveredError: the model mixes records.
    """
    with torch_seed(0, network.device), torch.enable_grad():
        network.randomise()
        records = _learn_places(network, inputs)
        rows = select(inputs, slice(records))
        others = concatenate(
            select(inputs, slice(1)), select(inputs, slice(records, 2 * records - 1))
        )
        with torch_seed(1, network.device):
            outputs = network(rows)
            seen = [outputs, *_kept(network, records)]
        weights = torch.zeros_like(outputs)
        weights[1] = torch.randn_like(weights[1])
        for use, gradient in network.output_gradients(outputs, weights):
            if bool(gradient[:1].any()) or bool(gradient[2:].any()):
                raise NotCoveredError(f"the model mixes records after layer '{use.name}'")
        with torch_seed(1, network.device):  # the same dropout
            again = [network(others), *_kept(network, records)]
        network.uses.clear()
    if len(again) != len(seen) or not all(map(_same, seen, again)):
        raise NotCoveredError("the input of a layer for one record depends on the other records")


def _learn_places(network: Network, inputs: Inputs) -> int:
    """Let the network find out where the records are; returns the smaller number that it ran."""
    for sizes in PROBE_SIZES:
        logs = []
        for size in sizes:
            with network.axes.trial() as log:
                network(select(inputs, slice(size)))
            logs.append(log)
        network.uses.clear()
        if network.axes.learn(form_of(inputs), (logs[0], logs[1]), sizes):
            return sizes[0]
    raise NotCoveredError("the model's operations depend on the number of records")


def _kept(network: Network, records: int) -> Iterator[Tensor]:
    for use in network.uses:
        for part, axis in zip(use.kept, use.axes[0], strict=True):
            yield arranged(part, axis, records)


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


def check_outputs_agree(
    network: Network, model: Callable[[Inputs], Tensor], inputs: Inputs
) -> None:
    """The engine's copy must compute what the model computes, with all dropout masks kept open.

    Raises:
        NotCoveredError: the outputs differ.
    """
    rows = select(inputs, slice(PROBE_SIZES[0][0]))
    with torch.no_grad(), NoMasks():
        with torch_seed(1, network.device):
            ours = network(rows).detach()
        with torch_seed(1, network.device):
            expected = model(rows)
    network.uses.clear()
    if ours.shape != expected.shape:
        raise NotCoveredError("the layer rules give outputs of another shape")
    known = torch.isfinite(expected)
    scale = float(expected[known].abs().max()) if bool(known.any()) else 1.0
    difference = float((ours - expected)[known].abs().max()) if bool(known.any()) else 0.0
    if not difference <= _TOLERANCE * scale:
        raise NotCoveredError("the layer rules give other outputs than the model")
