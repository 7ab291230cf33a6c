"""Clipped sums in which one record changes nothing about another one's contribution.

This is what a deployed client trains with (promise 2). The parameters come from the server, which
may choose them so that rounding errors become whole gradients. So every decision (engine, layout,
batch sizes) is made on made-up records before a private one is read, each record goes through a
batch size that `row_check` accepts, and clipping stays a little below c.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from noisewise.training.engine.fast import FastGradients
from noisewise.training.engine.layer import NotCoveredError
from noisewise.training.engine.linear import LinearGradients, is_linear
from noisewise.training.gradients import FunctionalGradients, GradientEngine, Loss
from noisewise.training.isolation import Isolation
from noisewise.training.operations import TRACED
from noisewise.training.parameters import ParameterLayout, check_model
from noisewise.training.row_check import ROW_COUNTS, RowCheck, RowRunner, check_rows
from noisewise.training.synthetic import RecordForm, random_parameters, synthetic_records
from noisewise.training.torch_random import torch_seed

__all__ = ["CLIP_MARGIN", "IsolatedGradients", "RowEngine"]

_log = logging.getLogger(__name__)

CLIP_MARGIN = 2.0**-17
"""Contributions are clipped at c (1 - 2^-17).

The rest of c covers the rounding of float64 norms and sums, whatever the order: with u = 2^-53, the
norm of n values is off by at most n u, and a sum of B contributions by at most u B^2 / 2 times c.
For n = 1e9 and two sums of B = 250,000 that is below 2^-17 c.
"""

_EVIDENCE_BYTES = 1 << 31
_ALIGNED = 64  # bytes, as torch's own tensors


class RowEngine(RowRunner, Protocol):
    """An engine whose decisions can be fixed in advance."""

    layout: ParameterLayout

    def prepare(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Make every decision on these public records; afterwards no record changes one.

        Raises:
            NotCoveredError: another engine is needed.
        """
        ...

    def add_rows(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
        used: int,
    ) -> None:
        """Add the clipped gradients of the first ``used`` rows to ``total`` [p] float64."""
        ...


@dataclass(frozen=True)
class _Prepared:
    """An engine, and how records may go through it."""

    engine: RowEngine
    isolation: Isolation

    @property
    def is_slow(self) -> bool:
        return self.isolation.check.rows == (1,)


class IsolatedGradients(GradientEngine):
    """Sums of clipped gradients; each contribution depends on its record and theta alone.

    A record for which the model or the loss raises an exception contributes 0, and so does one
    whose gradient is not finite. Dropout draws a mask of its own for each record.

    Args:
        model: gives structure, buffers and mode, as they are now; it is copied and not changed.
        loss: of a batch; applied to each record alone.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        check_model(model)
        self.layout = ParameterLayout.of(model)
        self._size = self.layout.size
        self._model, self._loss = model, loss
        self._by_form: dict[object, _Prepared] = {}

    def prepare(self, theta: Tensor, form: RecordForm) -> RowCheck:
        """Choose engine and batch sizes for records of a form, without reading any.

        Args:
            theta: only its type and device are read.
            form: of the records.

        Raises:
            Exception: whatever the model or the loss raises on made-up records.
        """
        return self._prepared(theta, form).isolation.check

    def add_clipped_sum(
        self,
        theta: Tensor,
        inputs: Tensor,
        targets: Tensor,
        clip_norm: float | None,
        total: Tensor,
    ) -> None:
        """See `GradientEngine`."""
        if theta.shape != (self._size,):
            self.layout.unflatten(theta)  # raises the error that names the shapes
        if theta.data_ptr() % _ALIGNED:
            theta = theta.clone()
        prepared = self._prepared(theta, RecordForm.of(inputs, targets))
        if clip_norm is None:  # no privacy is asked for
            if len(inputs):
                prepared.engine.add_rows(theta, inputs, targets, None, total, len(inputs))
            return
        limit = clip_norm * (1.0 - CLIP_MARGIN)
        prepared.isolation.apply(
            inputs,
            targets,
            lambda x, y, used: prepared.engine.add_rows(theta, x, y, limit, total, used),
        )

    def _prepared(self, theta: Tensor, form: RecordForm) -> _Prepared:
        key = (
            form,
            theta.dtype,
            theta.device,
            torch.get_num_threads(),
            torch.is_autocast_enabled(theta.device.type),
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
                "records of %s are taken one by one, which is slower: %s",
                type(self._model).__name__,
                prepared.isolation.check.reason,
            )
        return prepared

    def _checked(self, theta: Tensor, form: RecordForm, *, padded: bool) -> _Prepared:
        """The fastest engine that works on made-up records, with its batch sizes."""
        thetas = [random_parameters(self.layout, theta, seed) for seed in (0, 1)]
        largest = min(max(ROW_COUNTS), max(4, _EVIDENCE_BYTES // (4 * self.layout.size)))
        count = max(2 * TRACED, largest)
        engine: RowEngine
        kind = LinearGradients if is_linear(self._model, self._loss) else FastGradients
        try:
            engine = kind(self._model, self._loss, padded=padded)
            records = self._accepted(engine, thetas[0], form, count)
        except NotCoveredError as reason:
            _log.warning(
                "per-sample gradients of %s by torch.func, which is slower: %s",
                type(self._model).__name__,
                reason,
            )
            engine = FunctionalGradients(self._model, self._loss)
            records = self._accepted(engine, thetas[0], form, count)
        about = repr((type(engine).__name__, padded, form, self.layout, theta.dtype, theta.device))
        check = check_rows(engine, thetas, records, largest, about)
        return _Prepared(engine, Isolation(check, (records[0][:1], records[1][:1])))

    def _accepted(
        self, engine: RowEngine, theta: Tensor, form: RecordForm, count: int
    ) -> tuple[Tensor, Tensor]:
        """Made-up records on which the engine is prepared."""

        def works(inputs: Tensor, targets: Tensor) -> None:
            engine.prepare(theta, inputs[:4], targets[:4])
            engine.passes(theta, inputs[:4], targets[:4])

        return synthetic_records(form, count, self._model, works, theta.device)
