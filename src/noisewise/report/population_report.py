"""A population as a table and as a figure: budgets, noise and oracle weights of the clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.palette import BLUE
from noisewise.report.chart import save_figure
from noisewise.text import align_columns

__all__ = ["ClientRow", "population_figure", "population_text", "save_figure"]


@dataclass(frozen=True)
class ClientRow:
    """One client of a population, for a report.

    Attributes:
        id: name of the client.
        n_examples: N, number of training records or persons.
        batch_size: b, expected batch size.
        epsilon: epsilon of the budget.
        steps_per_round: E_i, local steps in a round.
        noise_multiplier: z.
        noise_variance: sigma^2, the noise energy of one update.
        oracle_weight: weight of the oracle, which knows all sigma^2.
    """

    id: str
    n_examples: int
    batch_size: int
    epsilon: float
    steps_per_round: int
    noise_multiplier: float
    noise_variance: float
    oracle_weight: float


_COLUMNS: Mapping[str, Callable[[ClientRow], str]] = {
    "client": lambda row: row.id,
    "N": lambda row: str(row.n_examples),
    "b": lambda row: str(row.batch_size),
    "steps": lambda row: str(row.steps_per_round),
    "epsilon": lambda row: f"{row.epsilon:.4g}",
    "z": lambda row: f"{row.noise_multiplier:.4g}",
    "sigma^2": lambda row: f"{row.noise_variance:.4g}",
    "oracle weight": lambda row: f"{100 * row.oracle_weight:.2f} %",
}

_LEGEND = (
    "N: number of training records, or of persons if budgets protect persons. b: expected batch\n"
    "size. steps: local steps in a round.\n"
    "z: noise multiplier that the budget requires. sigma^2: noise energy of an update (expected\n"
    "squared norm of its noise). oracle weight: the weights that give the combined update the\n"
    "least noise; known only in simulations."
)


def population_text(rows: Sequence[ClientRow]) -> str:
    """Return a table with one line for each client, and a legend."""
    table = [list(_COLUMNS), *([cell(row) for cell in _COLUMNS.values()] for row in rows)]
    return "\n".join([*align_columns(table, range(1, len(_COLUMNS))), "", _LEGEND])


def population_figure(rows: Sequence[ClientRow]) -> Figure:
    """Return a figure with panels of epsilon, b, N, z, sigma^2 and oracle weight.

    Clients are sorted by sigma^2.
    """
    ordered = sorted(rows, key=lambda row: row.noise_variance)
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[tuple[str, list[float], bool]] = [
        ("privacy budget epsilon", [row.epsilon for row in ordered], True),
        ("batch size b", [row.batch_size for row in ordered], False),
        ("number of records (or persons) N", [row.n_examples for row in ordered], False),
        ("noise multiplier z", [row.noise_multiplier for row in ordered], True),
        ("noise of an update, sigma²", [row.noise_variance for row in ordered], True),
        ("oracle weight [%]", [100 * row.oracle_weight for row in ordered], False),
    ]
    for number, (title, values, logarithmic) in enumerate(panels, start=1):
        axes = figure.add_subplot(2, 3, number)
        axes.plot(range(len(values)), values, "o", ms=4, color=BLUE)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks([])
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if number > 3:
            axes.set_xlabel("clients, least noisy first", fontsize=9)
    return figure
