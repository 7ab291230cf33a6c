"""Table and figure of attacks: the weight of the attackers and the loss of accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.federation.task_info import MetricInfo, TaskInfo
from noisewise.text import align_columns

__all__ = ["AttackRow", "attack_figure", "attack_text"]

ACCURACY = TaskInfo().main


@dataclass(frozen=True)
class AttackRow:
    """One method under one attack.

    Attributes:
        method: label of the method.
        attack: name of the attack, or ``no attack``.
        attackers: number of attackers.
        weight: total weight of all attackers, mean over rounds.
        score: main metric of the last round, over all clients.
        without_attack: that of the same method without an attack.
        breaks_policy: whether an honest client could never send such an update.
        diverged: whether the model became NaN or infinite.
        honest_refused: number of updates of honest clients that were dropped, over all rounds.
        metric: the main metric.
    """

    method: str
    attack: str
    attackers: int
    weight: float
    score: float
    without_attack: float
    breaks_policy: bool
    diverged: bool
    honest_refused: int = 0
    metric: MetricInfo = ACCURACY

    @property
    def loss(self) -> float:
        """By how much the attack makes the main metric worse."""
        return self.metric.rank(self.score) - self.metric.rank(self.without_attack)


def attack_text(rows: Sequence[AttackRow]) -> str:
    """Return a table with one line for each attack and method."""
    name = rows[0].metric.name if rows else "score"
    table = [("attack", "method", "weight", name, "cost", "")]
    for row in rows:
        metric = row.metric
        weight = "" if row.attackers == 0 else f"{row.weight:.3f}"
        cost = "" if row.attackers == 0 else _number(metric, metric.scale * row.loss, "+")
        note = "diverged" if row.diverged else ""
        table.append((row.attack, row.method, weight, metric.text(row.score), cost, note))
    return "\n".join(align_columns(table, right=(2, 3, 4)))


def _number(metric: MetricInfo, value: float, sign: str = "") -> str:
    return f"{value:{sign}.1f}" if metric.unit == "%" else f"{value:{sign}.4g}"


def attack_figure(rows: Sequence[AttackRow]) -> Figure:
    """Return two grids, method by attack: weight of the attackers, and the main metric."""
    metric = rows[0].metric if rows else ACCURACY
    scores = [row.score for row in rows if np.isfinite(row.score)] or [0.0]
    limits = (0.0, 100.0) if metric.unit == "%" else (min(scores), max(scores))
    attacks = list(dict.fromkeys(row.attack for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    cell = {(row.method, row.attack): row for row in rows}
    height = 1.6 + 0.42 * len(methods)
    width = 3.4 + 0.08 * max([0, *(len(method) - 20 for method in methods)]) + 1.15 * len(attacks)
    figure = Figure(figsize=(width, 2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    shown = attacks[1:] if attacks and attacks[0] == "no attack" else attacks
    _grid(
        upper, methods, shown, "viridis", (0.0, 1.0), "Weight of the attackers (mean over rounds)",
        lambda m, a: cell[m, a].weight if (m, a) in cell else np.nan, "{:.2f}",
    )  # fmt: skip
    _grid(
        lower, methods, attacks, "cividis_r" if metric.larger_is_better else "cividis", limits,
        f"{metric.label.capitalize()} under attack",
        lambda m, a: metric.scale * cell[m, a].score if (m, a) in cell else np.nan,
        "{:.1f}" if metric.unit == "%" else "{:.3g}",
    )  # fmt: skip
    return figure


def _grid(
    axes: Axes,
    methods: Sequence[str],
    attacks: Sequence[str],
    colours: str,
    limits: tuple[float, float],
    title: str,
    value: Callable[[str, str], float],
    pattern: str,
) -> None:
    values = np.array([[value(m, a) for a in attacks] for m in methods], dtype=np.float64)
    image = axes.imshow(values, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for i in range(len(methods)):
        for j in range(len(attacks)):
            if np.isfinite(values[i, j]):
                red, green, blue, _ = image.cmap(image.norm(values[i, j]))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                axes.text(
                    j, i, pattern.format(values[i, j]), ha="center", va="center", fontsize=9,
                    color="white" if dark else "black",
                )  # fmt: skip
    axes.set_xticks(range(len(attacks)), [a.replace("_", " ") for a in attacks], rotation=20)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
