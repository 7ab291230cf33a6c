"""Charts of a study: what each step is worth (`waterfall`), and tables as dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from noisewise.checks import no_repeats
from noisewise.errors import InvalidValueError
from noisewise.palette import GREEN, GRID, INK, MUTED, ORANGE
from noisewise.report.chart import (
    FONT_SIZE,
    Chart,
    Style,
    Table,
    add_legend,
    add_tips,
    method_styles,
    new_axes,
)

__all__ = ["DotSeries", "Step", "population_dots", "waterfall"]


@dataclass(frozen=True)
class Step:
    """One step of a `waterfall`.

    Attributes:
        label: what changes, such as "accountant: pld"; for the first step, where it starts.
        value: accuracy in percent with this step and all steps before it.
        error: standard error of the difference to the step before; NaN if it is not known.
    """

    label: str
    value: float
    error: float = math.nan


def waterfall(
    steps: Sequence[Step],
    *,
    name: str = "waterfall",
    title: str = "What each step is worth",
    end: str = "all steps",
    quantity: str = "accuracy [%]",
) -> Chart:
    """Chart of the difference that each step makes, from the start to the end.

    Args:
        steps: the first is the start; each other one is added to the steps before it.
        name: name of the chart's files.
        title: heading, such as the dataset.
        end: label of the last row, which shows the final value.
        quantity: label of the axis.

    Returns:
        The chart. Bars are differences, so the axis need not start at 0.

    Raises:
        InvalidValueError: there are fewer than two steps, a label occurs twice, or a value is not
            finite.

    Example:
        >>> steps = [Step("published", 32.0), Step("accountant", 35.5, 0.4), Step("features", 76.2)]
        >>> [row[2] for row in waterfall(steps).values.rows]
        ['', '+3.5 ± 0.4', '+40.7', '+44.2']
    """
    _check_steps(steps)
    values = [step.value for step in steps]
    differences = ["", *(_difference(*pair) for pair in itertools.pairwise(steps))]
    rows = [
        (step.label, f"{step.value:.1f}", difference)
        for step, difference in zip(steps, differences, strict=True)
    ]
    rows.append((end, f"{values[-1]:.1f}", f"{values[-1] - values[0]:+.1f}"))
    figure, axes = new_axes(4.8, 0.9 + 0.36 * len(rows), grid="x")
    _draw_steps(axes, steps, differences)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{quantity}, axis does not begin at 0")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    add_tips(axes, "steps", [*values, values[-1]], range(len(rows)))
    tips = tuple(f"{label}: {value} ({change})".replace(" ()", "") for label, value, change in rows)
    errors = any(math.isfinite(step.error) for step in steps)
    return Chart(
        name,
        title,
        "Each bar is the difference that one step makes when it is added to the steps above it."
        + (" Lines on bars: standard error of the difference." if errors else ""),
        figure,
        Table(("step", quantity, "difference [points]"), tuple(rows)),
        {"steps": tips},
    )


def _check_steps(steps: Sequence[Step]) -> None:
    if len(steps) < 2:
        raise InvalidValueError("steps", len(steps), "must be a start and one or more steps")
    no_repeats("steps", [step.label for step in steps])
    for step in steps:
        if not math.isfinite(step.value):
            raise InvalidValueError(f"steps: {step.label}", step.value, "must be a finite number")


def _difference(before: Step, step: Step) -> str:
    error = f" ± {step.error:.1f}" if math.isfinite(step.error) else ""
    return f"{step.value - before.value:+.1f}{error}"


def _draw_steps(axes: Axes, steps: Sequence[Step], differences: Sequence[str]) -> None:
    """Draw a mark for the start, a bar for each step and a mark for the end, in rows from 0."""
    values, last = [step.value for step in steps], len(steps)
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) + 0.2
    axes.set_xlim(low - 2 * margin, high + 9 * margin)  # the labels are on the right of the bars

    def write(text: str, x: float, row: int, weight: str = "normal") -> None:
        axes.annotate(
            text, (x, row), xytext=(6, 0), textcoords="offset points", va="center", color=INK,
            fontsize=FONT_SIZE, fontweight=weight,
        )  # fmt: skip

    for row, (before, step) in enumerate(itertools.pairwise(steps), start=1):
        change = step.value - before.value
        colour = GREEN if change >= 0 else ORANGE
        axes.barh(row, change, left=before.value, height=0.56, color=colour, lw=0)
        right = max(before.value, step.value)
        if math.isfinite(step.error):
            axes.errorbar(step.value, row, xerr=step.error, fmt="none", ecolor=INK, elinewidth=1.2)
            right = max(right, step.value + step.error)
        write(differences[row], right, row)
    for row, value in enumerate(values):  # from each value to where the next row starts
        axes.plot([value, value], [row, row + 1], color=MUTED, lw=0.8, zorder=1)
    for row, value in ((0, values[0]), (last, values[-1])):
        axes.plot([value], [row], "D", ms=7, mew=0, color=INK)
        write(f"{value:.1f}", value, row, "bold")


@dataclass(frozen=True)
class DotSeries:
    """One colour of `population_dots`.

    Attributes:
        label: name in the legend.
        values: by population, a value in percent for each seed; a single number for one seed.
        method: the method whose colour and marker it has in all figures; by default ``label``.
        published: a hollow marker in the colour of its method.
    """

    label: str
    values: Mapping[str, float | Sequence[float]]
    method: str = ""
    published: bool = False


def population_dots(
    series: Sequence[DotSeries],
    *,
    name: str = "populations",
    title: str = "Accuracy in each population",
    quantity: str = "accuracy [%]",
) -> Chart:
    """Chart of a table: one row for each population, one colour and marker for each series.

    Args:
        series: the columns of the table. Populations are in the order of first appearance; one that
            a series does not have is left out for that series.
        name: name of the chart's files.
        title: heading, such as the dataset.
        quantity: label of the axis.

    Returns:
        The chart; bars are standard errors over seeds, where there are several.

    Raises:
        InvalidValueError: there is no series or no value, a label occurs twice, or a value is not
            finite.

    Example:
        >>> ours = DotSeries("NoiseWise", {"Dist1": [93.1, 93.5], "Dist2": [92.0, 92.4]})
        >>> published = DotSeries("published", {"Dist1": 89.8}, "RobustHDP", published=True)
        >>> population_dots([ours, published]).values.rows
        (('Dist1', '93.3 ± 0.2', '89.8'), ('Dist2', '92.2 ± 0.2', ''))
    """
    populations = list(dict.fromkeys(row for one in series for row in one.values))
    if not populations:
        raise InvalidValueError("series", len(series), "must be one or more, with values")
    no_repeats("series", [one.label for one in series])
    cells = {one.label: {row: _cell(one, row) for row in one.values} for one in series}
    figure, tips = _draw_dots(series, populations, cells, quantity)
    figure.axes[0].set_title(title, loc="left", fontsize=10.5)
    rows = tuple(
        (
            population,
            *(
                _text(points[population]) if population in points else ""
                for points in cells.values()
            ),
        )
        for population in populations
    )
    notes = []
    if any(one.published for one in series):
        notes.append("Hollow markers are published values.")
    if any(math.isfinite(error) for points in cells.values() for _, error in points.values()):
        notes.append("Bars: standard error over seeds.")
    return Chart(
        name,
        title,
        " ".join(["One row for each population of clients.", *notes]),
        figure,
        Table(("population", *(f"{one.label} [%]" for one in series)), rows),
        tips,
    )


def _draw_dots(
    series: Sequence[DotSeries],
    populations: Sequence[str],
    cells: Mapping[str, Mapping[str, tuple[float, float]]],
    quantity: str,
) -> tuple[Figure, dict[str, tuple[str, ...]]]:
    """Draw a row for each population; return figure and tooltips."""
    figure, axes = new_axes(4.8, 1.5 + 0.42 * len(populations), grid="x")
    styles = _series_styles(series)
    positions = {population: row for row, population in enumerate(populations)}
    for row in range(1, len(populations), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=GRID, alpha=0.35, lw=0)
    tips: dict[str, tuple[str, ...]] = {}
    for number, one in enumerate(series):
        style, shift = styles[one.label], 0.6 * ((number + 0.5) / len(series) - 0.5)
        points = cells[one.label]
        means = [mean for mean, _ in points.values()]
        heights = [positions[population] + shift for population in points]
        errors = [error if math.isfinite(error) else 0.0 for _, error in points.values()]
        fill = {"mfc": "none", "mew": 1.3} if one.published else {"mew": 0}
        axes.errorbar(
            means, heights, xerr=errors, fmt="none", ecolor=style.colour, elinewidth=1
        )  # fmt: skip
        axes.plot(means, heights, style.marker, ms=5.5, color=style.colour, label=one.label, **fill)
        add_tips(axes, str(number), means, heights)
        tips[str(number)] = tuple(
            f"{one.label}, {population}: {_text(cell)} %" for population, cell in points.items()
        )
    axes.set_yticks(range(len(populations)), populations)
    axes.set_ylim(len(populations) - 0.5, -0.5)
    axes.set_xlabel(quantity)
    add_legend(figure, axes)
    return figure, tips


def _cell(series: DotSeries, population: str) -> tuple[float, float]:
    """Mean and standard error over seeds; the error of one value is NaN."""
    values = np.atleast_1d(np.asarray(series.values[population], dtype=np.float64))
    if len(values) == 0 or not np.isfinite(values).all():
        allowed = "must be one or more finite numbers"
        raise InvalidValueError(f"{series.label}, {population}", values.tolist(), allowed)
    several = len(values) > 1
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if several else math.nan
    return float(values.mean()), error


def _text(cell: tuple[float, float]) -> str:
    mean, error = cell
    return f"{mean:.1f} ± {error:.1f}" if math.isfinite(error) else f"{mean:.1f}"


def _series_styles(series: Sequence[DotSeries]) -> dict[str, Style]:
    """A style for each label. The first own series of a method has the method's style."""
    keys: dict[str, str] = {}
    own_keys: set[str] = set()
    for one in sorted(series, key=lambda one: one.published):
        key = one.method or one.label
        keys[one.label] = one.label if not one.published and key in own_keys else key
        own_keys.add(keys[one.label])
    styles = method_styles(list(keys.values()))
    return {label: styles[key] for label, key in keys.items()}
