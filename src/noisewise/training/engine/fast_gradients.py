"""`FastGradients`: clipped sums from one forward and one backward pass of the whole batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from noisewise.training.engine.layer_interface import LayerOptions, NotCoveredError
from noisewise.training.engine.loss_gradients import LossGradients
from noisewise.training.engine.network import Network, Use
from noisewise.training.engine.patch_products import PatchProducts
from noisewise.training.engine.pieces import Parts, combined
from noisewise.training.engine.record_separation import check_records_stay_apart
from noisewise.training.gradients import (
    FunctionalGradients,
    GradientEngine,
    Loss,
    clip_factors,
)
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["FastGradients", "reference_engine"]

_log = logging.getLogger(__name__)

_FLOOR = 2.0**-30
"""See `Piece.squared_norms`: a term is scaled to at most 2^15 c. The rounding error of two sums of
256 records' terms at up to 8 positions each is then below 2^-17 c, whatever the terms are."""


_BLOCK_BYTES = 31 * 2**20


def _keep_freed_memory() -> None:
    """Allocate and free one block, so that glibc keeps freed memory up to its size.

    glibc maps large blocks again, page by page and zeroed, and returns memory above a threshold to
    the system at once. Both thresholds grow with the largest block (up to 32 MB) that was ever
    freed (mallopt(3), "dynamic mmap threshold"). Without this, a private step of the paper's CNN
    spends a tenth of its time in page faults. With other C libraries it has no effect.
    """
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8)


def reference_engine(model: nn.Module, loss: Loss, reason: str) -> FunctionalGradients:
    """The reference engine for a model that the layer rules do not cover, with a warning."""
    text = "per-record gradients of %s by torch.func, which is slower: %s"
    _log.warning(text, type(model).__name__, reason)
    return FunctionalGradients(model, loss)


class FastGradients(GradientEngine):
    """Sums of clipped per-record gradients from the inputs and output gradients of the layers.

    One forward and one backward pass give the input of each layer and the gradient at its output;
    the gradients of weights for the whole batch are not computed. From these two, each layer's rule
    gives norms and the weighted sum (see `pieces`). For a model that the rules do not cover,
    `FunctionalGradients` is used, with a warning in the log.

    Args:
        model: its current structure, buffers and mode are copied; it is not changed.
        loss: of a batch; applied to each record separately.
        padded: see `LayerOptions`.

    Attributes:
        fallback_reason: why `FunctionalGradients` is used; None if it is not.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
        InvalidValueError: the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, padded: bool = False) -> None:
        check_model(model)
        _keep_freed_memory()
        self._options = LayerOptions(padded=padded)
        self.layout = ParameterLayout.of(model)
        self.fallback_reason: str | None = None
        self._model, self._loss = model, loss
        self._loss_gradients = LossGradients(loss)
        self._sizes = list(self.layout.sizes)
        self._floor = 0.0
        self._network: Network | None = None
        self._reference: FunctionalGradients | None = None

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """See `GradientEngine`."""
        if inputs.shape[0] == 0:
            return
        if self._reference is None:
            try:
                self.add_rows(theta, inputs, targets, clip_norm, total, len(inputs))
                return
            except NotCoveredError as reason:
                self._fall_back(str(reason))
        assert self._reference is not None
        self._reference.add_clipped_sum(theta, inputs, targets, clip_norm, total)

    def _fall_back(self, reason: str) -> None:
        self.fallback_reason = reason
        self._network = None
        self._reference = reference_engine(self._model, self._loss, reason)

    def _network_like(self, theta: Tensor, inputs: Tensor) -> Network:
        network = self._network
        if network is not None and (network.dtype, network.device) == (theta.dtype, theta.device):
            return network
        try:
            network = Network(self._model, self.layout, theta, self._options)
            check_records_stay_apart(network, inputs)
        except RuntimeError:  # the model calls view(), which needs the default layout
            options = replace(self._options, channels_last=False)
            network = Network(self._model, self.layout, theta, options)
            check_records_stay_apart(network, inputs)
        self._network = network
        return network

    def prepare(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Choose memory layout, layer rules and loss method on public records; see `RowEngine`."""
        self._floor = _FLOOR
        network = self._network_like(theta, inputs)
        network.load(theta)
        with torch.no_grad():
            self._loss_gradients.fix(network(inputs).detach(), targets)
        network.uses.clear()

    def passes(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        network = self._network_like(theta, inputs)
        network.load(theta)
        uses = self._backward(network, inputs, targets, len(inputs))
        return [tensor for use, g in uses for tensor in (use.kept, g)]

    def evidence(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        network = self._network_like(theta, inputs)
        network.load(theta)
        uses = self._backward(network, inputs, targets, len(inputs))
        if not uses:
            return []
        with torch.no_grad():
            pieces = combined([piece for use, g in uses for piece in use.gradients(use.kept, g)])
            norms, _ = _clipped(uses, 1.0, self._floor)
            return [norms, *(tensor for piece in pieces for tensor in piece.evidence())]

    def add_rows(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """See `RowEngine`."""
        network = self._network_like(theta, inputs)
        network.load(theta)
        parts = torch.split_with_sizes(total, self._sizes)
        if clip_norm is None and self._add_unclipped(network, inputs, targets, parts):
            return
        uses = self._backward(network, inputs, targets, used)
        if not uses:
            return
        with torch.no_grad():
            norms, add = _clipped(uses, clip_norm, self._floor)
            if not math.isfinite(float(norms.sum())):
                bad = (~torch.isfinite(norms)).nonzero()[:, 0]
                cleared = [(use.without(bad), g.index_fill(0, bad, 0.0)) for use, g in uses]
                _, add = _clipped(cleared, clip_norm, self._floor)
            add(parts)

    def _backward(
        self, network: Network, inputs: Tensor, targets: Tensor, used: int
    ) -> list[tuple[Use, Tensor]]:
        """Each use of a layer with the gradient at its output; 0 in the rows from ``used`` on."""
        with torch.enable_grad():
            outputs = network(inputs)
        with torch.no_grad():
            weights = self._loss_gradients(outputs.detach(), targets)
            if used < len(inputs):
                weights[used:] = 0.0
            return network.output_gradients(outputs, weights)

    def _add_unclipped(
        self, network: Network, inputs: Tensor, targets: Tensor, parts: Parts
    ) -> bool:
        """Add the gradients without clipping, by ordinary backpropagation, if all are finite."""
        with torch.enable_grad():
            outputs = network(inputs)
        weights = self._loss_gradients(outputs.detach(), targets)
        pairs = [
            (part, gradient.reshape(-1))
            for part, gradient in zip(parts, network.batch_gradients(outputs, weights), strict=True)
            if gradient is not None
        ]
        if not all(math.isfinite(float(gradient.sum())) for _, gradient in pairs):
            return False
        for part, gradient in pairs:
            part.add_(gradient.double())
        return True


def _clipped(
    uses: list[tuple[Use, Tensor]], clip_norm: float | None, floor: float
) -> tuple[Tensor, Callable[[Parts], None]]:
    """Squared norms [b] over all parameters, and a function that adds the clipped gradients."""
    pieces = combined([piece for use, g in uses for piece in use.gradients(use.kept, g)])
    streamed = max(
        (piece for piece in pieces if isinstance(piece, PatchProducts)),
        key=lambda piece: piece.size,
        default=None,
    )
    stored = [piece for piece in pieces if piece is not streamed]
    norms = torch.zeros(len(uses[0][1]), dtype=torch.float64, device=uses[0][1].device)
    for piece in stored:
        norms += piece.squared_norms(floor)
    sums: Tensor | None = None
    if streamed is None:
        factors = clip_factors(norms, clip_norm)
    else:
        norms, factors, sums = streamed.stream(norms, clip_norm)

    def add(parts: Parts) -> None:
        for piece in stored:
            piece.add_sum(factors, parts)
        if streamed is not None and sums is not None:
            streamed.add_streamed(sums, parts)

    return norms, add
