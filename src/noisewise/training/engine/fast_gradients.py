"""`FastGradients`: clipped sums from one forward and one backward pass of the whole batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.training.engine.cleared_rows import clear_rows, without_rows
from noisewise.training.engine.layer_interface import LayerOptions, NotCoveredError
from noisewise.training.engine.loss_gradients import LossGradients
from noisewise.training.engine.network import Network, Use
from noisewise.training.engine.own_rule_check import check_own_rules
from noisewise.training.engine.pieces import Parts, can_stream, combined
from noisewise.training.engine.record_axes import PROBE_SIZES
from noisewise.training.engine.record_separation import (
    PROBE_RECORDS,
    check_outputs_agree,
    check_records_stay_apart,
)
from noisewise.training.gradients import (
    FunctionalGradients,
    GradientEngine,
    Loss,
    clip_factors,
)
from noisewise.training.input_checks import check_inputs
from noisewise.training.inputs import Inputs, call_arguments, form_of, output_of, select
from noisewise.training.parameters import ParameterLayout, check_model, check_no_autocast
from noisewise.training.synthetic_records import (
    RecordForm,
    Records,
    first_records,
    random_parameters,
    synthetic_inputs,
)
from noisewise.training.torch_random import torch_seed

__all__ = ["FastGradients", "warn_about_reference"]

_log = logging.getLogger(__name__)

_FLOOR = 2.0**-30
"""See `Piece.squared_norms`: a term is scaled to at most 2^15 c. The rounding error of two sums of
256 records' terms at up to 8 positions each is then below 2^-17 c, whatever the terms are."""


_VALUES_AT_ONCE = 2**25
"""Numbers that the passes and gradients of the records at the same time may have: about 200 MB."""

_FEWEST_AT_ONCE = 32
"""With fewer records at the same time, products are slower than those of one large batch."""

_FAILURES = (TypeError, ValueError, AttributeError, IndexError, AssertionError)
"""What the engine's copy of a model can raise, besides RuntimeError."""

_TIMED_RECORDS = 8
_TIMINGS = 2
_BLOCK_BYTES = 31 * 2**20


def _keep_freed_memory() -> None:
    """Allocate and free one block, so that glibc keeps freed memory up to its size.

    glibc maps large blocks again, page by page and zeroed, and returns memory above a threshold to
    the system at once. Both thresholds grow with the largest block (up to 32 MB) that was ever
    freed (mallopt(3), "dynamic mmap threshold"). Without this, a private step of the paper's CNN
    spends a tenth of its time in page faults. With other C libraries it has no effect.
    """
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8)


def warn_about_reference(
    engine: FunctionalGradients, model: nn.Module, reason: str, theta: Tensor, records: Records
) -> None:
    """Log why the reference engine is used, and how slow it is on a few records."""
    inputs, targets = first_records(records, _TIMED_RECORDS)
    theta = theta.clone()  # the model may write to its parameters
    private = partial(engine.clipped_sum, theta, inputs, targets, 1.0)
    plain = partial(engine.batch_gradient, theta, inputs, targets)
    with torch_seed(0, theta.device):
        times = [_seconds(step) for step in (private, plain) if step() is not None]
    text = "per-record gradients of %s by torch.func, %.0f times as slow as SGD: %s"
    ratio = max(1.0, times[0] / max(times[1], 1e-9))
    _log.warning(text, type(model).__name__, ratio, reason)


def _seconds(step: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMINGS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


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
        by_reference: names of the submodules that `torch.func` differentiates.

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
        self.by_reference: tuple[str, ...] = ()
        self._model, self._loss = model, loss
        self._loss_gradients = LossGradients(loss)
        self._sizes = list(self.layout.sizes)
        self._floor = 0.0
        self._at_once: dict[object, int] = {}
        self._network: Network | None = None
        self._reference: FunctionalGradients | None = None

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """See `GradientEngine`."""
        check_no_autocast(theta.device)
        if len(targets) == 0:
            return
        if self._network is None:
            check_inputs(inputs)
        if self._reference is None:
            before: Tensor | None = None
            try:
                self._network_like(theta, inputs, targets)
                step = self.records_at_once(inputs)
                before = total.clone() if step < len(targets) else None
                for start in range(0, len(targets), step):
                    part = slice(start, start + step)
                    x, y = select(inputs, part), targets[part]
                    self.add_rows(theta, x, y, clip_norm, total, len(y))
                return
            except NotCoveredError as reason:
                if before is not None:
                    total.copy_(before)
                self._fall_back(str(reason), theta, (inputs, targets))
        assert self._reference is not None
        self._reference.add_clipped_sum(theta, inputs, targets, clip_norm, total)

    def records_at_once(self, inputs: Inputs) -> int:
        """How many records of a form that was seen before are computed together.

        It depends on the model and the form only, so a resumed run has the same bits.
        """
        return self._at_once[form_of(inputs)]

    def _fall_back(self, reason: str, theta: Tensor, records: Records) -> None:
        self.fallback_reason = reason
        self._network = None
        self._reference = FunctionalGradients(self._model, self._loss)
        warn_about_reference(self._reference, self._model, reason, theta, records)

    def _network_like(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> Network:
        network = self._network
        if network is not None and self._accepts(network, theta, inputs, targets):
            return network
        form, by_reference, reasons = RecordForm.of(inputs, targets), list[str](), list[str]()
        while True:
            try:
                self._network = self._built(theta, form, by_reference)
                break
            except NotCoveredError as reason:
                by_reference = _wider(by_reference, reason)
                reasons.append(str(reason))
        if by_reference:
            text = "per-record gradients of '%s' in %s by torch.func, which is slower (%s)"
            names, kind = "', '".join(by_reference), type(self._model).__name__
            _log.warning(text, names, kind, "; ".join(reasons))
        self.by_reference = tuple(by_reference)
        return self._network

    def _accepts(self, network: Network, theta: Tensor, inputs: Inputs, targets: Tensor) -> bool:
        """Whether a network runs records of this form; if not, a new one is needed."""
        if (network.dtype, network.device) != (theta.dtype, theta.device):
            return False
        if network.axes.knows(form_of(inputs)):
            return True
        try:
            self._check(network, theta, RecordForm.of(inputs, targets))
        except (RuntimeError, *_FAILURES):
            return False
        return True

    def _built(self, theta: Tensor, form: RecordForm, by_reference: list[str]) -> Network:
        """A checked network; NotCoveredError if only the engine's copy of the model fails."""
        try:
            # a model that calls view() needs the default layout
            for options in (self._options, replace(self._options, channels_last=False)):
                try:
                    network = Network(self._model, self.layout, theta, options, by_reference)
                    self._check(network, theta, form)
                    return network
                except RuntimeError as error:
                    failure: Exception = error
        except _FAILURES as error:
            failure = error
        with torch.no_grad(), torch_seed(0, theta.device):
            synthetic_inputs(form, 2, self._model, self._outputs_of(theta), theta.device)
        raise NotCoveredError(f"the layer rules cannot run the model ({failure})") from failure

    def _outputs_of(self, theta: Tensor) -> Callable[[Inputs], Tensor]:
        """The model itself, at theta."""
        parameters = self.layout.unflatten(theta.clone())  # the model may write to them
        copies = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

        def run(inputs: Inputs) -> Tensor:
            arguments = call_arguments(inputs)
            return output_of(functional_call(self._model, {**parameters, **copies}, *arguments))

        return run

    def _check(self, network: Network, theta: Tensor, form: RecordForm) -> None:
        """Find out on synthetic records where the records are, and that the rules apply."""
        network.load(theta)
        with network.axes.trial(), torch_seed(0, theta.device):
            probe = synthetic_inputs(form, PROBE_RECORDS, self._model, network, theta.device)
        check_records_stay_apart(network, probe)
        network.load(theta)
        check_outputs_agree(network, self._outputs_of(theta), probe)
        if network.own_rules:
            point = random_parameters(self.layout, theta, 0).requires_grad_()
            network.load(point.detach())
            with torch.enable_grad():
                check_own_rules(network, self.layout, self._outputs_of(point), point, probe)
            network.load(theta)
        with torch_seed(0, theta.device):
            values = _values_of_a_record(network, probe)
        self._at_once[form_of(probe)] = max(_FEWEST_AT_ONCE, _VALUES_AT_ONCE // values)

    def prepare(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> None:
        """Choose memory layout, layer rules and methods on public records; see `RowEngine`."""
        self._floor = _FLOOR
        network = self._network_like(theta, inputs, targets)
        network.load(theta)
        with torch.no_grad():
            self._loss_gradients.fix(network(inputs).detach(), targets)
        uses = self._backward(network, inputs, targets, len(targets))
        with torch.no_grad():
            for use, g in uses:
                for _ in use.pieces(g):
                    pass
        network.fix_methods()

    @property
    def network(self) -> Network | None:
        """The engine's copy of the model; None before the first batch or without rules."""
        return self._network

    def layer_uses(
        self, theta: Tensor, inputs: Inputs, targets: Tensor
    ) -> list[tuple[Use, Tensor]]:
        """Each use of parameters in a pass with the gradient at its output, records first."""
        network = self._network_like(theta, inputs, targets)
        network.load(theta)
        return self._backward(network, inputs, targets, len(targets))

    def passes(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        uses = self.layer_uses(theta, inputs, targets)
        return [tensor for use, g in uses for tensor in (*use.kept, g)]

    def evidence(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> list[Tensor]:
        """See `RowEngine`."""
        uses = self.layer_uses(theta, inputs, targets)
        if not uses:
            return []
        with torch.no_grad():
            pieces = combined([piece for use, g in uses for piece in use.pieces(g)])
            norms, _ = _clipped(uses, 1.0, self._floor)
            return [norms, *(tensor for piece in pieces for tensor in piece.evidence())]

    def add_rows(
        self,
        theta: Tensor,
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """See `RowEngine`."""
        network = self._network_like(theta, inputs, targets)
        network.load(theta)
        parts = torch.split_with_sizes(total, self._sizes)
        is_plain = clip_norm is None and used == len(targets) and not network.has_cuts
        if is_plain and self._add_unclipped(network, inputs, targets, parts):
            return
        uses = self._backward(network, inputs, targets, used)
        if not uses:
            return
        with torch.no_grad():
            norms, add = _clipped(uses, clip_norm, self._floor)
            if not math.isfinite(float(norms.sum())):
                bad = (~torch.isfinite(norms)).nonzero()[:, 0]
                cleared = [(use.without(bad), without_rows(g, bad)) for use, g in uses]
                with clear_rows(bad):
                    _, add = _clipped(cleared, clip_norm, self._floor)
            add(parts)

    def _backward(
        self, network: Network, inputs: Inputs, targets: Tensor, used: int
    ) -> list[tuple[Use, Tensor]]:
        """Each use of a layer with the gradient at its output; 0 in the rows from ``used`` on."""
        with torch.enable_grad():
            outputs = network(inputs)
        with torch.no_grad():
            weights = self._loss_gradients(outputs.detach(), targets)
            if used < len(targets):
                weights[used:] = 0.0
            return network.output_gradients(outputs, weights)

    def _add_unclipped(
        self, network: Network, inputs: Inputs, targets: Tensor, parts: Parts
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


def _values_of_a_record(network: Network, probe: Inputs) -> int:
    """How many numbers a pass keeps for each record, with the record's gradients."""
    records = PROBE_SIZES[0][0]
    with torch.enable_grad():
        outputs = network(select(probe, slice(records)))
    with torch.no_grad():
        uses = network.output_gradients(outputs, torch.ones_like(outputs))
        tensors = [tensor for use, g in uses for tensor in (*use.kept, g)]
        for piece in combined([piece for use, g in uses for piece in use.pieces(g)]):
            tensors += piece.evidence()
    return 1 + sum(tensor.numel() for tensor in tensors) // records


def _wider(by_reference: list[str], reason: NotCoveredError) -> list[str]:
    """The submodules to compute by reference after a failure: the layer of the error as well.

    Raises:
        NotCoveredError: the whole model must be computed by reference.
    """
    layer = reason.layer
    while layer and layer in by_reference:
        layer = layer.rpartition(".")[0]
    if not layer:
        raise reason
    return [*(name for name in by_reference if not name.startswith(layer + ".")), layer]


def _clipped(
    uses: list[tuple[Use, Tensor]], clip_norm: float | None, floor: float
) -> tuple[Tensor, Callable[[Parts], None]]:
    """Squared norms [b] over all parameters, and a function that adds the clipped gradients."""
    pieces = combined([piece for use, g in uses for piece in use.pieces(g)])
    streamed = max(
        (piece for piece in pieces if can_stream(piece)),
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
