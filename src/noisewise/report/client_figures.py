"""Charts of the clients: estimated and true noise, epsilon spent, and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.palette import BLUE, INK, MUTED
from noisewise.report.chart import (
    Chart,
    Table,
    add_tips,
    marker_symbol,
    method_styles,
    new_axes,
    plain_numbers,
)
from noisewise.report.curves import label_ends
from noisewise.report.tables import by_method

__all__ = ["budget_chart", "estimate_chart", "fairness_chart"]


def estimate_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of estimated against true noise of each client's update; None without estimates."""
    points_by_method: dict[str, list[tuple[str, float, float]]] = {}
    for run in results:
        last = next((r for r in reversed(run.rounds) if r.noise_estimate), None)
        if last is None or not last.noise_estimate or "true_variance" in run.needs:
            continue  # no estimate, or the server received the true noise
        for client, estimate in last.noise_estimate.items():
            pair = (last.true_noise.get(client, math.nan), estimate)
            if min(pair) > 0 and all(map(math.isfinite, pair)):
                label = f"{run.method}, seed {run.seed}, {client}"
                points_by_method.setdefault(run.method, []).append((label, *pair))
    if not points_by_method:
        return None
    figure, axes = new_axes(4.8, 4.0, grid="both")
    styles = method_styles(list(by_method(results)))
    values = [
        value for points in points_by_method.values() for _, *pair in points for value in pair
    ]
    line = [0.7 * min(values), 1.4 * max(values)]
    axes.plot(line, line, color=MUTED, lw=1)
    axes.annotate(
        "exact", (line[1], line[1]), ha="right", va="bottom", color=MUTED, xytext=(-14, 0),
        textcoords="offset points", rotation=0, fontsize=9,
    )  # fmt: skip
    tips, rows = {}, []
    for number, (method, points) in enumerate(points_by_method.items()):
        style = styles[method]
        truth, estimates = [p[1] for p in points], [p[2] for p in points]
        axes.plot(truth, estimates, style.marker, ms=5, mew=0, color=style.colour, alpha=0.75)
        add_tips(axes, str(number), truth, estimates)
        tips[str(number)] = tuple(
            f"{label}: true {t:.4g}, estimated {e:.4g}" for label, t, e in points
        )
        rows += [(label, f"{t:.4g}", f"{e:.4g}", f"{e / t:.3f}") for label, t, e in points]
        axes.annotate(
            f"{marker_symbol(style.marker)} {method}", (0.03, 0.95 - 0.07 * number),
            xycoords="axes fraction", color=style.text, va="top", fontsize=9.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_numbers(axes, "x")
    plain_numbers(axes, "y")
    axes.set_xlabel("true noise energy of an update (log scale)")
    axes.set_ylabel("the server's estimate (log scale)")
    return Chart(
        "estimates",
        "Estimated and true noise",
        "The server sees only the updates and estimates how much noise each contains. The true "
        "noise is known only in a simulation. One mark for each client and seed, from the last "
        "round with an estimate. Noise energy: the expected squared norm of an update's noise.",
        figure,
        Table(("method, seed, client", "true", "estimate", "estimate / true"), tuple(rows)),
        tips,
    )


def _spent(run: RunResult, client: str) -> list[tuple[int, float]]:
    values = [(r.round, r.epsilon_spent.get(client)) for r in run.rounds]
    return [(number, value) for number, value in values if value is not None and value > 0]


def budget_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the epsilon that each client spent in one run; None if no run is private."""
    private = [r for r in results if r.guarantee is not None and r.rounds]
    run = next((r for r in private if r.own_budgets), next(iter(private), None))
    if run is None:
        return None
    figure, axes = new_axes()
    tips: dict[str, tuple[str, ...]] = {}
    budgets: dict[float, list[str]] = {}
    ends: dict[str, tuple[float, float]] = {}
    for number, (client, settings) in enumerate(run.clients.items()):
        curve, budget = _spent(run, client), settings["planned_epsilon"]
        if not curve or budget is None:
            continue
        rounds, spent = [r for r, _ in curve], [e for _, e in curve]
        axes.plot(rounds, spent, color=BLUE, lw=1.2, alpha=0.6)
        axes.plot(rounds[-1:], [budget], "_", ms=12, mew=2, color=MUTED)
        budgets.setdefault(budget, []).append(client)
        add_tips(axes, str(number), rounds[-1:], spent[-1:])
        tips[str(number)] = (
            f"{client}: {spent[-1]:.4g} of {budget:g} spent after round {rounds[-1]}",
        )
    low, high = min(axes.dataLim.intervaly), max(axes.dataLim.intervaly)
    wide = high > 8 * low > 0
    axes.margins(x=0.02, y=0.1)
    if wide:
        axes.set_yscale("log")
        plain_numbers(axes, "y")
    last = len(run.rounds)
    for budget, members in sorted(budgets.items()):
        count = f" ({len(members)} clients)" if len(members) > 1 else ""
        ends[f"{budget:g}{count}"] = (last, budget)
    if len(ends) <= 14:
        label_ends(axes, ends, dict.fromkeys(ends, INK))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("epsilon spent so far" + (" (log scale)" if wide else ""))
    methods = {m: runs[0] for m, runs in by_method(private).items()}
    rows = tuple(
        (
            client,
            f"{settings['epsilon']:g}",
            f"{settings['delta']:g}",
            *(f"{methods[m].epsilon_spent.get(client) or 0:.4g}" for m in methods),
        )
        for client, settings in run.clients.items()
    )
    return Chart(
        "budgets",
        "Epsilon spent by each client",
        f"{run.method}, seed {run.seed}, accountant {run.settings['accountant']}. One line for "
        "each client. The grey bar and the label show its budget, which is never exceeded.",
        figure,
        Table(("client", "budget", "delta", *(f"spent with {m}" for m in methods)), rows),
        tips,
    )


def fairness_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the main metric of every client, a row for each method; None without any."""
    grouped = {
        method: [r for r in runs if r.last_evaluated is not None and not r.deployed]
        for method, runs in by_method(results).items()
    }
    grouped = {method: runs for method, runs in grouped.items() if runs}
    if not grouped:
        return None
    metric = next(iter(grouped.values()))[0].metric
    figure, axes = new_axes(4.8, max(2.0, 1.0 + 0.42 * len(grouped)), grid="x")
    styles = method_styles(list(by_method(results)))
    tips, rows = {}, []
    for row, (method, runs) in enumerate(grouped.items()):
        points = [
            (metric.scale * score, f"{method}, seed {run.seed}, {client}: {metric.text(score)}")
            for run in runs
            for client, score in run.by_client(metric.name).items()
            if math.isfinite(score)
        ]
        if not points:
            continue
        scores = [score for score, _ in points]
        # A fixed pattern instead of random jitter, so the same runs give the same picture.
        heights = [row + 0.11 * ((5 * k) % 7 - 3) / 3 for k in range(len(points))]
        axes.plot(scores, heights, "o", ms=4, mew=0, alpha=0.45, color=styles[method].colour)
        axes.plot([np.mean(scores)], [row], "|", ms=20, mew=2.4, color=styles[method].text)
        add_tips(axes, str(row), scores, heights)
        tips[str(row)] = tuple(tip for _, tip in points)
        rows.append(_fairness_row(method, runs))
    axes.set_yticks(range(len(grouped)), list(grouped))
    for tick, method in zip(axes.get_yticklabels(), grouped, strict=True):
        tick.set_color(styles[method].text)
    axes.set_ylim(len(grouped) - 0.5, -0.5)
    unit = f" [{metric.unit}]" if metric.unit else ""
    axes.set_xlabel(f"final {metric.name} of each client{unit}")
    return Chart(
        "fairness",
        f"Fairness: {metric.name} of each client",
        "One dot for each client and seed; the bar is the mean. A method is fairer if its dots are "
        f"closer together: compare the standard deviation between clients and the {metric.name} "
        "of the worst 10 % of the clients.",
        figure,
        Table(
            (
                "method",
                f"mean{unit}",
                f"standard deviation between clients{unit and unit.replace('%', 'points')}",
                f"worst 10 % of clients{unit}",
                f"client with the fewest records{unit}",
            ),
            tuple(rows),
        ),
        tips,
    )


def _fairness_row(method: str, runs: Sequence[RunResult]) -> tuple[str, ...]:
    """Return the row of a method: means over its seeds."""
    columns = (
        [run.score for run in runs],
        [run.score_spread for run in runs],
        [run.worst_tenth_score for run in runs],
        [run.smallest_client_score for run in runs],
    )
    return (method, *(runs[0].metric.number(float(np.mean(column))) for column in columns))
