"""Chart of a classification: which classes are taken for which, and figures of each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from noisewise.federation.results import RunResult
from noisewise.palette import BLUE, INK
from noisewise.report.chart import FONT_SIZE, Chart, Table, new_axes
from noisewise.report.paired import best_method
from noisewise.report.tables import by_method

__all__ = ["class_table", "confusion_chart"]

_MOST_NUMBERS = 12  # classes whose cells have room for a number
_MOST_VECTORS = 30  # more would make the page large
_DARKEST = 0.55  # opacity of a cell with all records of its class
_LEVELS = 20  # steps of the colour key


def confusion_chart(results: Sequence[RunResult]) -> Chart | None:
    """Chart of the confusion matrix of the best method, see `best_method`; None if unknown.

    Args:
        results: runs of one or more methods and seeds; the seeds of a method are added.
    """
    counted = [run for run in results if _counts(run) is not None]
    if not counted:
        return None
    grouped = by_method(counted)
    method = best_method(counted) or counted[0].method
    matrices = [matrix for run in grouped[method] if (matrix := _counts(run)) is not None]
    counts = np.sum(matrices, axis=0)
    seeds = f"sum over {len(matrices)} seeds" if len(matrices) > 1 else "one seed"
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = len(counts)
    figure, axes = new_axes(4.8, 4.6, grid="x")
    axes.grid(False)
    for row, column in zip(*np.nonzero(counts), strict=True):
        # A transparent colour of the palette: ink on it is readable on light and dark pages.
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, facecolor=BLUE, linewidth=0,
                alpha=_DARKEST * shares[row, column], rasterized=classes > _MOST_VECTORS,
            )
        )  # fmt: skip
    axes.set_xlim(-0.5, classes - 0.5)
    axes.set_ylim(classes - 0.5, -0.5)
    axes.set_aspect("equal")
    if classes <= _MOST_NUMBERS:
        for row in range(classes):
            for column in range(classes):
                axes.text(
                    column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center",
                    color=INK, fontsize=FONT_SIZE - 1,
                )  # fmt: skip
        axes.set_xticks(range(classes))
        axes.set_yticks(range(classes))
    _draw_key(axes)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")
    return Chart(
        "confusion",
        "Confusion matrix",
        f"{method}, held-out records of all clients after the last round, {seeds}: share [%] of "
        "the records of each class (row) that the model takes for each class (column). The table "
        "has figures of each class.",
        figure,
        class_table(counts),
        {},
    )


def _draw_key(axes: Axes) -> None:
    """Draw a bar on the right that shows the share of each colour."""
    key = axes.inset_axes((1.03, 0.0, 0.035, 1.0))
    for level in range(_LEVELS):
        key.add_patch(
            Rectangle(
                (0, 100 * level / _LEVELS), 1, 100 / _LEVELS, facecolor=BLUE, linewidth=0,
                alpha=_DARKEST * (level + 0.5) / _LEVELS,
            )
        )  # fmt: skip
    key.set_xlim(0, 1)
    key.set_ylim(0, 100)
    key.set_xticks([])
    key.yaxis.tick_right()
    key.set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    key.tick_params(length=0, labelsize=FONT_SIZE - 1, labelcolor=INK)
    for side in key.spines.values():
        side.set_visible(False)


def _counts(run: RunResult) -> NDArray[np.int64] | None:
    last = run.last_evaluated
    return None if last is None or last.confusion is None else np.array(last.confusion)


def class_table(counts: NDArray[np.int64]) -> Table:
    """Return precision, recall and F1 of each class.

    Args:
        counts: records by [class, predicted class].

    Example:
        >>> class_table(np.array([[3, 1], [0, 4]])).rows[0]
        ('0', '4', '100.0', '75.0', '85.7')
    """
    right, true, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    rows = []
    for k in range(len(counts)):
        figures = (
            _share(right[k], predicted[k]),
            _share(right[k], true[k]),
            _share(2 * right[k], true[k] + predicted[k]),
        )
        rows.append((str(k), str(int(true[k])), *figures))
    headings = ("class", "records", "precision [%]", "recall [%]", "F1 [%]")
    return Table(headings, tuple(rows))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "not defined"
