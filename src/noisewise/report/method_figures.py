"""Charts that compare methods: against epsilon, seed by seed, loss, participation, and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.round_times import RoundTime
from noisewise.palette import MUTED
from noisewise.report.chart import (
    Chart,
    Table,
    add_legend,
    add_tips,
    method_styles,
    new_axes,
    plain_numbers,
)
from noisewise.report.curves import Measure, curve_of, draw_curves, label_ends
from noisewise.report.paired import best_method, paired_difference
from noisewise.report.tables import by_method

__all__ = ["epsilon_chart", "loss_chart", "paired_chart", "participation_chart", "time_chart"]

_MOST_TIPS = 40
_LOG_RATIO = 2.0  # a log axis needs a range of at least this ratio, or it has too few labels
_WIDE_LOSS = 20.0


def epsilon_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of each client's main metric against its epsilon; None with fewer than 2 budgets."""
    simulated = [r for r in results if not r.deployed and r.guarantee is not None]
    grouped = {
        method: scores
        for method, runs in by_method(simulated).items()
        if (scores := _client_scores(runs))
    }
    measured = {client for scores in grouped.values() for client in scores}
    budgets = {
        client: facts["epsilon"]
        for run in simulated
        for client, facts in run.clients.items()
        if client in measured
    }
    if len(set(budgets.values())) < 2:
        return None
    metric = simulated[0].metric
    figure, axes = new_axes(4.8, 3.8, grid="both")
    styles = method_styles(list(by_method(results)))
    low, high = min(budgets.values()), max(budgets.values())
    wide = low > 0 and high >= _LOG_RATIO * low
    tips: dict[str, tuple[str, ...]] = {}
    for number, (method, scores) in enumerate(grouped.items()):
        # A small shift for each method, so clients with equal budgets do not hide each other.
        shift = 0.03 * ((number + 0.5) / len(grouped) - 0.5)
        xs = [
            budgets[c] * (high / low) ** shift if wide else budgets[c] + shift * (high - low)
            for c in scores
        ]
        ys = [metric.scale * score for score in scores.values()]
        style = styles[method]
        axes.plot(
            xs, ys, style.marker, ms=5, mew=0, color=style.colour, alpha=0.8, label=method
        )  # fmt: skip
        add_tips(axes, str(number), xs, ys)
        tips[str(number)] = tuple(
            f"{client}, epsilon {budgets[client]:.4g}, {method}: {metric.text(score)}"
            for client, score in scores.items()
        )
    if wide:
        axes.set_xscale("log")
        axes.autoscale_view()
        plain_numbers(axes, "x")
    axes.set_xlabel("epsilon of the client's budget" + (" (log scale)" if wide else ""))
    axes.set_ylabel(f"final {metric.label}")
    add_legend(figure, axes)
    unit = f" [{metric.unit}]" if metric.unit else ""
    rows = tuple(
        (
            client,
            f"{budget:.4g}",
            *(metric.number(s[client]) if client in s else "" for s in grouped.values()),
        )
        for client, budget in sorted(budgets.items(), key=lambda pair: (pair[1], pair[0]))
    )
    return Chart(
        "epsilon",
        f"{metric.name.capitalize()} against epsilon",
        f"One mark for each client and private method: final {metric.name} on the client's "
        "held-out records, mean over seeds, against the epsilon of its budget."
        + " Marks of different methods are shifted slightly."
        * (len(grouped) > 1),
        figure,
        Table(("client", "epsilon", *(f"{method}{unit}" for method in grouped)), rows),
        tips,
    )


def _client_scores(runs: Sequence[RunResult]) -> dict[str, float]:
    """Return the main metric of each client, mean over the runs that measured it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for client, score in run.by_client(run.metric.name).items():
            if math.isfinite(score) and client in run.clients:
                values.setdefault(client, []).append(score)
    return {client: float(np.mean(scores)) for client, scores in values.items()}


def paired_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the difference from the best method for each seed; None without several seeds."""
    best = best_method(results)
    if best is None:
        return None
    others = [method for method in by_method(results) if method != best]
    differences = {method: paired_difference(results, method, best) for method in others}
    differences = {m: d for m, d in differences.items() if len(d.seeds) > 1}
    if not differences:
        return None
    metric = next(iter(differences.values())).metric
    figure, axes = new_axes(4.8, max(2.0, 1.0 + 0.42 * len(differences)), grid="x")
    styles = method_styles(list(by_method(results)))
    axes.axvline(0, color=MUTED, lw=1)
    tips: dict[str, tuple[str, ...]] = {}
    for row, (method, difference) in enumerate(differences.items()):
        style, count = styles[method], len(difference.values)
        heights = [row + 0.3 * ((k + 0.5) / count - 0.5) for k in range(count)]
        axes.plot(
            difference.values, heights, style.marker, ms=5, mew=0, color=style.colour, alpha=0.7
        )
        axes.plot([difference.mean], [row], "|", ms=20, mew=2.4, color=style.text)
        add_tips(axes, str(row), difference.values, heights)
        tips[str(row)] = tuple(
            f"{method} minus {best}, seed {seed}: "
            f"{difference.number(value)} {difference.unit}".rstrip()
            for seed, value in zip(difference.seeds, difference.values, strict=True)
        )
    axes.set_yticks(range(len(differences)), list(differences))
    for tick, method in zip(axes.get_yticklabels(), differences, strict=True):
        tick.set_color(styles[method].text)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    unit = next(iter(differences.values())).unit
    shown_unit = f" [{unit}]" if unit else ""
    axes.set_xlabel(f"{metric.name} minus that of {best}{shown_unit}")
    seeds = sorted({seed for d in differences.values() for seed in d.seeds})
    rows = []
    for method, difference in differences.items():
        by_seed = dict(zip(difference.seeds, difference.values, strict=True))
        cells = (difference.number(by_seed[s]) if s in by_seed else "" for s in seeds)
        rows.append((method, *cells, difference.text()))
    worse = "left" if metric.larger_is_better else "right"
    return Chart(
        "paired",
        "Differences from the best method",
        f"Final {metric.name} of each method minus that of {best} with the same seed: one mark for "
        f"each seed; the bar is the mean. A method to the {worse} of the line is worse. {best} is "
        "the best of the first group in the result.",
        figure,
        Table(
            ("method", *(f"seed {seed}{shown_unit}" for seed in seeds), "mean ± standard error"),
            tuple(rows),
        ),
        tips,
    )


def loss_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the mean train loss of the clients over rounds; None if it was not recorded."""
    return _curves_chart(
        results,
        lambda run, record: record.mean_train_loss,
        ("loss", "Train loss over rounds", "train loss, mean over clients"),
        "Mean over the clients of the loss on their training records. Only a simulation can "
        "compute it: a server does not see these records.",
    )


def participation_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the updates used in each round; None if every client took part in every round."""
    if all(r.used >= run.clients.keys() for run in results for r in run.rounds):
        return None
    return _curves_chart(
        results,
        lambda run, record: float(len(record.used)),
        ("participation", "Participation in each round", "updates used in the round"),
        "Number of clients whose updates were used. The others were not selected, had spent their "
        "budgets, failed, or were dropped.",
    )


def time_chart(
    results: Sequence[RunResult], times: Mapping[tuple[str, int], Sequence[RoundTime]]
) -> Chart | None:
    """Chart of the seconds of each round; None if no run recorded them.

    Args:
        results: runs of one or more methods and seeds.
        times: when the rounds took place, by (method, seed).
    """
    seconds = {key: {time.round: time.seconds for time in rounds} for key, rounds in times.items()}

    def of_round(run: RunResult, record: RoundRecord) -> float:
        return seconds.get((run.method, run.seed), {}).get(record.round, math.nan)

    return _curves_chart(
        results,
        of_round,
        ("time", "Time of each round", "seconds"),
        "Time from the end of one round to the end of the next, with evaluation and with waiting "
        "for clients. Runs that train at the same time slow each other down, as does other work on "
        "the machine.",
    )


def _curves_chart(
    results: Sequence[RunResult],
    measure: Measure,
    names: tuple[str, str, str],
    caption: str,
) -> Chart | None:
    """Chart of a figure of each round: a line for each method, with the range over seeds.

    Args:
        results: runs of one or more methods and seeds.
        measure: the figure; a round in which it is not finite is left out.
        names: of the file, the title and the y axis.
        caption: how to read the figure.
    """
    curves = {m: curve_of(runs, measure) for m, runs in by_method(results).items()}
    curves = {m: curve for m, curve in curves.items() if curve.rounds}
    if not curves:
        return None
    figure, axes = new_axes()
    styles = method_styles(list(by_method(results)))
    draw_curves(axes, curves, styles)
    lines: dict[str, dict[int, float]] = {}
    cells: dict[str, dict[int, str]] = {}
    for method, (rounds, values) in curves.items():
        mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
        lines[method] = dict(zip(rounds, map(float, mean), strict=True))
        cells[method] = {
            r: f"{m:.4g}" + (f" ({a:.4g} to {b:.4g})" if b > a else "")
            for r, m, a, b in zip(rounds, mean, low, high, strict=True)
        }
    tips: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines.values()):
        rounds = list(line)[:: math.ceil(len(line) / _MOST_TIPS)]
        add_tips(axes, str(number), rounds, [line[r] for r in rounds])
        tips[str(number)] = tuple(
            "\n".join([f"round {r}"] + [f"{m}: {c[r]}" for m, c in cells.items() if r in c])
            for r in rounds
        )
    points = [value for line in lines.values() for value in line.values()]
    axes.margins(x=0.01)
    scale = ""
    if min(points) > 0 and max(points) > _WIDE_LOSS * min(points):
        axes.set_yscale("log")
        axes.autoscale_view()
        plain_numbers(axes, "y")
        scale = " (log scale)"
    axes.set_xlabel("round")
    axes.set_ylabel(names[2] + scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ends = {method: (max(line), line[max(line)]) for method, line in lines.items()}
    label_ends(axes, ends, {method: styles[method].text for method in ends})
    every = sorted({r for column in cells.values() for r in column})
    seeds = max(len(values) for _, values in curves.values())
    band = f" Bands show the range over {seeds} seeds." if seeds > 1 else ""
    rows = tuple((str(r), *(column.get(r, "") for column in cells.values())) for r in every)
    return Chart(
        names[0], names[1], caption + band, figure, Table(("round", *cells), rows), tips
    )  # fmt: skip
