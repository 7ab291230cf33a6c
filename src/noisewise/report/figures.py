"""Charts of a comparison: main metric over rounds and against noise, weights of clients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.federation.task_info import MetricInfo, TaskInfo
from noisewise.palette import GRID, INK, MUTED
from noisewise.report.chart import (
    FONT_SIZE,
    Box,
    Chart,
    Table,
    add_legend,
    add_tips,
    method_styles,
    new_axes,
    overlap,
    plain_numbers,
    text_width,
)
from noisewise.report.curves import accuracy_curve, draw_curves, label_ends
from noisewise.report.tables import by_method, headings, mean_weights, method_rows

__all__ = ["accuracy_chart", "noise_chart", "weights_chart"]

_MOST_TIPS = 40
_REFERENCES = {"FedAvg": "FedAvg has no privacy", "Oracle": "Oracle knows the true noise"}
_LONG = 110  # typographic points, of a name
_NAME_HEIGHT = 1.3 * FONT_SIZE
_SHIFTS = (0, 13, -13, 26, -26, 39, -39, 52, -52, 65, -65)  # of a name, in typographic points
_LOG_RATIO = 2.0  # a log axis needs a range of at least this ratio, or it has too few labels


def accuracy_chart(results: Sequence[RunResult]) -> Chart:
    """Chart of the main metric over rounds: a line for each method, with the range over seeds."""
    figure, axes = new_axes()
    metric = results[0].metric if results else TaskInfo().main
    shown = partial(_shown, metric)
    grouped = by_method(results)
    styles = method_styles(list(grouped))
    ends: dict[str, tuple[float, float]] = {}
    tips: dict[str, tuple[str, ...]] = {}
    means: dict[str, dict[int, str]] = {}
    lines: dict[str, tuple[list[int], list[float]]] = {}
    curves = {method: accuracy_curve(runs) for method, runs in grouped.items()}
    curves = {method: curve for method, curve in curves.items() if curve.rounds}
    if curves:
        draw_curves(axes, curves, styles)
    for method, (rounds, values) in curves.items():
        mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
        ends[method] = (rounds[-1], float(mean[-1]))
        means[method] = {
            r: shown(m) + (f" ({shown(a)} to {shown(b)})" if len(values) > 1 else "")
            for r, m, a, b in zip(rounds, mean, low, high, strict=True)
        }
        step = math.ceil(len(rounds) / _MOST_TIPS)
        lines[method] = (rounds[::step], list(mean[::step]))
    for number, (rounds, heights) in enumerate(lines.values()):
        # Lines can be close together, so each tooltip lists all methods of the round.
        add_tips(axes, str(number), rounds, heights)
        tips[str(number)] = tuple(
            "\n".join(
                [f"round {r}"]
                + [f"{m}: {c[r]} {metric.unit}".rstrip() for m, c in means.items() if r in c]
            )
            for r in rounds
        )
    axes.set_xlabel("round")
    deployed = bool(results) and all(run.deployed for run in results)
    unit = f" [{metric.unit}]" if metric.unit else ""
    records = f"{'public' if deployed else 'held-out'} records"
    axes.set_ylabel(f"{metric.name} on {records}{unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    label_ends(axes, ends, {method: style.text for method, style in styles.items()})
    every = sorted({r for column in means.values() for r in column})
    seeds = max((len(runs) for runs in grouped.values()), default=0)
    band = f"; bands show the range over {seeds} seeds" if seeds > 1 else ""
    rows = tuple((str(r), *(means[m].get(r, "") for m in means)) for r in every)
    over = "Mean over the clients of the " + metric.name + " on their"
    if metric.combine == "records":
        over = f"{metric.name.capitalize()} of all clients'"
    names = {method.partition("(")[0] for method in means}
    references = [text for name, text in _REFERENCES.items() if name in names]
    direction = "" if metric.larger_is_better else " Lower is better."
    caption = (
        f"{over} held-out records{band}.{direction}"
        + f" Dashed lines are references: {', '.join(references)}." * bool(references)
    )
    if not all(run.shares_model for run in results):
        caption += " Under Alone every client has its own model."
    if deployed:
        caption = f"{metric.name.capitalize()} on the server's own public records{band}."
    return Chart(
        "accuracy" if metric.is_accuracy else "score",
        f"{metric.name.capitalize()} over rounds",
        caption,
        figure,
        Table(("round", *(f"{method}{unit}" for method in means)), rows),
        tips,
    )


def _shown(metric: MetricInfo, value: float) -> str:
    """A number of the axis, which is in the metric's unit."""
    return metric.number(value / metric.scale)


def noise_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the main metric against the noise of the combined update; None if unknown."""
    rows = [
        row
        for row in method_rows(results)
        if math.isfinite(row.noise_ratio) and row.noise_ratio > 0 and math.isfinite(row.score)
    ]
    if not rows:
        return None
    metric, factor = rows[0].metric, rows[0].metric.scale
    figure, axes = new_axes(grid="both")
    styles = method_styles(list(by_method(results)))
    tips: dict[str, tuple[str, ...]] = {}
    errors: dict[str, float] = {}
    for number, row in enumerate(rows):
        error = factor * row.standard_error if math.isfinite(row.standard_error) else 0.0
        errors[row.method] = error
        point = (row.noise_ratio, factor * row.score)
        style = styles[row.method]
        marker = "_" if style.marker == "|" else style.marker
        axes.errorbar(
            *point, yerr=error, fmt=marker, ms=14 if marker == "_" else 6, color=style.colour
        )
        tips[str(number)] = (f"{row.method}: {row.score_text()}, noise {row.noise_ratio:.4g}",)
        add_tips(axes, str(number), [point[0]], [point[1]])
    ratios = [row.noise_ratio for row in rows]
    wide = max(ratios) >= _LOG_RATIO * min(ratios)
    axes.margins(x=0.2, y=0.15)
    if wide:
        axes.set_xscale("log")
        plain_numbers(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    names = {row.method: (row.noise_ratio, factor * row.score) for row in rows}
    colours = {method: styles[method].text for method in names}
    _name_points(figure, axes, names, errors, colours)
    scale = " (log scale)" if wide else ""
    axes.set_xlabel(f"noise of the combined update / oracle's{scale}")
    axes.set_ylabel(f"final {metric.label}")
    return Chart(
        "noise",
        f"{metric.name.capitalize()} against noise",
        "Noise in the combined update, divided by the least noise that any weights can reach "
        "with the same budgets (1 is the best)."
        + " Bars: standard error over seeds."
        * (max(row.seeds for row in rows) > 1)
        + " Not shown: methods whose noise has no closed form (PFA), without noise (FedAvg) and "
        "without a combined update (Alone)." * (len(rows) < len(styles)),
        figure,
        Table(
            ("method", "noise / oracle's", headings(rows)[1]),
            tuple((r.method, f"{r.noise_ratio:.4g}", r.score_text()) for r in rows),
        ),
        tips,
    )


def _name_points(
    figure: Figure,
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    errors: Mapping[str, float],
    colours: Mapping[str, str],
) -> None:
    """Write each point's name where it covers least, with a leader line if it is not beside it.

    Args:
        figure: of the axes.
        axes: axes with the points.
        points: by name.
        errors: half the length of each point's vertical bar, by name.
        colours: of the names.
    """
    axes.autoscale_view()
    figure.draw_without_rendering()  # computes the scales
    unit = 72 / figure.dpi  # typographic points in a pixel
    taken: list[Box] = []
    places: dict[str, tuple[float, float]] = {}
    for name, (x, y) in points.items():
        ends = [axes.transData.transform((x, y + d)) for d in (0.0, -errors[name], errors[name])]
        (left, middle), (_, low), (_, high) = ([float(v) * unit for v in end] for end in ends)
        places[name] = left, middle
        taken += [(left - 4, middle - 4, left + 4, middle + 4), (left - 1, low, left + 1, high)]
    for name in sorted(points, key=lambda n: -places[n][1]):
        x, y = places[name]
        shifted = _name_boxes(x, y, text_width(name))
        # The layout moves points sideways to make room for long names, so these need whole rows.
        spare = 0.0 if text_width(name) < _LONG else 1e4
        rows = [(left - spare, low, right + spare, top) for left, low, right, top in shifted]
        costs = [
            sum(overlap(row, other) for other in taken) + _outside(box, axes, unit)
            for row, box in zip(rows, shifted, strict=True)
        ]
        best = costs.index(min(costs))  # the nearest of the best
        taken.append(rows[best])
        box = shifted[best]
        dx, dy = box[0] - x, box[1] + _NAME_HEIGHT / 2 - y
        line = {"arrowstyle": "-", "color": colours[name], "lw": 0.7, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            name,
            points[name],
            xytext=(dx, dy),
            textcoords="offset points",
            color=colours[name],
            va="center",
            fontsize=FONT_SIZE,
            arrowprops=line | {"relpos": (float(dx < 0), 0.5)} if abs(dy) > 1 else None,
        )


def _name_boxes(x: float, y: float, width: float) -> list[Box]:
    """Return places of a name beside its point, right and left, then further and further away."""
    lefts = [left for far in (9, 23) for left in (x + far, x - far - width)]
    bottoms = [y + dy - _NAME_HEIGHT / 2 for dy in _SHIFTS]
    return [
        (left, low, left + width, low + _NAME_HEIGHT)
        for low, left in itertools.product(bottoms, lefts)
    ]


def _outside(box: Box, axes: Axes, unit: float) -> float:
    """Area of a box of typographic points above, below or on the left of the axes."""
    left, bottom, _, top = (float(v) * unit for v in axes.bbox.extents)
    area = (box[2] - box[0]) * (box[3] - box[1])
    return area - overlap(box, (left, bottom, math.inf, top))


def _own_budgets(results: Sequence[RunResult]) -> RunResult | None:
    """Return a run with known noise, if possible one in which clients use their own budgets."""
    with_noise = [
        r for r in results if r.guarantee is not None and r.rounds and r.rounds[0].true_noise
    ]
    with_own_budgets = [r for r in with_noise if r.own_budgets]
    return next(
        iter([r for r in with_own_budgets if r.is_reference] + with_own_budgets + with_noise), None
    )


def _oracle_weights(run: RunResult) -> dict[str, float]:
    """Return the oracle's weights (from the true noise) in percent, mean over rounds."""
    sums = dict.fromkeys(run.clients, 0.0)
    for record in run.rounds:
        inverse = {c: 1 / v for c, v in record.true_noise.items() if v > 0 and math.isfinite(v)}
        total = sum(inverse.values())
        for client, value in inverse.items():
            sums[client] += 100 * value / total / len(run.rounds)
    return sums


def _shared_weights(
    results: Sequence[RunResult], seed: int, order: Sequence[str]
) -> dict[tuple[float, ...], list[str]]:
    """Return the private methods by their weights (of the clients in ``order``), for one seed."""
    shared: dict[tuple[float, ...], list[str]] = {}
    for method, runs in by_method(results).items():
        run = next((r for r in runs if r.seed == seed and r.rounds), None)
        if run is not None and run.guarantee is not None and not run.is_reference:
            weights = mean_weights(run)
            shared.setdefault(tuple(round(weights[c], 9) for c in order), []).append(method)
    return shared


def weights_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the weight of each client under each method; None if no run is private.

    One row for each client, the least noisy first, with the oracle's weight. Methods with the same
    weights share their marks.
    """
    reference = _own_budgets(results)
    if reference is None:
        return None
    oracle = _oracle_weights(reference)
    order = sorted(oracle, key=lambda client: -oracle[client])
    shared = _shared_weights(results, reference.seed, order)
    named = {
        c: f"ε {settings['epsilon']:g}, b {settings['batch_size']}, N {settings['n_examples']}"
        for c, settings in ((c, reference.clients[c]) for c in order)
    }
    best = tuple(oracle[c] for c in order)
    figure, tips = _draw_weights(results, best, shared, named)
    columns = {"oracle": best} | {", ".join(methods): w for w, methods in shared.items()}
    rows = tuple(
        (c, named[c], *(f"{column[k]:.2f}" for column in columns.values()))
        for k, c in enumerate(order)
    )
    return Chart(
        "weights",
        "Weight of each client",
        f"Weight of each client's update (seed {reference.seed}), least noisy update first. ε: the "
        "client's budget, b: its batch size, N: its number of training records. The grey bar is "
        "the oracle's weight, which requires the true noise.",
        figure,
        Table(("client", "settings", *(f"{name} [%]" for name in columns)), rows),
        tips,
    )


def _draw_weights(
    results: Sequence[RunResult],
    oracle: tuple[float, ...],
    shared: Mapping[tuple[float, ...], Sequence[str]],
    named: Mapping[str, str],
) -> tuple[Figure, dict[str, tuple[str, ...]]]:
    """Draw a row for each client and a mark for each method; return figure and tooltips."""
    small = len(named) > 30
    figure, axes = new_axes(4.8, 1.8 + (0.16 if small else 0.22) * len(named), grid="x")
    styles = method_styles(list(by_method(results)))
    rows = np.arange(len(named))
    tips: dict[str, tuple[str, ...]] = {}

    def draw(label: str, values: tuple[float, ...], shift: float, **marks: Any) -> None:
        axes.plot(values, rows + shift, ls="", label=label, **marks)
        add_tips(axes, str(len(tips)), values, list(rows + shift))
        tips[str(len(tips))] = tuple(
            f"{label}: {value:.2f} % for {client} ({settings})"
            for value, (client, settings) in zip(values, named.items(), strict=True)
        )

    for row in rows[1::2]:
        axes.axhspan(row - 0.5, row + 0.5, color=GRID, alpha=0.35, lw=0)
    draw("oracle", oracle, 0, marker="|", ms=9 if small else 13, mew=2.2, color=MUTED)
    for number, (weights, methods) in enumerate(shared.items()):
        style = styles[methods[0]]
        shift = 0.56 * ((number + 0.5) / len(shared) - 0.5)
        marks = {"marker": style.marker, "ms": 4.5, "mew": 0, "color": style.colour}
        draw(", ".join(methods), weights, shift, **marks)
    names = [f"{client}: {settings}" for client, settings in named.items()]
    axes.set_yticks(rows, names, fontsize=8.0 if small else 8.5, color=INK)
    axes.set_ylim(len(named) - 0.4, -0.6)
    # Weights differ by orders of magnitude and can be 0: linear up to 1 %, logarithmic above.
    largest = max(map(max, [oracle, *shared]))
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-0.05, 1.25 * max(largest, 1.0))
    marks_at = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100) if tick <= max(largest, 1.0)]
    axes.set_xticks(marks_at, [f"{tick:g}" for tick in marks_at])
    axes.minorticks_off()
    axes.set_xlabel("mean weight [%], logarithmic above 1 %")
    add_legend(figure, axes)
    return figure, tips
