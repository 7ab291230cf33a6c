"""`plot_runs`: the main metric of runs over rounds on axes of matplotlib, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult
from noisewise.report.cell_text import printable_run
from noisewise.report.chart import method_styles, style_axes
from noisewise.report.figures import mean_curves
from noisewise.report.tables import by_method

__all__ = ["plot_runs"]

_MARKS = 12


def plot_runs(results: Sequence[RunResult], axes: Axes | None = None) -> Axes:
    """Draw one line for each method, in the colours and markers of the report.

    Args:
        results: runs of one or more methods and seeds; bands show the range over the seeds.
        axes: to draw on; by default those of a new figure of `matplotlib.pyplot`.

    Raises:
        InvalidValueError: no run was evaluated.
    """
    grouped = by_method([printable_run(result) for result in results])
    curves = {method: mean_curves(runs) for method, runs in grouped.items()}
    if not any(rounds for rounds, _ in curves.values()):
        raise InvalidValueError("results", [], "must have a run with an evaluated round")
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(layout="constrained")[1]
    styles, metric = method_styles(list(grouped)), results[0].metric
    for method, (rounds, values) in curves.items():
        if not rounds:
            continue
        style, every = styles[method], max(1, len(rounds) // _MARKS)
        label = method.replace("$", r"\$")  # no formula
        axes.plot(
            rounds, values.mean(axis=0), style.line, color=style.colour, marker=style.marker,
            markevery=every, markersize=5, label=label,
        )  # fmt: skip
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(rounds, low, high, color=style.colour, alpha=0.14, lw=0)
    style_axes(axes)
    axes.set_xlabel("round")
    axes.set_ylabel(metric.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return axes
