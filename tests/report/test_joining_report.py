"""The section "Does joining pay?": who gains, from runs made by hand and from real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federation_helpers import small_run

from noisewise.federation import RunResult
from noisewise.report.chart import fix_layout
from noisewise.report.comparison_report import charts_of, write_comparison
from noisewise.report.explain import explain
from noisewise.report.joining_report import does_joining_pay, joining_chart
from noisewise.report.page import disclosure_table
from noisewise.report.tables import method_rows


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    methods = ("RobustHDP", "NoiseWise", "WeiAvg", "FedAvg", "Oracle", "Alone")
    return [small_run(m, rounds=2, seed=s, learning_rate=0.5) for s in (0, 1) for m in methods]


def with_accuracy(run: RunResult, scores: Mapping[str, float], seed: int = 0) -> RunResult:
    """The run with these final accuracies of its clients, and equal weights."""
    facts = next(iter(run.clients.values()))
    weights = dict.fromkeys(scores, 1 / len(scores))
    last = replace(run.rounds[-1], accuracy=dict(scores), weights=weights)
    return replace(run, rounds=(last,), seed=seed, clients=dict.fromkeys(scores, facts))


def named(runs: Sequence[RunResult], method: str) -> RunResult:
    return next(run for run in runs if run.method == method)


def test_gains_and_their_errors_by_hand(runs: list[RunResult]) -> None:
    alone = [{"a": 0.5, "b": 0.9, "c": 0.3}, {"a": 0.7, "b": 0.9, "c": 0.2}]
    common = [{"a": 0.8, "b": 0.8, "c": 0.8}, {"a": 0.8, "b": 0.84, "c": 0.8}]
    made = [
        with_accuracy(named(runs, method), scores, seed)
        for method, both in (("Alone", alone), ("RobustHDP", common))
        for seed, scores in enumerate(both)
    ]
    joining = does_joining_pay(made)
    assert joining is not None
    assert (joining.method, joining.alone, joining.seeds) == ("RobustHDP", "Alone", 2)
    assert [c.client for c in joining.clients] == ["c", "a", "b"]
    assert [c.gain for c in joining.clients] == pytest.approx([55, 20, -8])
    # The gains of c are 50 and 60, those of a 30 and 10, those of b -10 and -6.
    assert [c.gain_error for c in joining.clients] == pytest.approx([5, 10, 2])
    assert joining.sentence == (
        "2 of 3 clients gain: their accuracy is higher with the common model of RobustHDP than "
        "with a model that they train alone (1 by more than two standard errors). The mean gain "
        "over all clients is +22.3 percentage points."
    )
    assert joining.table.headings[1:5] == ("records", "batch size", "epsilon", "weight [%]")
    facts = made[0].clients["c"]
    assert joining.table.rows[0][2] == str(facts["batch_size"])
    assert joining.table.rows[0][4:] == ("33.33", "25.0", "80.0", "+55.0 ± 5.0")
    assert joining.method_table.rows == (("RobustHDP", "2 of 3", "+22.3", "-8.0", "+55.0"),)


def test_the_common_model_is_the_best_of_those_that_are_told_nothing(
    runs: list[RunResult],
) -> None:
    scores = {"NoiseWise": 0.6, "RobustHDP": 0.7, "WeiAvg": 0.8, "FedAvg": 0.9, "Oracle": 0.9}
    made = [with_accuracy(named(runs, m), {"a": s, "b": s}) for m, s in scores.items()]
    alone = with_accuracy(named(runs, "Alone"), {"a": 0.5, "b": 0.65})
    joining = does_joining_pay([*made, alone])
    assert joining is not None
    assert joining.method == "RobustHDP"
    assert list(joining.methods) == ["NoiseWise", "RobustHDP", "WeiAvg"]  # no references
    assert "standard error" not in joining.sentence  # there is one seed
    only_told = does_joining_pay([*made[2:], alone])
    assert only_told is not None
    assert only_told.method == "WeiAvg"


def test_without_alone_or_without_a_common_model_there_is_nothing(runs: list[RunResult]) -> None:
    without = [run for run in runs if run.method != "Alone"]
    alone = [run for run in runs if run.method == "Alone"]
    references = [run for run in runs if run.is_reference]
    other_seed = [replace(run, seed=9) for run in without]
    unfinished = [replace(run, rounds=()) for run in without]
    for chosen in (without, alone, references, [*alone, *other_seed], [*alone, *unfinished], []):
        assert does_joining_pay(chosen) is None
        assert joining_chart(chosen) is None


def test_a_client_without_an_accuracy_is_left_out(runs: list[RunResult]) -> None:
    alone = with_accuracy(named(runs, "Alone"), {"a": 0.5, "b": math.nan})
    common = with_accuracy(named(runs, "RobustHDP"), {"a": 0.6, "b": 0.6})
    joining = does_joining_pay([alone, common])
    assert joining is not None
    assert [c.client for c in joining.clients] == ["a"]


@pytest.mark.parametrize("n_clients", [1, 2, 16, 80])
def test_the_chart_names_clients_without_overlap(n_clients: int, runs: list[RunResult]) -> None:
    generator = np.random.default_rng(n_clients)
    ids = [f"client-{k:02d}" for k in range(n_clients)]
    alone = dict(zip(ids, generator.uniform(0.2, 0.7, n_clients), strict=True))
    common = dict(zip(ids, generator.uniform(0.5, 0.9, n_clients), strict=True))
    made = [
        with_accuracy(named(runs, "Alone"), alone),
        with_accuracy(named(runs, "NoiseWise"), common),
    ]
    chart = joining_chart(made)
    assert chart is not None
    fix_layout(chart.figure)
    assert len(chart.values.rows) == len(chart.tips["clients"]) == n_clients
    axes = chart.figure.axes[0]
    names = [text for text in axes.texts if text.get_text() != "loses"]
    assert len(names) == (n_clients if n_clients <= 24 else 8)
    if n_clients > 1:
        assert all(name.get_text().isdigit() for name in names)
    frame = axes.get_window_extent()
    boxes = [name.get_window_extent() for name in names]
    for number, box in enumerate(boxes):
        assert frame.x0 - 2 <= box.x0
        assert box.x1 <= frame.x1 + 2
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        assert not any(other.contains(*middle) for other in boxes[:number])


def test_the_lower_ends_of_error_bars_are_inside(runs: list[RunResult]) -> None:
    made = [
        replace(with_accuracy(named(runs, method), {"one": figures[seed], "two": 0.6}), seed=seed)
        for method, figures in {"Alone": (0.1, 0.5), "NoiseWise": (0.4, 0.8)}.items()
        for seed in (0, 1)
    ]
    chart = joining_chart(made)
    assert chart is not None
    (left, _), (bottom, _) = chart.figure.axes[0].get_xlim(), chart.figure.axes[0].get_ylim()
    assert left < 10
    assert bottom < 40


def test_equal_accuracies_can_be_drawn(runs: list[RunResult]) -> None:
    made = [
        with_accuracy(named(runs, method), {"one": 0.5, "two": 0.5})
        for method in ("Alone", "RobustHDP")
    ]
    chart = joining_chart(made)
    assert chart is not None
    fix_layout(chart.figure)


def test_the_page_has_the_section_only_with_alone(runs: list[RunResult], tmp_path: Path) -> None:
    page, *_ = write_comparison(runs, tmp_path / "with")
    text = page.read_text()
    joining = does_joining_pay(runs)
    assert joining is not None
    assert text.count('<h2 id="s1-joining">Does joining pay?</h2>') == 1
    assert '<a href="#s1-joining">' in text
    assert joining.sentence in text
    assert joining.sentence in (tmp_path / "with" / "report.md").read_text()
    assert (tmp_path / "with" / "figures" / "joining.png").is_file()
    without, *_ = write_comparison(
        [run for run in runs if run.method != "Alone"], tmp_path / "without"
    )
    assert "joining" not in without.read_text().partition("<body>")[2]
    assert not (tmp_path / "without" / "figures" / "joining.png").exists()


def test_other_parts_of_the_report_say_that_nothing_is_shared(
    runs: list[RunResult], tmp_path: Path
) -> None:
    row = next(row for row in disclosure_table(runs).rows if row[0] == "Alone")
    assert row[1:] == (
        "nothing: no update leaves a client",
        "each client's own budget, for one record",
    )
    assert "under Alone every client has its own model" in explain(runs)
    cells = next(row.cells() for row in method_rows(runs) if row.method == "Alone")
    assert (cells[2], cells[3], cells[5]) == ("not defined", "", "nothing")
    charts = {chart.name: chart for chart in charts_of(runs)}
    assert not any("Alone" in heading for heading in charts["weights"].values.headings)
    assert not any("Alone" in row[0] for row in charts["estimates"].values.rows)
    assert not any("Alone" in row[0] for row in charts["noise"].values.rows)
    assert any("Alone" in row[0] for row in charts["fairness"].values.rows)
    write_comparison(runs, tmp_path)
    summaries = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert {s["method"]: s["shares_model"] for s in summaries}["Alone"] is False
