"""`IsolatedGradients`: the engine of deployed clients, in which records cannot affect each other.

A record's contribution has the same bits whatever the other records are (promise 2). The parameters
come from the server, which may choose them so that rounding errors become whole gradients. So every
decision (engine, memory layout, batch sizes) is made on synthetic records before a private record
is read, batches have only sizes that `batch_size_check` accepts, and gradients are clipped slightly
below c.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from noisewise.training.batch_size_check import (
    BATCH_SIZES,
    BatchSizeCheck,
    RowRunner,
    check_batch_sizes,
)
from noisewise.training.engine.fast_gradients import warn_about_reference
from noisewise.training.engine.layer_interface import NotCoveredError
from noisewise.training.engine.linear_model import fast_engine
from noisewise.training.gradients import (
    CLIP_MARGIN,
    FunctionalGradients,
    GradientEngine,
    Loss,
)
from noisewise.training.inputs import Inputs
from noisewise.training.isolated_batches import IsolatedBatches
from noisewise.training.operation_trace import TRACED_RECORDS
from noisewise.training.parameters import ParameterLayout, check_model, check_no_autocast
from noisewise.training.synthetic_records import (
    RecordForm,
    Records,
    first_records,
    random_parameters,
    synthetic_records,
)
from noisewise.training.torch_random import torch_seed

__all__ = ["IsolatedGradients", "RowEngine"]

_log = logging.getLogger(__name__)

_EVIDENCE_BYTES = 1 << 31
_REFERENCE_BYTES = 1 << 28
_ALIGNED = 64  # bytes, like tensors that torch allocates


class RowEngine(RowRunner, Protocol):
    """An engine that makes all decisions in `prepare`, before it reads private records."""

    layout: ParameterLayout

    def prepare(self, theta: Tensor, inputs: Inputs, targets: Tensor) -> None:
        """Make every decision on these public records; later records cannot change them.

        Raises:
            NotCoveredError: the layer rules do not cover the model, so another engine is needed.
        """
        ...

    def add_rows(
        self,
        theta: Tensor,
        inputs: Inputs,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """Add the clipped gradients of the first ``used`` rows to ``total`` [p] float64."""
        ...


@dataclass(frozen=True)
class _Prepared:
    """A prepared engine and its batches."""

    engine: RowEngine
    batches: IsolatedBatches

    @property
    def is_slow(self) -> bool:
        return self.batches.check.sizes == (1,)


class IsolatedGradients(GradientEngine):
    """Sums of clipped gradients; each contribution depends on its record and theta alone.

    A record contributes 0 if the model or the loss raises an exception for it, or if its gradient
    is NaN or infinite. Dropout draws a separate mask for each record.

    Args:
        model: its current structure, buffers and mode are copied; it is not changed.
        loss: of a batch; applied to each record separately.

    Raises:
        UnsupportedModelError: the model has BatchNorm.
        InvalidValueError: the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        check_model(model)
        self.layout = ParameterLayout.of(model)
        self._size = self.layout.size
        self._model, self._loss = model, loss
        self._by_form: dict[object, _Prepared] = {}

    def prepare(self, theta: Tensor, form: RecordForm) -> BatchSizeCheck:
        """Choose engine and batch sizes for records of a form, without reading any record.

        Args:
            theta: [p]; only its type and device are read.
            form: of the records.

        Returns:
            The accepted batch sizes.

        Raises:
            Exception: raised by the model or the loss for synthetic records.
        """
        return self._prepared(theta, form).batches.check

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
        if theta.shape != (self._size,):
            self.layout.unflatten(theta)  # raises the error that names the shapes
        if theta.data_ptr() % _ALIGNED:
            theta = theta.clone()
        prepared = self._prepared(theta, RecordForm.of(inputs, targets))
        if clip_norm is None:  # the sum for one person, or training without privacy
            self._add_plain_sum(prepared, theta, (inputs, targets), total)
            return
        limit = clip_norm * (1.0 - CLIP_MARGIN)
        prepared.batches.apply(
            inputs,
            targets,
            lambda x, y, used: prepared.engine.add_rows(theta, x, y, limit, total, used),
        )

    def _add_plain_sum(
        self, prepared: _Prepared, theta: Tensor, records: Records, total: Tensor
    ) -> None:
        """Add gradients that are not clipped, all in one batch; it may have any size."""
        inputs, targets = records
        if len(targets) == 0:
            return

        def run(x: Inputs, y: Tensor, used: int) -> None:
            prepared.engine.add_rows(theta, x, y, None, total, used)

        try:
            run(inputs, targets, len(targets))
        except Exception:
            prepared.batches.one_by_one(inputs, targets, run)

    def _prepared(self, theta: Tensor, form: RecordForm) -> _Prepared:
        key = (
            form,
            theta.dtype,
            theta.device,
            torch.get_num_threads(),
        )
        if key not in self._by_form:
            with torch_seed(0, theta.device):  # a model's dropout draws from torch's generator
                self._by_form[key] = self._choose(theta, form)
        return self._by_form[key]

    def _choose(self, theta: Tensor, form: RecordForm) -> _Prepared:
        prepared = self._checked(theta, form, padded=False)
        if prepared.is_slow:
            prepared = self._checked(theta, form, padded=True)
        if prepared.is_slow:
            _log.warning(
                "records of %s are computed one by one, which is slower: %s",
                type(self._model).__name__,
                prepared.batches.check.reason,
            )
        return prepared

    def _checked(self, theta: Tensor, form: RecordForm, *, padded: bool) -> _Prepared:
        """The fastest engine that works for synthetic records, with its batch sizes."""
        thetas = [random_parameters(self.layout, theta, seed) for seed in (0, 1)]
        largest = min(max(BATCH_SIZES), max(4, _EVIDENCE_BYTES // (4 * self.layout.size)))
        count = max(2 * TRACED_RECORDS, largest)
        engine: RowEngine
        try:
            engine = fast_engine(self._model, self._loss, padded=padded)
            records = self._accepted(engine, thetas[0], form, count)
        except NotCoveredError as reason:
            engine = FunctionalGradients(self._model, self._loss)
            largest = min(largest, max(4, _REFERENCE_BYTES // (4 * self.layout.size)))
            records = self._accepted(engine, thetas[0], form, count)
            warn_about_reference(engine, self._model, str(reason), thetas[0], records)
        about = repr((type(engine).__name__, padded, form, self.layout, theta.dtype, theta.device))
        check = check_batch_sizes(engine, thetas, records, largest, about)
        return _Prepared(engine, IsolatedBatches(check, first_records(records, 1)))

    def _accepted(self, engine: RowEngine, theta: Tensor, form: RecordForm, count: int) -> Records:
        """Prepare the engine on synthetic records that it accepts, and return them."""

        def works(inputs: Inputs, targets: Tensor) -> None:
            few = first_records((inputs, targets), 4)
            engine.prepare(theta, *few)
            engine.passes(theta, *few)

        return synthetic_records(form, count, self._model, works, theta.device)
