"""Charts of a real federation: weights of the sites, and the noised scores that they sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.report.chart import Chart, Table, add_tips, method_styles, new_axes
from noisewise.report.curves import label_ends

__all__ = ["noised_accuracy_chart", "site_weights_chart"]


def _weight_text(record: RoundRecord, client: str) -> str:
    """Return the client's weight in a round, or why it has none."""
    if client in record.dropped:
        return record.dropped[client]
    return f"{100 * record.weights[client]:.1f} %" if client in record.weights else "not asked"


def site_weights_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the weight of each site in the first deployed run; None if there is none."""
    run = next((r for r in results if r.deployed and any(o.weights for o in r.rounds)), None)
    if run is None:
        return None
    clients = sorted({c for r in run.rounds for c in (*r.weights, *r.dropped)})
    figure, axes = new_axes()
    styles = method_styles(clients)
    ends, tips = {}, {}
    for number, client in enumerate(clients):
        used = [r for r in run.rounds if client in r.used]
        if not used:
            continue
        rounds = [r.round for r in used]
        weights = [100 * r.weights[client] for r in used]
        axes.plot(rounds, weights, "o-", ms=3.5, lw=1.2, color=styles[client].colour)
        ends[client[-6:]] = (rounds[-1], float(weights[-1]))
        add_tips(axes, str(number), rounds, weights)
        tips[str(number)] = tuple(
            f"site {client}, round {r}: {w:.1f} %" for r, w in zip(rounds, weights, strict=True)
        )
    axes.set_xlabel("round")
    axes.set_ylabel("aggregation weight [%]")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    if len(ends) <= 14:
        label_ends(axes, ends, {c[-6:]: styles[c].text for c in clients})
    rows = tuple(
        (str(record.round), *(_weight_text(record, client) for client in clients))
        for record in run.rounds
    )
    used_in = np.mean([len(r.used) for r in run.rounds])
    return Chart(
        "site-weights",
        "Weight of each site",
        "Weight of each site in each round. The label of a site is the end of its node id. The "
        f"server used {used_in:.1f} updates per round on average. A gap is a round without a "
        "usable update of the site; the table gives the reason.",
        figure,
        Table(("round", *(f"site {client}" for client in clients)), rows),
        tips,
    )


def noised_accuracy_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the noised scores that sites sent, of the first run that has any, or None."""
    run = next((r for r in results if any(o.noised_accuracy for o in r.rounds)), None)
    if run is None:
        return None
    records = [r for r in run.rounds if r.noised_accuracy]
    received = [dict(r.noised_accuracy or {}) for r in records]
    clients = sorted({client for answers in received for client in answers})
    rounds = [r.round for r in records]
    means = [100 * r.mean_noised_accuracy for r in records]
    figure, axes = new_axes()
    style = method_styles([run.method])[run.method]
    for client in clients:
        points = [
            (n, 100 * a[client]) for n, a in zip(rounds, received, strict=True) if client in a
        ]
        axes.plot(*zip(*points, strict=True), "o", ms=3, alpha=0.45, color=style.colour)
    axes.plot(rounds, means, "o-", ms=4, lw=1.6, color=style.colour)
    add_tips(axes, "mean", rounds, means)
    axes.set_xlabel("round")
    axes.set_ylabel("noised score of sites [%]")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_ends(axes, {"mean": (rounds[-1], means[-1])}, {"mean": style.text})
    rows = tuple(
        (
            str(number),
            f"{mean:.1f}",
            *(f"{100 * a[client]:.1f}" if client in a else "sent none" for client in clients),
        )
        for number, mean, a in zip(rounds, means, received, strict=True)
    )
    return Chart(
        "noised-accuracy",
        "Noised score of sites",
        f"The noised scores that {len(clients)} sites sent, on records that they do not train "
        "on, and their mean (line). These are not true scores: a noisewise site adds noise, "
        "so a value can be below 0 or above 100 %, and it charges the cost to its ledger. The "
        "server cannot check either.",
        figure,
        Table(("round", "mean [%]", *(f"site {client} [%]" for client in clients)), rows),
        {"mean": tuple(f"round {n}: {m:.1f} %" for n, m in zip(rounds, means, strict=True))},
    )
