"""Tables, words and figures: right for real runs, and for the odd ones too."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from federation_helpers import small_run

from noisewise.federation import RunResult
from noisewise.report import as_csv, as_markdown, as_text, explain, method_rows, write_comparison


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
    assert "RobustHDP ends 10.0 points ahead of DPFedAvg" in ahead
    assert "did not win" not in ahead
    behind = explain([scored(robust, 0.8, 1.0), scored(plain, 0.9, 4.0)])
    assert "DPFedAvg ends 10.0 points ahead of RobustHDP" in behind
    assert "Less noise did not win here" in behind
    close = explain(
        [scored(r, a, 1.0) for r, a in ((robust, 0.8), (robust, 0.9), (plain, 0.79), (plain, 0.9))]
    )
    assert "no winner" in close
    level = explain([scored(robust, 0.8, 1.0), scored(plain, 0.8, 4.0)])
    assert "end level" in level
    assert "ahead" not in level


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
