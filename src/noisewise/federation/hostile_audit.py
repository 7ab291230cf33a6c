"""The hostile audit: search for parameters at which one record moves a clipped sum by more than c.

A server chooses the parameters. If the rounding of a record's gradient depends on the other records
of the batch, the server can choose parameters at which rounding decides about whole gradients. With
two proportional rows in one layer, the next layer computes a difference that is 0 in exact
arithmetic and a rounding error in float32; a branch such as ReLU turns its sign into a gradient or
none. The search builds such parameters for the layers of any model, changes the best of them at
random, and compares the clipped sums with and without one record, for several numbers and orders of
records.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from noisewise.checks import positive_number
from noisewise.training.engine import make_engine
from noisewise.training.gradients import GradientEngine, Loss
from noisewise.training.inputs import select
from noisewise.training.parameters import ParameterLayout
from noisewise.training.synthetic_records import (
    RecordForm,
    Records,
    first_records,
    synthetic_records,
)

__all__ = ["HostileResult", "hostile_search", "largest_change"]

SIZES = (1, 3, 7, 15, 31, 35, 63, 131)
"""Numbers of records to which one record is added."""

_CLIP = 1.0
_PHYSICAL = 128


@dataclass(frozen=True)
class HostileResult:
    """Result of a search.

    Attributes:
        ratio: the largest change of a clipped sum by one record, divided by c.
        trials: number of pairs of sums that were compared.
        above: number of pairs that differ by more than c.
        records: number of records at the largest change, without the added one.
    """

    ratio: float
    trials: int
    above: int
    records: int

    @property
    def violated(self) -> bool:
        """Whether one record changed a sum by more than c."""
        return self.ratio > 1.0


def hostile_search(
    model: nn.Module,
    loss: Loss,
    form: RecordForm,
    *,
    engine: GradientEngine | None = None,
    seconds: float = 10.0,
    seed: int = 0,
) -> HostileResult:
    """Search parameters and batches of synthetic records for the largest change by one record.

    Args:
        model: whose gradients are attacked.
        loss: mean loss of a batch.
        form: of the records.
        engine: computes the clipped sums; by default the engine of a deployed client.
        seconds: how long to search.
        seed: of the search.

    Raises:
        InvalidValueError: ``seconds`` is not positive.
    """
    positive_number("seconds", seconds)
    engine = engine or make_engine(model, loss)
    layout = ParameterLayout.of(model)
    start = layout.flatten(model)
    records = synthetic_records(
        form,
        max(SIZES) + 64,
        model,
        lambda *records: engine.clipped_sum(start, *first_records(records, 4), _CLIP),
        start.device,
        seed=seed + 1,
    )
    generator = torch.Generator().manual_seed(seed)
    best, total = start, HostileResult(0.0, 0, 0, 0)
    deadline = time.monotonic() + seconds
    for number in itertools.count():
        change = number % 3 == 2
        theta = _changed(best, generator) if change else _cancelling(layout, start, generator)
        result = largest_change(engine, theta, records, generator)
        worst = result if result.ratio > total.ratio else total
        best = theta if worst is result else best
        counts = {"trials": total.trials + result.trials, "above": total.above + result.above}
        total = replace(worst, **counts)
        if time.monotonic() > deadline:
            break
    return total


def largest_change(
    engine: GradientEngine,
    theta: Tensor,
    records: Records,
    generator: torch.Generator,
) -> HostileResult:
    """The largest change of a clipped sum by one more record, over all numbers of `SIZES`.

    The added record comes first, last or in the middle, and the others may change their order.

    Args:
        engine: computes the clipped sums.
        theta: [p] parameters.
        records: inputs and targets.
        generator: chooses records and their order.
    """
    result = HostileResult(0.0, 0, 0, 0)
    for size in SIZES:
        order = torch.randperm(len(records[1]), generator=generator)
        others, added = order[1 : size + 1], order[:1]
        without = _sum(engine, theta, records, others)
        position = int(torch.randint(size + 1, (), generator=generator))
        for index in (
            torch.cat([others, added]),
            torch.cat([others[:position], added, others[position:]]).flip(0),
        ):
            ratio = float((_sum(engine, theta, records, index) - without).norm()) / _CLIP
            larger = ratio > result.ratio
            result = HostileResult(
                ratio if larger else result.ratio,
                result.trials + 1,
                result.above + (ratio > 1.0),
                size if larger else result.records,
            )
    return result


def _sum(engine: GradientEngine, theta: Tensor, records: Records, index: Tensor) -> Tensor:
    total = torch.zeros(len(theta), dtype=torch.float64, device=theta.device)
    for part in torch.split(index, _PHYSICAL):
        engine.add_clipped_sum(theta, select(records[0], part), records[1][part], _CLIP, total)
    return total


def _cancelling(layout: ParameterLayout, start: Tensor, generator: torch.Generator) -> Tensor:
    """Parameters with proportional rows in one layer, whose difference the next layer computes."""
    theta = start.clone()
    parts = layout.unflatten(theta)
    matrices = [part for part in parts.values() if part.dim() > 1]
    sparse = bool(torch.randint(2, (), generator=generator))
    for part in parts.values():
        if sparse:
            part.zero_()
        else:
            part.mul_(2.0 ** _integer(-3, 4, generator))
    pairs = [
        (first, second)
        for first, second in itertools.pairwise(matrices)
        if first.shape[0] > 1 and second.shape[1] % first.shape[0] == 0
    ]
    if not pairs:
        return theta
    first, second = pairs[_integer(0, len(pairs), generator)]
    half, run = first.shape[0] // 2, second.shape[1] // first.shape[0]
    units = max(1, min(half, _integer(1, 5, generator)))
    gain = 2.0 ** _integer(0, 8, generator)
    factor = (3.0, 5.0, 7.0, 1.0)[_integer(0, 4, generator)]
    for unit in range(units):
        base = torch.randint(1, 2**20, first[0].shape, generator=generator).to(theta.dtype)
        base *= 2.0 ** _integer(-14, -6, generator)
        first[unit], first[unit + half] = base, factor * base
        for row, sign in ((2 * unit, 1.0), (2 * unit + 1, -1.0)):
            if row < second.shape[0]:
                second[row] = 0.0
                second[row, unit * run : (unit + 1) * run] = sign * factor * gain
                second[row, (unit + half) * run : (unit + half + 1) * run] = -sign * gain
    _read_out(matrices, second, generator)
    return theta


def _read_out(matrices: list[Tensor], second: Tensor, generator: torch.Generator) -> None:
    """Let the layers after ``second`` pass on its outputs."""
    positions = [number for number, part in enumerate(matrices) if part is second]
    for part in matrices[positions[0] + 1 :]:
        small = 2.0 ** _integer(-6, 2, generator)
        if not bool(part.any()):
            rows = min(part.shape[0], part.shape[1])
            part[0] = small
            part.flatten(1)[range(rows), range(rows)] = small


def _changed(theta: Tensor, generator: torch.Generator) -> Tensor:
    """The same parameters with a few values set to 0, or with values scaled."""
    theta = theta.clone()
    kind = _integer(0, 3, generator)
    index = torch.randint(len(theta), (max(1, len(theta) // 50),), generator=generator)
    if kind == 0:
        theta[index] = 0.0
    elif kind == 1:
        theta[index] *= 2.0 ** _integer(-4, 5, generator)
    else:
        theta *= 2.0 ** _integer(-2, 3, generator)
    return theta


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))
