"""`plot_runs`: the main metric of runs over rounds on axes of matplotlib, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult
from noisewise.report.cell_text import printable_run
from noisewise.report.chart import method_styles, style_axes
from noisewise.report.curves import accuracy_curve, draw_curves
from noisewise.report.tables import by_method

__all__ = ["plot_runs"]


def plot_runs(results: Sequence[RunResult], axes: Axes | None = None) -> Axes:
    """Draw one line for each method, in the colours and markers of the report.

    Args:
        results: runs of one or more methods and seeds; bands show the range over the seeds.
        axes: to draw on; by default those of a new figure of `matplotlib.pyplot`.

    Raises:
        InvalidValueError: no run was evaluated.
    """
    grouped = by_method([printable_run(result) for result in results])
    curves = {method: accuracy_curve(runs) for method, runs in grouped.items()}
    curves = {method: curve for method, curve in curves.items() if curve.rounds}
    if not curves:
        raise InvalidValueError("results", [], "must have a run with an evaluated round")
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(layout="constrained")[1]
    styles, metric = method_styles(list(grouped)), results[0].metric
    draw_curves(axes, curves, styles, marked=True)
    style_axes(axes)
    axes.set_xlabel("round")
    axes.set_ylabel(metric.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return axes
