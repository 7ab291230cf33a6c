"""Does joining pay? The gains of the clients of the real federations over training alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from utility import FEDERATIONS, ORDERS
from utility_cells import all_cells, standard_error, table
from utility_clients import read_clients
from utility_goals import ORDER_TITLES

from noisewise.palette import BLUE, GREEN, MUTED, ORANGE
from noisewise.report.chart import Chart, Table, new_axes, save_figure

LEVEL = 0.05  # two-sided, for each client by itself
SHORT = dict(zip(ORDERS, ("random", "small stricter", "large stricter"), strict=True))


@dataclass(frozen=True)
class Gain:
    """A mean paired difference over seeds, in points, with its standard error."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.values))

    @property
    def error(self) -> float:
        """Standard error over the seeds."""
        return standard_error(self.values)

    @property
    def sign(self) -> int:
        """1 for a significant gain, -1 for a significant loss, 0 otherwise."""
        if len(self.values) < 2 or self.mean == 0:
            return 0
        limit = float(stats.t.ppf(1 - LEVEL / 2, len(self.values) - 1))
        return int(math.copysign(1, self.mean)) if abs(self.mean) > limit * self.error else 0

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f}"


def gains(part: str, population: str) -> list[Gain]:
    """The gain of each client over training alone, the largest first."""
    alone = all_cells().get((part, population, "Alone", "auto"), {})
    common = all_cells().get((part, population, "NoiseWise", "auto"), {})
    by_client: dict[str, list[float]] = {}
    for seed in sorted(set(alone) & set(common)):
        own = dict(alone[seed]["clients"])
        for client, value in dict(common[seed]["clients"]).items():
            by_client.setdefault(client, []).append(100 * (value - own[client]))
    found = [Gain(client, tuple(values)) for client, values in by_client.items()]
    return sorted(found, key=lambda gain: (-gain.mean, gain.name))


def over_clients(found: Sequence[Gain]) -> Gain:
    """The mean over all clients, by seed."""
    return Gain("", tuple(np.mean([gain.values for gain in found], axis=0).tolist()))


def joining_table() -> list[str]:
    """How many clients of each real federation gain from the common model."""
    rows = []
    for part, dist in FEDERATIONS.items():
        for order in ORDERS:
            if found := gains(part, dist + order):
                signs = [gain.sign for gain in found]
                rows.append(
                    [part, SHORT[order], str(len(found)), str(signs.count(1)),
                     str(signs.count(-1)), str(over_clients(found)), str(found[-1]), str(found[0])]
                )  # fmt: skip
    headings = ["federation", "epsilons", "clients", "significant gains", "significant losses",
                "mean gain [points]", "smallest", "largest"]  # fmt: skip
    return table(headings, rows) if rows else []


def conclusions() -> list[str]:
    """One sentence or two for each federation, from the gains alone."""
    lines = []
    for part, dist in FEDERATIONS.items():
        found = {order: gains(part, dist + order) for order in ORDERS}
        if not all(found.values()):
            continue
        means = {order: over_clients(clients) for order, clients in found.items()}
        verdicts = {
            1: "the mean gain is significant and positive", -1: "the mean is a significant loss",
            0: "the mean gain is not significant",
        }  # fmt: skip
        by_verdict: dict[str, list[str]] = {}
        for order, title in zip(ORDERS, ORDER_TITLES, strict=True):
            by_verdict.setdefault(verdicts[means[order].sign], []).append(title)
        parts = [
            f"{verdict} ({'all three orders' if len(titles) == len(ORDERS) else ', '.join(titles)})"
            for verdict, titles in by_verdict.items()
        ]
        lines.append(f"- {part}: {'; '.join(parts)}. {_extremes(part, dist, found[''])}")
    return lines


def _extremes(part: str, dist: str, found: Sequence[Gain]) -> str:
    """The clients with the largest significant gains and losses, and the role of the size."""
    lists = []
    for word, sign, ordered in (("gains", 1, found), ("losses", -1, found[::-1])):
        clients = [gain for gain in ordered if gain.sign == sign]
        shown = ", ".join(f"{gain.name} {gain}" for gain in clients[:2])
        lists.append(f"Largest significant {word}: {shown}." if clients else
                     f"No client has significant {word}.")  # fmt: skip
    if len(found) >= 20:
        records = {client: size for client, (size, _) in read_clients()[part][dist].items()}
        rank = stats.spearmanr([records[g.name] for g in found], [g.mean for g in found])
        lists.append(
            f"Rank correlation of gain and number of records: {rank.statistic:+.2f} "
            f"(p = {rank.pvalue:.2g})."
        )
    return "In random order: " + " ".join(lists)


def joining_chart(part: str) -> Chart:
    """The gain of each client against its number of records."""
    figure, axes = new_axes(4.8, 3.4, grid="both")
    axes.axhline(0, color=MUTED, lw=1)
    rows: list[tuple[str, ...]] = []
    colours = dict(zip(ORDERS, ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^")), strict=True))
    for shift, order in enumerate(ORDERS):
        population = FEDERATIONS[part] + order
        clients, found = read_clients()[part][population], gains(part, population)
        colour, marker = colours[order]
        records = [clients[gain.name][0] * 1.03 ** (shift - 1) for gain in found]
        axes.errorbar(
            records, [gain.mean for gain in found], yerr=[gain.error for gain in found],
            fmt=marker, ms=4 if len(found) < 100 else 2.5, color=colour, elinewidth=0.6,
            alpha=0.75, label=SHORT[order],
        )  # fmt: skip
        rows += [(SHORT[order], gain.name, str(clients[gain.name][0]), str(gain)) for gain in found]
    axes.set_xscale("log")
    axes.set_xlabel("training records of the client (logarithmic)")
    axes.set_ylabel("gain over training alone [points]")
    axes.set_title(f"{part}: does joining pay?", loc="left", fontsize=10.5)
    axes.legend(frameon=False, fontsize=8.5, title="epsilons", title_fontsize=8.5)
    return Chart(
        f"utility-joining-{part}", f"{part}: does joining pay?", "", figure,
        Table(("epsilons", "client", "records", "gain"), tuple(rows)),
    )  # fmt: skip


def draw_joining(folder: Path) -> None:
    """One figure for each federation."""
    for part in FEDERATIONS:
        chart = joining_chart(part)
        save_figure(chart.figure, folder, chart.name, ("png",))


def joining() -> list[str]:
    """The section "Does joining pay?"."""
    seeds: Mapping[int, object] = all_cells().get(("heart", "Dist1", "Alone", "auto"), {})
    limit = stats.t.ppf(1 - LEVEL / 2, max(1, len(seeds) - 1))
    lines = [
        "## Does joining pay?",
        "",
        "`Alone` trains one model for each client, at the client's own epsilon. Gains are those of "
        "NoiseWise's common model over it, on the client's own held-out records, paired by seed. "
        f"± is the standard error over {len(seeds)} seeds. A gain or loss of a client is "
        f"significant if its mean is more than {limit:.2f} standard errors from 0 (t-test, level "
        f"{LEVEL:g}). There is no correction for the number of clients: with {LEVEL:.0%} of false "
        "alarms, about 10 of the 194 communes would be significant without any effect. Seeds split "
        "the same records again, so the errors do not include the choice of the records.",
        "",
        *joining_table(),
        *conclusions(),
        "",
        "On spam, each collection has e-mails of one class only. A model trained alone can predict "
        "this class for every e-mail, so the comparison says nothing about telling spam from ham.",
        "",
    ]
    for part in FEDERATIONS:
        title = f"{part}: gain of each client against its number of records"
        lines += [f"![{title}](images/utility-joining-{part}.png)", ""]
    return lines
