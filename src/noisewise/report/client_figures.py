"""Charts of the clients: the server's view of their noise, what they spent, what they got."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.report.chart import (
    INK,
    MUTED,
    Chart,
    Table,
    add_tips,
    label_ends,
    method_looks,
    new_axes,
)
from noisewise.report.figures import plain_numbers
from noisewise.report.tables import by_method

__all__ = ["budget_chart", "estimate_chart", "fairness_chart"]


def estimate_chart(results: Sequence[RunResult]) -> Chart | None:
    """Estimated against true noise of each client's update; None where nobody estimated."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for run in results:
        last = next((r for r in reversed(run.rounds) if r.noise_estimate), None)
        if last is None or not last.noise_estimate or "true_variance" in run.needs:
            continue  # no estimate, or one that was told
        for client, estimate in last.noise_estimate.items():
            pair = (last.true_noise.get(client, math.nan), estimate)
            if min(pair) > 0 and all(map(math.isfinite, pair)):
                words = f"{run.method}, seed {run.seed}, {client}"
                found.setdefault(run.method, []).append((words, *pair))
    if not found:
        return None
    figure, axes = new_axes(4.8, 4.0, grid="both")
    looks = method_looks(list(by_method(results)))
    every = [value for points in found.values() for _, *pair in points for value in pair]
    line = [0.7 * min(every), 1.4 * max(every)]
    axes.plot(line, line, color=MUTED, lw=1)
    axes.annotate(
        "exact", (line[1], line[1]), ha="right", va="bottom", color=MUTED, xytext=(-14, 0),
        textcoords="offset points", rotation=0, fontsize=9,
    )  # fmt: skip
    tips, rows = {}, []
    for number, (method, points) in enumerate(found.items()):
        look = looks[method]
        truth, estimates = [p[1] for p in points], [p[2] for p in points]
        axes.plot(truth, estimates, look.marker, ms=5, mew=0, color=look.colour, alpha=0.75)
        add_tips(axes, str(number), truth, estimates)
        tips[str(number)] = tuple(f"{w}: true {t:.4g}, estimated {e:.4g}" for w, t, e in points)
        rows += [(w, f"{t:.4g}", f"{e:.4g}", f"{e / t:.3f}") for w, t, e in points]
        axes.annotate(
            f"{look_name(look.marker)} {method}", (0.03, 0.95 - 0.07 * number),
            xycoords="axes fraction", color=look.text, va="top", fontsize=9.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_numbers(axes, "x")
    plain_numbers(axes, "y")
    axes.set_xlabel("true noise energy of an update (log scale)")
    axes.set_ylabel("the server's estimate (log scale)")
    return Chart(
        "estimates",
        "Noise, as the server sees it",
        "The server sees only updates and estimates how noisy each is; the truth is known in a "
        "simulation. One mark for each client and seed, last round. Noise energy: the expected "
        "squared norm of the noise in an update.",
        figure,
        Table(("method, seed, client", "true", "estimate", "estimate / true"), tuple(rows)),
        tips,
    )


def look_name(marker: str) -> str:
    """A character that resembles a marker, for words beside it."""
    return {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖"}.get(marker, "●")


def _spent(run: RunResult, client: str) -> list[tuple[int, float]]:
    values = [(r.round, r.epsilon_spent.get(client)) for r in run.rounds]
    return [(number, value) for number, value in values if value is not None and value > 0]


def budget_chart(results: Sequence[RunResult]) -> Chart | None:
    """Epsilon that each client spent over the rounds of one run; None without private runs."""
    private = [r for r in results if r.guarantee is not None and r.rounds]
    run = next((r for r in private if r.method != "MinEpsilon"), next(iter(private), None))
    if run is None:
        return None
    figure, axes = new_axes()
    tips: dict[str, tuple[str, ...]] = {}
    budgets: dict[float, list[str]] = {}
    ends: dict[str, tuple[float, float]] = {}
    for number, (client, settings) in enumerate(run.clients.items()):
        curve = _spent(run, client)
        if not curve:
            continue
        rounds, spent = [r for r, _ in curve], [e for _, e in curve]
        axes.plot(rounds, spent, color="#0072b2", lw=1.2, alpha=0.6)
        axes.plot(rounds[-1:], [settings["planned_epsilon"]], "_", ms=12, mew=2, color=MUTED)
        budgets.setdefault(settings["planned_epsilon"], []).append(client)
        add_tips(axes, str(number), rounds[-1:], spent[-1:])
        tips[str(number)] = (
            f"{client}: {spent[-1]:.4g} of {settings['planned_epsilon']:g} spent "
            f"after round {rounds[-1]}",
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
        f"{run.method}, seed {run.seed}, accountant {run.settings['accountant']}; one line a "
        "client, the grey bar and the label are the budget, which is never exceeded.",
        figure,
        Table(("client", "budget", "delta", *(f"spent, {m}" for m in methods)), rows),
        tips,
    )


def fairness_chart(results: Sequence[RunResult]) -> Chart | None:
    """Final accuracy of every client, one row a method; None without evaluations."""
    grouped = {
        method: [r for r in runs if r.last_evaluated is not None and not r.deployed]
        for method, runs in by_method(results).items()
    }
    grouped = {method: runs for method, runs in grouped.items() if runs}
    if not grouped:
        return None
    figure, axes = new_axes(4.8, max(2.0, 1.0 + 0.42 * len(grouped)), grid="x")
    looks = method_looks(list(by_method(results)))
    tips, rows = {}, []
    for place, (method, runs) in enumerate(grouped.items()):
        points = [
            (100 * score, f"{method}, seed {run.seed}, {client}: {100 * score:.1f} %")
            for run in runs
            for client, score in (run.last_evaluated.accuracy or {}).items()  # type: ignore[union-attr]
            if math.isfinite(score)
        ]
        if not points:
            continue
        scores = [score for score, _ in points]
        # A fixed pattern instead of random jitter: the same runs give the same picture.
        shifts = [place + 0.11 * ((5 * k) % 7 - 3) / 3 for k in range(len(points))]
        axes.plot(scores, shifts, "o", ms=4, mew=0, alpha=0.45, color=looks[method].colour)
        axes.plot([np.mean(scores)], [place], "|", ms=20, mew=2.4, color=looks[method].text)
        add_tips(axes, str(place), scores, shifts)
        tips[str(place)] = tuple(words for _, words in points)
        rows.append(_fairness_row(method, runs))
    axes.set_yticks(range(len(grouped)), list(grouped))
    for tick, method in zip(axes.get_yticklabels(), grouped, strict=True):
        tick.set_color(looks[method].text)
    axes.set_ylim(len(grouped) - 0.5, -0.5)
    axes.set_xlabel("final accuracy of each client [%]")
    return Chart(
        "fairness",
        "Fairness: what each client got",
        "One dot for each client and seed, the bar is the mean. Narrow is fair: compare the "
        "deviation between clients and the worst tenth of them.",
        figure,
        Table(
            (
                "method",
                "mean [%]",
                "deviation between clients [points]",
                "worst 10 % of clients [%]",
                "client with fewest records [%]",
            ),
            tuple(rows),
        ),
        tips,
    )


def _fairness_row(method: str, runs: Sequence[RunResult]) -> tuple[str, ...]:
    """Means over seeds."""
    columns = (
        [run.accuracy for run in runs],
        [run.accuracy_spread for run in runs],
        [run.worst_tenth_accuracy for run in runs],
        [run.smallest_client_accuracy for run in runs],
    )
    return (method, *(f"{100 * float(np.mean(column)):.1f}" for column in columns))
