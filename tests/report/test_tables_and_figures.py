"""Tables, texts and figures are correct for real runs and for unusual ones."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from federation_helpers import small_run
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from noisewise.aggregation.method_facts import METHODS
from noisewise.errors import InvalidValueError
from noisewise.experiments import Comparison
from noisewise.federation import RunResult
from noisewise.palette import INK, MUTED
from noisewise.report import as_csv, as_markdown, as_text, explain, method_rows, write_comparison
from noisewise.report.chart import fix_layout, marker_symbol, method_styles, save_figure
from noisewise.report.comparison_report import write_report
from noisewise.report.confusion_figures import confusion_chart
from noisewise.report.figures import noise_chart, weights_chart
from noisewise.report.run_sets import RunSet, find_runs
from noisewise.report.tables import as_run_csv


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return [
        small_run(method, rounds=3, seed=seed, learning_rate=0.5)
        for seed in (0, 1)
        for method in ("RobustHDP", "DPFedAvg", "PFA", "FedAvg", "Oracle")
    ]


def test_rows_are_means_over_seeds(runs: list[RunResult]) -> None:
    rows = {row.method: row for row in method_rows(runs)}
    assert list(rows) == ["RobustHDP", "DPFedAvg", "PFA", "FedAvg", "Oracle"]
    both = [run.accuracy for run in runs if run.method == "DPFedAvg"]
    row = rows["DPFedAvg"]
    assert row.seeds == 2
    assert row.accuracy == pytest.approx(sum(both) / 2)
    assert row.spread == pytest.approx(abs(both[0] - both[1]) / math.sqrt(2))
    assert rows["Oracle"].noise_ratio == pytest.approx(1)
    assert row.noise_ratio > 1
    assert rows["FedAvg"].noise_ratio == 0
    assert math.isinf(rows["FedAvg"].largest_epsilon)
    assert math.isnan(rows["PFA"].noise_ratio)


def test_words_in_the_table(runs: list[RunResult]) -> None:
    text = as_text(method_rows(runs))
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert "nothing" in lines["RobustHDP"]
    assert "no noise" in lines["FedAvg"]
    assert "no limit" in lines["FedAvg"]
    assert "not defined" in lines["PFA"]
    assert "±" in lines["DPFedAvg"]
    assert as_markdown(method_rows(runs)).count("\n") == 6
    parsed = list(csv.DictReader(io.StringIO(as_csv(method_rows(runs)))))
    assert float(parsed[1]["accuracy"]) == method_rows(runs)[1].accuracy


def test_csv_files_have_one_value_in_each_cell(runs: list[RunResult]) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(method_rows(runs)))))
    assert [row["method"] for row in rows] == ["RobustHDP", "DPFedAvg", "PFA", "FedAvg", "Oracle"]
    row, expected = rows[1], method_rows(runs)[1]
    assert float(row["standard_error"]) == expected.standard_error
    assert (row["seeds"], row["needs_n_examples"], row["needs_epsilon"]) == ("2", "True", "False")
    assert "spread" not in row
    single = list(csv.DictReader(io.StringIO(as_run_csv(runs))))
    assert [(row["method"], int(row["seed"])) for row in single] == [
        (run.method, run.seed) for run in runs
    ]
    assert [float(row["accuracy"]) for row in single] == [run.accuracy for run in runs]
    assert not any(" " in value for row in (*rows, *single) for value in row.values())


def test_diverged_runs_are_told(runs: list[RunResult]) -> None:
    lost = small_run("FedAvg", rounds=5, learning_rate=1e38)
    assert "1 of 1 diverged" in as_text(method_rows([lost]))


def scored(run: RunResult, accuracy: float, noise: float) -> RunResult:
    """The same run with another final accuracy and noise."""
    final = {"accuracy": dict.fromkeys(run.clients, accuracy), "aggregate_noise": noise}
    rounds = [replace(record, oracle_noise=1.0, **final) for record in run.rounds]
    return replace(run, rounds=tuple(rounds))


def test_the_explanation_follows_the_figures(runs: list[RunResult]) -> None:
    robust, plain = (next(r for r in runs if r.method == m) for m in ("RobustHDP", "DPFedAvg"))
    ahead = explain([scored(robust, 0.9, 1.0), scored(plain, 0.8, 4.0)])
    assert (
        "RobustHDP has the highest final accuracy, 10.0 percentage points above DPFedAvg" in ahead
    )
    assert "Less noise did not" not in ahead
    behind = explain([scored(robust, 0.8, 1.0), scored(plain, 0.9, 4.0)])
    assert (
        "DPFedAvg has the highest final accuracy, 10.0 percentage points above RobustHDP" in behind
    )
    assert "Less noise did not give a higher accuracy here" in behind
    close = explain(
        [scored(r, a, 1.0) for r, a in ((robust, 0.8), (robust, 0.9), (plain, 0.79), (plain, 0.9))]
    )
    assert "the comparison of these two is inconclusive" in close
    others = [
        replace(r, method="own:other") for r in (scored(plain, 0.79, 1), scored(plain, 0.9, 1))
    ]
    tied = [scored(plain, 0.79, 1.0), scored(plain, 0.9, 1.0), *others]
    three = explain([scored(robust, 0.8, 1.0), scored(robust, 0.9, 1.0), *tied])
    assert "above DPFedAvg and own:other, the second best" in three
    assert "the comparison of these methods is inconclusive" in three
    level = explain([scored(robust, 0.8, 1.0), scored(plain, 0.8, 4.0)])
    assert "have the same final accuracy" in level
    assert "points above" not in level


def test_references_and_shared_budgets_are_told_by_data_whatever_the_method_is_called() -> None:
    """An own method, or one with options, has another name than those of the table."""
    names = ("RobustHDP", "Oracle", "FedAvg", "MinEpsilon")
    made = {name: small_run(name, rounds=1) for name in names}
    assert {name: run.is_reference for name, run in made.items()} == {
        "RobustHDP": False, "Oracle": True, "FedAvg": True, "MinEpsilon": False,
    }  # fmt: skip
    assert [name for name, run in made.items() if not run.own_budgets] == ["FedAvg", "MinEpsilon"]
    assert not replace(made["FedAvg"], deployed=True).is_reference  # nobody knows
    reached = dict(zip(names, (0.8, 0.9, 0.9, 0.7), strict=True))
    words = explain(
        [replace(scored(run, reached[n], 1.0), method=f"own:{n}") for n, run in made.items()]
    )
    assert (
        "own:RobustHDP has the highest final accuracy (apart from the references), 10.0 percentage "
        "points above own:MinEpsilon, the second best"
    ) in words
    lines = [line.strip() for line in words.splitlines() if "(disclosed" in line]
    weights = [line.partition(": ")[0] for line in lines]
    assert weights == ["own:RobustHDP", "own:Oracle"]  # clients of MinEpsilon share one budget


@pytest.mark.parametrize("line", ["5", "null", "[]", "{}"])
def test_a_run_with_a_line_that_is_no_record_is_left_out(line: str, tmp_path: Path) -> None:
    for name in ("sound", "bad"):
        small_run("DPFedAvg", rounds=1, folder=tmp_path / "runs" / name)
    (tmp_path / "runs" / "bad" / "rounds.jsonl").write_text(f"{line}\n")
    found = find_runs([tmp_path])
    assert [len(one.results) for one in found.sets] == [1]
    (note,) = found.notes
    assert "bad is left out: it must hold a finished run" in note


def test_an_artefact_is_no_run_and_hides_none(tmp_path: Path) -> None:
    small_run("DPFedAvg", rounds=1, folder=tmp_path / "runs" / "one")
    (tmp_path / "result.json").write_text('{"artefact": "accuracy-mnist", "holds": true}')
    found = find_runs([tmp_path])
    assert [len(one.results) for one in found.sets] == [1]
    assert found.notes == ()
    (tmp_path / "result.json").write_text('{"artefact')
    with pytest.raises(InvalidValueError, match="1 damaged or just begun"):
        find_runs([tmp_path])


def test_no_runs_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for write in (
        lambda: write_comparison([], tmp_path),
        lambda: write_report([], tmp_path),
        lambda: write_report([RunSet(())], tmp_path),
    ):
        with pytest.raises(InvalidValueError, match="must be one or more runs"):
            write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["one run", "not private", "diverged", "one client"])
def test_odd_comparisons_are_written_too(case: str, tmp_path: Path, runs: list[RunResult]) -> None:
    from federation_helpers import small_clients

    chosen = {
        "one run": lambda: [runs[0]],
        "not private": lambda: [run for run in runs if run.method == "FedAvg"],
        "diverged": lambda: [small_run("FedAvg", rounds=4, learning_rate=1e38), runs[0]],
        "one client": lambda: [small_run(clients=small_clients(epsilons=[5.0]), rounds=1)],
    }[case]()
    files = write_comparison(chosen, tmp_path)
    assert all(file.stat().st_size > 0 for file in files)
    assert {"report.md", "table.csv", "summary.json"} <= {file.name for file in files}


BUILT_IN = [
    "NoiseWise", "RobustHDP", "WeiAvg", "PFA", "BudgetAvg", "DPFedAvg", "MinEpsilon", "FedAvg",
    "Oracle", "Alone",
]  # fmt: skip


class TestStyles:
    def test_a_method_has_the_same_style_in_all_figures(self) -> None:
        assert set(BUILT_IN) <= set(METHODS)  # a new method gets one of the remaining styles
        usual = method_styles(BUILT_IN)
        assert (usual["Oracle"].colour, usual["FedAvg"].colour) == (MUTED, INK)
        assert len({style.colour for style in usual.values()}) == len(BUILT_IN)
        assert len({style.marker for style in usual.values()}) == len(BUILT_IN)
        for number, method in enumerate(BUILT_IN):
            own = [f"own:Method{k}" for k in range(number)]
            turned = [*own, *BUILT_IN[number:], *BUILT_IN[:number]]
            assert method_styles(turned)[method] == usual[method]
            assert method_styles([method])[method] == usual[method]
            assert method_styles([f"{method}(smooth=1)"])[f"{method}(smooth=1)"] == usual[method]

    def test_a_method_with_several_options_has_several_styles(self) -> None:
        several = ["RobustHDP(estimator=norm)", "RobustHDP", "RobustHDP(estimator=pcp)", "WeiAvg"]
        for listed in (several, several[::-1]):
            styles = method_styles(listed)
            assert list(styles) == listed
            assert len({style.colour for style in styles.values()}) == 4
            assert styles["RobustHDP"] == method_styles(["RobustHDP"])["RobustHDP"]

    def test_own_methods_get_the_remaining_styles(self) -> None:
        own = [f"own:Method{k}" for k in range(30)]
        styles = method_styles([*own[:5], "NoiseWise", "Oracle", *own[5:], "PFA"])
        assert len({(style.colour, style.marker) for style in styles.values()}) == 33  # as points
        assert len({style.colour for style in styles.values()}) == 8
        lines = [styles[name] for name in ("NoiseWise", "PFA", *own[:19])]
        assert len({(style.colour, style.line) for style in lines}) == 21
        assert all(styles[name].line != "--" for name in own)
        assert styles["own:Method0"].colour == method_styles(["RobustHDP"])["RobustHDP"].colour
        symbols = {marker_symbol(style.marker) for name, style in styles.items() if name in own}
        assert len(symbols) == 7

    def test_no_methods(self) -> None:
        assert method_styles([]) == {}


def ratios(runs: list[RunResult], noises: dict[str, float]) -> list[RunResult]:
    """Runs under these names, whose noise is so many times the oracle's."""
    run = next(r for r in runs if r.method == "RobustHDP")
    return [
        replace(scored(run, 0.8 + 0.001 * k, noise), method=name)
        for k, (name, noise) in enumerate(noises.items())
    ]


@pytest.mark.parametrize(
    ("largest", "scale"), [(1.0, "linear"), (1.001, "linear"), (1.9, "linear"), (2.5, "log")]
)
def test_the_axis_of_noise_has_numbers(largest: float, scale: str, runs: list[RunResult]) -> None:
    chart = noise_chart(ratios(runs, {"Oracle": 1.0, "DPFedAvg": largest}))
    assert chart is not None
    axes = chart.figure.axes[0]
    assert axes.get_xscale() == scale
    assert ("log" in axes.get_xlabel()) == (scale == "log")
    chart.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
    shown = sorted(
        ((tick.get_loc(), tick.label1) for tick in ticks if low <= tick.get_loc() <= high
         and tick.label1.get_text()),
        key=lambda pair: pair[0],
    )  # fmt: skip
    assert len({label.get_text() for _, label in shown}) == len(shown) >= 2
    boxes = [label.get_window_extent() for _, label in shown]
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
    assert axes.xaxis.get_offset_text().get_text() == ""


def test_names_of_points_do_not_collide(runs: list[RunResult]) -> None:
    run = next(r for r in runs if r.method == "RobustHDP")
    points = [(0.8, 1.0), (0.8, 4.0), (0.81, 4.1), (0.2, 16.0)]
    several = [
        replace(scored(run, *point), method=f"RobustHDP(estimator=norm, smooth={k})")
        for k, point in enumerate(points)
    ]
    chart = noise_chart(several)
    assert chart is not None
    chart.figure.draw_without_rendering()
    texts = [text for text in chart.figure.axes[0].texts if text.get_text()]
    assert len(texts) == len(points)
    boxes = [Text.get_window_extent(text) for text in texts]  # without leader lines
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_names_of_points_cover_no_error_bar(runs: list[RunResult]) -> None:
    run = next(r for r in runs if r.method == "RobustHDP")
    spread = {"DPFedAvg": (0.81, 0.0, 4.2), "WeiAvg": (0.78, 0.09, 6.0), "PFA": (0.78, 0.0, 1.0)}
    several = [
        replace(scored(run, mean + sign * error, noise), method=name, seed=sign)
        for name, (mean, error, noise) in spread.items()
        for sign in (-1, 1)
    ]
    chart = noise_chart(several)
    assert chart is not None
    chart.figure.draw_without_rendering()
    axes = chart.figure.axes[0]
    names = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    x, low = axes.transData.transform((6.0, 69.0))
    _, high = axes.transData.transform((6.0, 87.0))
    bar = Bbox.from_extents(x - 1, low, x + 1, high)
    assert names.keys() == spread.keys()
    assert not any(box.overlaps(bar) for box in names.values())


def test_the_confusion_matrix_is_that_of_the_best_method(runs: list[RunResult]) -> None:
    """The same method as in the result: one that needs disclosures does not replace it."""
    private = next(r for r in runs if r.method == "RobustHDP")
    disclosing = next(r for r in runs if r.method == "DPFedAvg")
    made = [scored(disclosing, 0.9, 1.0), scored(private, 0.8, 1.0)]
    chart = confusion_chart(made)
    assert chart is not None
    assert chart.caption.startswith("RobustHDP, ")
    assert "one seed" in chart.caption
    both = confusion_chart([*made, replace(made[1], seed=1)])
    assert both is not None
    assert "sum over 2 seeds" in both.caption


def test_a_figure_with_a_fixed_layout_is_drawn_once_for_each_file(
    runs: list[RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matplotlib draws a figure with a layout engine twice for each file."""
    drawn: list[object] = []
    draw = Figure.draw

    def counted(self: Figure, renderer: RendererBase) -> None:
        drawn.append(self)
        draw(self, renderer)

    chart = noise_chart(runs)
    assert chart is not None
    fix_layout(chart.figure)
    monkeypatch.setattr(Figure, "draw", counted)
    save_figure(chart.figure, tmp_path, "noise")
    assert len(drawn) == 3
    chart.figure.set_layout_engine("constrained")  # the count notices an engine
    save_figure(chart.figure, tmp_path, "noise")
    assert len(drawn) == 3 + 6


def test_a_legend_of_long_names_stays_in_its_figure(runs: list[RunResult]) -> None:
    run = next(r for r in runs if r.method == "RobustHDP")
    several = []
    for k in range(5):
        rounds = [replace(r, weights={c: w + 0.01 * k for c, w in r.weights.items()})
                  for r in run.rounds]  # fmt: skip
        name = f"RobustHDP(estimator=norm, smooth={k})"
        several.append(replace(run, method=name, rounds=tuple(rounds)))
    for chosen in (several, [r for r in runs if r.seed == 0]):
        chart = weights_chart(chosen)
        assert chart is not None
        chart.figure.draw_without_rendering()
        (legend,) = chart.figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= chart.figure.bbox.x1


def test_plots_have_the_styles_of_the_report(runs: list[RunResult]) -> None:
    axes = Comparison(tuple(runs), {}).plot()
    styles = method_styles(list(dict.fromkeys(run.method for run in runs)))
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == list(styles)
    for method, style in styles.items():
        assert lines[method].get_color() == style.colour
        assert lines[method].get_marker() == style.marker
    scores = [100 * run.accuracy for run in runs if run.method == "PFA"]
    ends = [float(y) for y in lines["PFA"].get_ydata()]
    assert ends[-1] == pytest.approx(sum(scores) / 2)
    mine = Figure().add_subplot()
    assert runs[0].plot(mine) is mine
    with pytest.raises(InvalidValueError, match="parts"):
        Comparison((), {}, parts=(Comparison(tuple(runs), {}),)).plot()
    with pytest.raises(InvalidValueError, match="evaluated"):
        replace(runs[0], rounds=()).plot()
