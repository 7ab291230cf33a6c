"""Attacks in a table and a figure: the attackers' weight and the accuracy that they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.federation.results import AttackRow

__all__ = ["attack_figure", "attack_text"]


def attack_text(rows: Sequence[AttackRow]) -> str:
    """One line for each attack and method."""
    wide = max([20, *(len(row.method) for row in rows)])
    lines = [f"{'attack':<20} {'method':<{wide}} {'weight':>8} {'accuracy':>9} {'cost':>7}"]
    for row in rows:
        weight = "" if row.attackers == 0 else f"{row.weight:.3f}"
        cost = "" if row.attackers == 0 else f"{100 * row.loss:+.1f}"
        note = "  diverged" if row.diverged else ""
        lines.append(
            f"{row.attack:<20} {row.method:<{wide}} {weight:>8} {100 * row.accuracy:>7.1f} % "
            f"{cost:>6}{note}"
        )
    return "\n".join(lines)


def attack_figure(rows: Sequence[AttackRow]) -> Figure:
    """Two grids, method by attack: the attackers' weight, and the accuracy under attack."""
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
        lower, methods, attacks, "cividis_r", (0.0, 100.0), "Accuracy under attack [%]",
        lambda m, a: 100 * cell[m, a].accuracy if (m, a) in cell else np.nan, "{:.1f}",
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
