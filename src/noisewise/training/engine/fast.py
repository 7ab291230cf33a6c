"""The fast engine: exact per-sample clipping without a torch.func pass over every record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from noisewise.training.engine.layer import LayerOptions, NotCoveredError
from noisewise.training.engine.loss_gradients import LossGradients
from noisewise.training.engine.memory import keep_freed_memory
from noisewise.training.engine.network import Network, Use
from noisewise.training.engine.pieces import Parts, combined
from noisewise.training.engine.probe import check_records_stay_apart
from noisewise.training.engine.products import Products
from noisewise.training.gradients import (
    FunctionalGradients,
    GradientEngine,
    Loss,
    clip_factors,
)
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["FastGradients"]

_log = logging.getLogger(__name__)

_FLOOR = 2.0**-30
"""See `Piece.squared_norms`: a term is scaled to at most 2^15 c. The rounding of two sums of 256
records' terms at up to 8 positions each then stays below 2^-17 c, whatever the terms are."""


class FastGradients(GradientEngine):
    """Sums of clipped per-sample gradients from the gradients at the layers' outputs.

    One forward and one backward pass give what each layer saw and the gradient at its output; no
    gradient of a weight is computed for the batch. From these two, each layer's rule gives norms
    and the weighted sum (see `pieces`). A model outside of the rules is handed to
    `FunctionalGradients`, with one line in the log.

    Args:
        model: gives structure, buffers and mode, as they are now; it is copied and not changed.
        loss: of a batch; applied to each record alone.
        padded: see `LayerOptions`.

    Attributes:
        fallback_reason: why the reference does the work; None while it does not.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, padded: bool = False) -> None:
        check_model(model)
        keep_freed_memory()
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
        total += self._reference.clipped_sum(theta, inputs, targets, clip_norm)

    def _fall_back(self, reason: str) -> None:
        self.fallback_reason = reason
        self._network = None
        self._reference = FunctionalGradients(self._model, self._loss)
        _log.warning(
            "per-sample gradients of %s by torch.func, which is slower: %s",
            type(self._model).__name__,
            reason,
        )

    def _network_like(self, theta: Tensor, inputs: Tensor) -> Network:
        known = self._network
        if known is not None and (known.dtype, known.device) == (theta.dtype, theta.device):
            return known
        try:
            network = Network(self._model, self.layout, theta, self._options)
            check_records_stay_apart(network, inputs)
        except RuntimeError:  # x.view() of the model's own code needs the default layout
            options = replace(self._options, channels_last=False)
            network = Network(self._model, self.layout, theta, options)
            check_records_stay_apart(network, inputs)
        self._network = network
        return network

    def prepare(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Fix layout, layers and the loss's way on public records; see `RowEngine`."""
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
        """Each use of a layer with the gradient at its output; 0 in the rows behind ``used``."""
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
        """Add the gradients as they are, by ordinary backpropagation, if all are finite."""
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
    """Squared norms [b] over all parameters, and what adds the sum of the clipped gradients."""
    pieces = combined([piece for use, g in uses for piece in use.gradients(use.kept, g)])
    streamed = max(
        (piece for piece in pieces if isinstance(piece, Products)),
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
