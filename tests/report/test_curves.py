"""Curves over rounds: names that keep apart, and lines that stay visible under others."""

from __future__ import annotations

import numpy as np
import pytest

from noisewise.report.chart import method_styles, new_axes
from noisewise.report.curves import Curve, _apart, draw_curves


def test_labels_keep_apart_and_near() -> None:
    wanted = [0.1, 0.5, 0.5, 0.52, 0.9]
    placed = np.array(_apart(wanted, 0.1))
    assert (np.diff(placed) >= 0.1 - 1e-12).all()
    assert placed[0] == 0.1
    assert placed[-1] == 0.9
    assert placed[1:4].mean() == pytest.approx(np.mean(wanted[1:4]))


def test_a_covered_line_is_wider_than_the_lines_on_it() -> None:
    rounds, base = [1, 2, 3], np.array([[10.0, 50.0, 90.0]])
    curves = {
        "NoiseWise": Curve(rounds, base),
        "WeiAvg": Curve(rounds, base - 20),
        "RobustHDP": Curve(rounds, base + 0.1),
        "Oracle": Curve(rounds, base),
    }
    _, axes = new_axes()
    draw_curves(axes, curves, method_styles(list(curves)))
    below, alone, middle, top = (line.get_linewidth() for line in axes.lines)
    assert below > middle > top == alone


def test_curves_of_one_value_can_be_drawn() -> None:
    _, axes = new_axes()
    curves = {"WeiAvg": Curve([1], np.array([[0.5]])), "PFA": Curve([2], np.array([[0.5]]))}
    draw_curves(axes, curves, method_styles(list(curves)), marked=True)
    assert [line.get_label() for line in axes.lines] == ["WeiAvg", "PFA"]
