"""Figures of a comparison, each saved as PNG and SVG; colours are safe for colour-blind eyes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.report.tables import method_rows

__all__ = [
    "accuracy_figure",
    "budget_figure",
    "new_axes",
    "noise_figure",
    "save_figure",
    "weights_figure",
]

# Okabe and Ito's palette; the oracle and the non-private reference are grey and black.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31")
_REFERENCE = {"Oracle": "#777777", "FedAvg": "#000000"}


def _methods(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    grouped: dict[str, list[RunResult]] = {}
    for result in results:
        grouped.setdefault(result.method, []).append(result)
    return grouped


def _colours(results: Sequence[RunResult]) -> dict[str, str]:
    """One colour for each method, the same in every figure of a comparison."""
    methods = list(_methods(results))
    own = [method for method in methods if method not in _REFERENCE]
    palette = {method: _COLOURS[k % len(_COLOURS)] for k, method in enumerate(own)}
    return palette | {m: c for m, c in _REFERENCE.items() if m in methods}


def new_axes(width: float = 8.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """An empty figure without global state, in the style of all others."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _spread_labels(
    axes: Axes, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]
) -> None:
    """Write each line's name at its end, moved apart where they would collide."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.052
    placed = -math.inf
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        placed = max(y, placed + gap)
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(x * 1.02, placed),
            color=colours[name],
            va="center",
            fontsize=9,
            annotation_clip=False,
        )


def accuracy_figure(results: Sequence[RunResult]) -> Figure:
    """Mean held-out accuracy over rounds, one line a method, with the range over seeds."""
    figure, axes = new_axes()
    grouped = _methods(results)
    colours = _colours(results)
    ends = {}
    for method, runs in grouped.items():
        curves = [
            {r.round: 100 * r.mean_accuracy for r in run.rounds if r.accuracy is not None}
            for run in runs
        ]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not rounds:
            continue
        values = np.array([[curve[r] for r in rounds] for curve in curves])
        style = "--" if method in _REFERENCE else "-"
        axes.plot(rounds, values.mean(axis=0), style, color=colours[method], lw=1.8)
        axes.fill_between(
            rounds, values.min(axis=0), values.max(axis=0), color=colours[method], alpha=0.13, lw=0
        )
        ends[method] = (rounds[-1], float(values.mean(axis=0)[-1]))
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on held-out records [%]")
    axes.grid(axis="y", alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    _spread_labels(axes, ends, colours)
    seeds = max((len(runs) for runs in grouped.values()), default=0)
    axes.set_title(f"Mean over clients; bands: range over {seeds} seed(s)", fontsize=10, loc="left")
    return figure


def noise_figure(results: Sequence[RunResult]) -> Figure:
    """Accuracy against the noise of the aggregate: less noise at the same privacy is the point."""
    figure, axes = new_axes(7.0, 4.2)
    rows = [r for r in method_rows(results) if math.isfinite(r.noise_ratio) and r.noise_ratio > 0]
    colours = _colours(results)
    for row in rows:
        spread = 100 * row.spread if math.isfinite(row.spread) else 0.0
        point = (row.noise_ratio, 100 * row.accuracy)
        axes.errorbar(*point, yerr=spread, fmt="o", color=colours[row.method])
        below = row.method in _REFERENCE  # a good method lands on the oracle: keep names apart
        axes.annotate(
            row.method,
            point,
            xytext=(8, -12 if below else 5),
            textcoords="offset points",
            color=colours[row.method],
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    )
    axes.set_xlabel("noise in the aggregated update, relative to the oracle's (log scale)")
    axes.set_ylabel("final accuracy [%], mean and deviation over seeds")
    axes.margins(x=0.15, y=0.15)
    axes.grid(alpha=0.25)
    return figure


def weights_figure(results: Sequence[RunResult]) -> Figure:
    """Weight of each client under each method; clients sorted by the true noise of an update.

    Methods with the same weights (WeiAvg and PFA) share their marks.
    """
    figure, axes = new_axes(8.5, 4.5)
    colours = _colours(results)
    first = {
        run.method: run.rounds[0]
        for run in reversed(results)
        if run.rounds and any(run.rounds[0].true_noise.values())
    }
    if not first:
        return figure
    noise = first.get("Oracle", next(iter(first.values()))).true_noise
    order = sorted(noise, key=lambda client: noise[client])
    shared: dict[tuple[float, ...], list[str]] = {}
    for method in _methods(results):
        if method in first:
            weights = tuple(round(100 * first[method].weights.get(c, 0.0), 9) for c in order)
            shared.setdefault(weights, []).append(method)
    for weights, methods in shared.items():
        reference = methods[0] in _REFERENCE
        axes.plot(
            range(len(order)),
            weights,
            "_" if reference else "o",
            ms=16 if reference else 5.5,
            mew=2.0 if reference else 0.0,
            color=colours[methods[0]],
            label=", ".join(methods),
        )
    clients = results[0].clients
    labels = [
        f"{clients[c]['epsilon']:g}\n{clients[c]['batch_size']}\n{clients[c]['n_examples']}"
        for c in order
    ]
    axes.set_xticks(range(len(order)), labels, fontsize=8)
    axes.set_xlabel(
        "epsilon, batch size and records of each client; least noisy update on the left"
    )
    axes.set_ylabel("aggregation weight in round 1 [%]")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    return figure


def budget_figure(result: RunResult) -> Figure:
    """Epsilon that each client spent, beside its budget."""
    figure, axes = new_axes(8.0, 4.0)
    ids = list(result.clients)
    planned = [result.clients[client]["planned_epsilon"] or math.nan for client in ids]
    spent = [result.epsilon_spent.get(client) or math.nan for client in ids]
    places = np.arange(len(ids))
    axes.plot(places, planned, "_", ms=18, mew=2.5, color="#777777", label="budget")
    axes.plot(places, spent, "o", ms=6, color=_COLOURS[0], label="spent")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y", alpha=0.25)
    axes.set_xticks(places, ids, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel(f"epsilon at the client's delta ({result.settings['accountant']})")
    axes.set_title(f"{result.method}, after {len(result.rounds)} rounds", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    return figure


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``name.png`` and ``name.svg``; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, dpi=150)
    figure.savefig(svg, metadata={"Date": None})
    return png, svg
