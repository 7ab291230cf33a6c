"""Does joining pay? Each client's accuracy alone and with the common model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from noisewise.federation.results import RunResult
from noisewise.federation.task_info import MetricInfo, TaskInfo
from noisewise.palette import GRID, INK, MUTED
from noisewise.report.chart import (
    Box,
    Chart,
    Table,
    add_tips,
    method_styles,
    new_axes,
    overlap,
)
from noisewise.report.tables import by_method, mean_weights

__all__ = ["ClientGain", "Joining", "does_joining_pay", "joining_chart"]

_MOST_NAMES = 24
_EXTREMES = 4
_NAME_SIZE = 8.5
# Where a name can be: offset of its corner from the point, and the share of its width on the left.
_PLACES = (
    (3, 2, 0), (-3, 2, 1), (3, -10, 0), (-3, -10, 1), (5, -4, 0), (-5, -4, 1), (0, 4, 0.5),
    (0, -11, 0.5), (0, 12, 0.5), (0, -19, 0.5), (9, 9, 0), (-9, 9, 1), (9, -16, 0), (-9, -16, 1),
)  # fmt: skip


@dataclass(frozen=True)
class ClientGain:
    """One client's main metric alone and with the common model, in its unit, mean over seeds.

    Attributes:
        client: its id.
        n_examples: number of its training records.
        batch_size: of its steps, expected.
        epsilon: of its budget.
        weight: of its updates in the common model in percent, mean over rounds and seeds.
        alone: figure of its own model.
        common: figure of the common model on the same held-out records.
        alone_error: standard error over seeds; NaN for one seed.
        common_error: the same of the common model.
        gain_error: standard error of the paired differences.
        larger_is_better: direction of the metric.
    """

    client: str
    n_examples: int
    batch_size: int
    epsilon: float
    weight: float
    alone: float
    common: float
    alone_error: float = math.nan
    common_error: float = math.nan
    gain_error: float = math.nan
    larger_is_better: bool = True

    @property
    def gain(self) -> float:
        """By how much the common model is better, in the metric's unit."""
        return self.common - self.alone if self.larger_is_better else self.alone - self.common


@dataclass(frozen=True)
class Joining:
    """Which clients gain from a common model.

    Attributes:
        method: the method of the common model: the most accurate one without disclosures, or else
            the most accurate private one.
        alone: the label of the method whose clients train alone.
        clients: sorted by gain, the largest first.
        methods: the gains under every private method that both were run with.
        seeds: number of seeds that were run with both.
        metric: that is compared.
    """

    method: str
    alone: str
    clients: tuple[ClientGain, ...]
    methods: Mapping[str, tuple[ClientGain, ...]]
    seeds: int
    metric: MetricInfo = field(default_factory=lambda: TaskInfo().main)

    def number(self, value: float, sign: str = "") -> str:
        """A number that is in the metric's unit already, without the unit."""
        return f"{value:{sign}.1f}" if self.metric.unit == "%" else f"{value:{sign}.4g}"

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "points" if self.metric.unit == "%" else self.metric.unit

    @property
    def sentence(self) -> str:
        """How many clients gain, in one sentence."""
        n_gains, total = sum(c.gain > 0 for c in self.clients), len(self.clients)
        clearly = sum(c.gain > 2 * c.gain_error for c in self.clients)
        certain = f" ({clearly} by more than two standard errors)" if self.seeds > 1 else ""
        mean = float(np.mean([c.gain for c in self.clients]))
        better = "higher" if self.metric.larger_is_better else "lower"
        unit = "percentage points" if self.metric.unit == "%" else self.metric.unit
        gain = f"{self.number(mean, '+')} {unit}".rstrip()
        return (
            f"{n_gains} of {total} clients gain: their {self.metric.name} is {better} with the "
            f"common model of {self.method} than with a model that they train alone{certain}. The "
            f"mean gain over all clients is {gain}."
        )

    def with_error(self, value: float, error: float, sign: str = "") -> str:
        """A number with its standard error, if there is one."""
        text = self.number(value, sign)
        return f"{text} ± {self.number(error)}" if math.isfinite(error) else text

    @property
    def table(self) -> Table:
        """One row for each client, the largest gain first."""
        unit = f" [{self.metric.unit}]" if self.metric.unit else ""
        gain = f"gain [{self.unit}]" if self.unit else "gain"
        settings = ("records", "batch size", "epsilon", "weight [%]")
        headings = ("client", *settings, f"alone{unit}", f"common{unit}", gain)
        rows = tuple(
            (
                c.client,
                f"{c.n_examples:,}",
                f"{c.batch_size:,}",
                f"{c.epsilon:.4g}",
                f"{c.weight:.2f}",
                self.number(c.alone),
                self.number(c.common),
                self.with_error(c.gain, c.gain_error, "+"),
            )
            for c in self.clients
        )
        return Table(headings, rows)

    @property
    def method_table(self) -> Table:
        """One row for each private method."""
        rows = []
        for method, clients in self.methods.items():
            gains = [c.gain for c in clients]
            n_gains = sum(gain > 0 for gain in gains)
            cells = (float(np.mean(gains)), min(gains), max(gains))
            shown = [self.number(value, "+") for value in cells]
            rows.append((method, f"{n_gains} of {len(gains)}", *shown))
        mean = f"mean gain [{self.unit}]" if self.unit else "mean gain"
        headings = ("method", "clients that gain", mean, "smallest gain", "largest gain")
        return Table(headings, tuple(rows))


def does_joining_pay(results: Sequence[RunResult]) -> Joining | None:
    """Compare every client alone with the common model.

    Args:
        results: runs of one or more methods and seeds.

    Returns:
        The comparison; None without a run in which the clients train alone, or without a private
        common model for one of its seeds.
    """
    grouped = by_method([run for run in results if run.last_evaluated is not None])
    baselines = {m: runs for m, runs in grouped.items() if not runs[0].shares_model}
    common = {
        method: runs
        for method, runs in grouped.items()
        if not runs[0].is_reference and not runs[0].deployed
    }
    if not baselines:
        return None
    alone = min(baselines, key=lambda method: _rank(baselines[method]))
    gains = {method: _gains(baselines[alone], runs) for method, runs in common.items()}
    gains = {method: clients for method, clients in gains.items() if clients}
    if not gains:
        return None
    without_needs = [method for method in gains if not common[method][0].needs]
    best = min(without_needs or gains, key=lambda method: _rank(common[method]))
    seeds = {run.seed for run in baselines[alone]} & {run.seed for run in common[best]}
    metric = baselines[alone][0].metric
    return Joining(best, alone, gains[best], gains, len(seeds), metric)


def _rank(runs: Sequence[RunResult]) -> float:
    """A number that is smaller for a better method."""
    return runs[0].metric.rank(float(np.mean([run.score for run in runs])))


def _gains(alone: Sequence[RunResult], common: Sequence[RunResult]) -> tuple[ClientGain, ...]:
    """The gains of the clients over the seeds that both have; empty without such a seed."""
    by_seed = {run.seed: run for run in common}
    pairs = [(run, by_seed[run.seed]) for run in alone if run.seed in by_seed]
    if not pairs:
        return ()
    weights = [mean_weights(joint) for _, joint in pairs]
    rows = []
    for client, facts in pairs[0][0].clients.items():
        own, joint = (np.array([_figure(pair[side], client) for pair in pairs]) for side in (0, 1))
        if not np.isfinite(own + joint).all():
            continue
        errors = (_standard_error(own), _standard_error(joint), _standard_error(joint - own))
        means = (float(own.mean()), float(joint.mean()))
        larger = alone[0].metric.larger_is_better
        weight = float(np.mean([joint_weights[client] for joint_weights in weights]))
        settings = (facts["n_examples"], facts["batch_size"], facts["epsilon"], weight)
        rows.append(ClientGain(client, *settings, *means, *errors, larger))
    return tuple(sorted(rows, key=lambda row: (-row.gain, row.client)))


def _figure(run: RunResult, client: str) -> float:
    return run.metric.scale * run.by_client(run.metric.name).get(client, math.nan)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def joining_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of each client's main metric with the common model against that alone."""
    joining = does_joining_pay(results)
    if joining is None:
        return None
    clients, metric = joining.clients, joining.metric
    figure, axes = new_axes(4.8, 4.6, grid="both")
    style = method_styles(list(by_method(results)))[joining.method]
    alone, common = [c.alone for c in clients], [c.common for c in clients]
    high = max(*alone, *common)
    errors = _bars([c.alone_error for c in clients]), _bars([c.common_error for c in clients])
    left = min(value - error for value, error in zip(alone, errors[0], strict=True))
    bottom = min(value - error for value, error in zip(common, errors[1], strict=True))
    margin = 0.08 * (high - min(*alone, *common))
    margin += 0.5 if metric.unit == "%" else 1e-9 + 0.01 * abs(high)
    axes.set_xlim(left - margin, high + margin)
    axes.set_ylim(bottom - margin, high + margin)
    line = [min(left, bottom) - margin, high + margin]
    larger = metric.larger_is_better
    axes.fill_between(line, line, line[0 if larger else 1], color=GRID, alpha=0.5, lw=0)
    axes.plot(line, line, color=MUTED, lw=1)
    axes.annotate(
        "loses",
        (0.98, 0.03) if larger else (0.02, 0.94),
        xycoords="axes fraction",
        color=MUTED,
        ha="right" if larger else "left",
        fontsize=9,
    )
    axes.errorbar(
        alone, common, xerr=errors[0], yerr=errors[1], fmt="none", elinewidth=0.7,
        ecolor=style.colour, alpha=0.35,
    )  # fmt: skip
    axes.plot(alone, common, style.marker, ms=6, mew=0, color=style.colour, alpha=0.9)
    add_tips(axes, "clients", alone, common)
    unit = f" [{metric.unit}]" if metric.unit else ""
    axes.set_xlabel(f"{metric.name} of the client's own model{unit}")
    axes.set_ylabel(f"{metric.name} of the common model, {joining.method}{unit}")
    shown = (
        clients if len(clients) <= _MOST_NAMES else (*clients[:_EXTREMES], *clients[-_EXTREMES:])
    )
    names = _short_names([c.client for c in clients])
    everything = list(zip(alone, common, strict=True))
    _write_names(figure, axes, [(names[c.client], (c.alone, c.common)) for c in shown], everything)
    bars = " Bars: standard error over seeds." if joining.seeds > 1 else ""
    named = (
        f" Names: the {_EXTREMES} largest and smallest gains." if len(shown) < len(clients) else ""
    )
    return Chart(
        "joining",
        "Does joining pay?",
        "One mark for each client, on its own held-out records. A client "
        f"{'above' if larger else 'below'} the line gains from the common model; a client in the "
        f"shaded area loses.{bars}{named}",
        figure,
        joining.table,
        {"clients": tuple(_tip(c, joining) for c in clients)},
    )


def _bars(errors: Sequence[float]) -> list[float]:
    return [error if math.isfinite(error) else 0.0 for error in errors]


def _write_names(
    figure: Figure,
    axes: Axes,
    names: Sequence[tuple[str, tuple[float, float]]],
    points: Sequence[tuple[float, float]],
) -> None:
    """Write each name next to its point, where it overlaps other points and names least."""
    figure.draw_without_rendering()  # computes the scales
    unit = 72 / figure.dpi  # typographic points in a pixel
    marks = [tuple(float(v) * unit for v in axes.transData.transform(p)) for p in points]
    taken = [(x - 3.0, y - 3.0, x + 3.0, y + 3.0) for x, y in marks]
    left, bottom, right, top = (float(v) * unit for v in axes.bbox.extents)
    frame = (left, bottom, right, top)
    for name, point in names:
        x, y = (float(v) * unit for v in axes.transData.transform(point))
        width, height = 0.58 * _NAME_SIZE * len(name), 0.8 * _NAME_SIZE
        boxes = [
            (x + dx - share * width, y + dy, x + dx + (1 - share) * width, y + dy + height)
            for dx, dy, share in _PLACES
        ]
        box = min(boxes, key=lambda box: sum(overlap(box, o) for o in taken) + _outside(box, frame))
        taken.append(box)
        axes.annotate(
            name, point, xytext=(box[0] - x, box[1] - y), textcoords="offset points", color=INK,
            fontsize=_NAME_SIZE, va="bottom", ha="left",
        )  # fmt: skip


def _outside(box: Box, frame: Box) -> float:
    """Area of a box that lies outside of a frame, weighted so that it is avoided."""
    area = (box[2] - box[0]) * (box[3] - box[1])
    return 10 * (area - overlap(box, frame))


def _tip(client: ClientGain, joining: Joining) -> str:
    alone = joining.with_error(client.alone, client.alone_error)
    common = joining.with_error(client.common, client.common_error)
    unit = joining.metric.unit and f" {joining.metric.unit}"
    gain = f"{joining.number(client.gain, '+')} {joining.unit}".rstrip()
    return (
        f"{client.client} ({client.n_examples} records, epsilon {client.epsilon:.4g}): alone "
        f"{alone}{unit}, {joining.method} {common}{unit}, gain {gain}"
    )


def _short_names(ids: Sequence[str]) -> dict[str, str]:
    """The ids without a common beginning such as ``client-``, if only numbers remain."""
    parts = {client: re.fullmatch(r"(.*?)(\d+)", client) for client in ids}
    if len({part and part[1] for part in parts.values()}) > 1:
        return {client: client for client in ids}
    return {client: part[2] if part else client for client, part in parts.items()}
