"""Charts of a study: the waterfall and the dots of populations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from noisewise.errors import InvalidValueError
from noisewise.palette import GREEN, ORANGE
from noisewise.report.chart import Chart, fix_layout, method_styles, save_figure
from noisewise.report.inline_svg import inline_svg
from noisewise.report.study_figures import DotSeries, Step, population_dots, waterfall

STEPS = [
    Step("published", 32.0),
    Step("accountant", 36.5, 0.6),
    Step("weights", 38.1, 0.5),
    Step("features", 75.1),
    Step("defaults", 74.6, 0.2),
]


def drawn(chart: Chart, folder: Path) -> None:
    """The chart can be drawn in all forms, and has a tooltip for each mark."""
    fix_layout(chart.figure)
    assert all(path.stat().st_size > 1000 for path in save_figure(chart.figure, folder, chart.name))
    assert inline_svg(chart).count("<title>") == sum(map(len, chart.tips.values()))


def test_bars_reach_from_each_value_to_the_next(tmp_path: Path) -> None:
    chart = waterfall(STEPS, title="CIFAR-10", name="cifar10")
    bars = [p for p in chart.figure.axes[0].patches if isinstance(p, Rectangle)]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
    expected = [(32.0, 36.5), (36.5, 38.1), (38.1, 75.1), (75.1, 74.6)]
    assert [value for pair in ends for value in pair] == pytest.approx(
        [value for pair in expected for value in pair]
    )
    colours = [to_hex(bar.get_facecolor()) for bar in bars]
    assert colours == [GREEN, GREEN, GREEN, ORANGE]
    texts = [text.get_text() for text in chart.figure.axes[0].texts]
    assert texts == ["+4.5 ± 0.6", "+1.6 ± 0.5", "+37.0", "-0.5 ± 0.2", "32.0", "74.6"]
    labels = [label.get_text() for label in chart.figure.axes[0].get_yticklabels()]
    assert labels == [*(step.label for step in STEPS), "all steps"]
    drawn(chart, tmp_path)


def test_the_table_of_a_waterfall_adds_up() -> None:
    chart = waterfall(STEPS, end="total")
    differences = [float(row[2].split()[0]) for row in chart.values.rows[1:]]
    assert sum(differences[:-1]) == pytest.approx(differences[-1])
    assert chart.values.rows[-1] == ("total", "74.6", "+42.6")
    assert "standard error" in chart.caption
    assert "standard error" not in waterfall([Step("a", 1.0), Step("b", 2.0)]).caption


def test_a_step_without_any_difference_can_be_drawn(tmp_path: Path) -> None:
    drawn(waterfall([Step("start", 50.0), Step("nothing", 50.0, 0.0)]), tmp_path)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([Step("start", 1.0)], "steps = 1"),
        ([Step("a", 1.0), Step("a", 2.0)], "steps"),
        ([Step("a", 1.0), Step("b", math.nan)], "steps: b = nan"),
    ],
)
def test_invalid_steps_are_named(steps: list[Step], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        waterfall(steps)


def series() -> list[DotSeries]:
    published = {"Dist1": 32.0, "Dist2": 30.0, "Dist9": 22.1}
    return [
        DotSeries("published Robust-HDP", published, "RobustHDP", published=True),
        DotSeries("RobustHDP, pixels", {"Dist1": [33.0, 35.0], "Dist2": [31.0]}, "RobustHDP"),
        DotSeries("NoiseWise, pixels", {"Dist1": [36.0, 36.0, 39.0], "Dist9": 27.0}, "NoiseWise"),
        DotSeries("NoiseWise, encoder", {d: [75.0, 76.0] for d in published}, "NoiseWise"),
    ]


def test_means_and_errors_of_populations_by_hand(tmp_path: Path) -> None:
    chart = population_dots(series(), title="CIFAR-10")
    assert chart.values.rows == (
        ("Dist1", "32.0", "34.0 ± 1.0", "37.0 ± 1.0", "75.5 ± 0.5"),
        ("Dist2", "30.0", "31.0", "", "75.5 ± 0.5"),
        ("Dist9", "22.1", "", "27.0", "75.5 ± 0.5"),
    )
    labels = [label.get_text() for label in chart.figure.axes[0].get_yticklabels()]
    assert labels == ["Dist1", "Dist2", "Dist9"]
    assert "Hollow markers are published values." in chart.caption
    drawn(chart, tmp_path)


def test_a_method_has_its_usual_style_and_published_values_are_hollow() -> None:
    lines = {
        line.get_label(): line
        for line in population_dots(series()).figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    }
    usual = method_styles(["RobustHDP", "NoiseWise"])
    published, robust = lines["published Robust-HDP"], lines["RobustHDP, pixels"]
    assert published.get_markerfacecolor() == "none"
    assert published.get_color() == robust.get_color() == usual["RobustHDP"].colour
    assert robust.get_markerfacecolor() == usual["RobustHDP"].colour
    pixels, encoder = lines["NoiseWise, pixels"], lines["NoiseWise, encoder"]
    assert (pixels.get_color(), pixels.get_marker()) == (
        usual["NoiseWise"].colour,
        usual["NoiseWise"].marker,
    )
    assert len({line.get_color() for line in (robust, pixels, encoder)}) == 3


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([], "series = 0"),
        ([DotSeries("a", {})], "series = 1"),
        ([DotSeries("a", {"x": 1.0}), DotSeries("a", {"x": 1.0})], "series"),
        ([DotSeries("a", {"x": [1.0, math.inf]})], "a, x"),
        ([DotSeries("a", {"x": []})], "a, x"),
    ],
)
def test_invalid_series_are_named(chosen: list[DotSeries], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        population_dots(chosen)
