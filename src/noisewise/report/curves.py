"""Curves of several methods: names at their ends, and lines that stay visible under others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from noisewise.report.chart import FONT_SIZE

__all__ = ["label_ends"]


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
    height: float = 3.4,
) -> None:
    """Write the name of each line at its end, with a leader line.

    Names that overlap are moved apart.

    Args:
        axes: axes with the lines.
        ends: last point of each line by name.
        colours: colour of each name.
        height: height of the panel in inches, with axis labels.
    """
    gap = 1.15 * FONT_SIZE / (72 * 0.8 * height)
    axes.autoscale_view()  # computes the limits, on which the positions depend
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(
        ((float(to_axes.transform(point)[1]), name) for name, point in ends.items()),
    )
    positions = _apart([y for y, _ in labels], gap)
    for (end, name), position in zip(labels, positions, strict=True):
        axes.annotate(
            name,
            xy=(1.0, end),
            xytext=(1.04, position),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colours[name],
            va="center",
            fontsize=FONT_SIZE,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colours[name], "lw": 0.7, "shrinkA": 0, "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return positions at least ``gap`` apart, as close as possible to the wanted ones.

    This is least squares with the order kept: subtracting k * gap gives an isotonic regression,
    which the pool-adjacent-violators algorithm solves.

    Args:
        heights: positions in ascending order.
        gap: smallest distance between two positions.
    """
    blocks: list[list[float]] = []
    for number, position in enumerate(heights):
        blocks.append([position - number * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            previous_mean, previous_count = blocks.pop()
            total = previous_count + count
            blocks.append([(previous_mean * previous_count + mean * count) / total, total])
    flat = [mean for mean, count in blocks for _ in range(int(count))]
    return [position + number * gap for number, position in enumerate(flat)]
