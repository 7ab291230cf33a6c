"""Charts that compare methods: their values by hand, and when there is no chart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from federation_helpers import small_run

from noisewise.federation import RunResult
from noisewise.federation.round_times import RoundTime
from noisewise.report.method_figures import (
    epsilon_chart,
    loss_chart,
    paired_chart,
    participation_chart,
    time_chart,
)


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return [small_run(m, rounds=2, seed=s) for s in (0, 1) for m in ("RobustHDP", "FedAvg")]


def scored(run: RunResult, accuracy: float) -> RunResult:
    """The run with this final accuracy at every client."""
    last = replace(run.rounds[-1], accuracy=dict.fromkeys(run.clients, accuracy))
    return replace(run, rounds=(*run.rounds[:-1], last))


def test_marks_against_epsilon_are_those_of_private_methods(runs: list[RunResult]) -> None:
    made = [scored(run, 0.5 + 0.2 * run.seed) for run in runs]
    chart = epsilon_chart(made)
    assert chart is not None
    assert chart.values.headings == ("client", "epsilon", "RobustHDP [%]")
    assert {row[2] for row in chart.values.rows} == {"60.0"}  # mean of the two seeds
    budgets = {c: f"{facts['epsilon']:.4g}" for c, facts in runs[0].clients.items()}
    assert {row[0]: row[1] for row in chart.values.rows} == budgets
    assert [len(tips) for tips in chart.tips.values()] == [len(budgets)]
    equal = {c: {**facts, "epsilon": 1.0} for c, facts in made[0].clients.items()}
    assert epsilon_chart([replace(made[0], clients=equal)]) is None
    assert epsilon_chart([run for run in made if run.guarantee is None]) is None


def test_differences_are_paired_by_seed(runs: list[RunResult]) -> None:
    final = {("RobustHDP", 0): 0.8, ("RobustHDP", 1): 0.6, ("FedAvg", 0): 0.9, ("FedAvg", 1): 0.65}
    made = [scored(run, final[run.method, run.seed]) for run in runs]
    chart = paired_chart(made)
    assert chart is not None
    # The best method is that of the first group: FedAvg is a reference.
    assert chart.values.rows == (("FedAvg", "+10.0", "+5.0", "+7.5 ± 2.5 points"),)
    assert [len(tips) for tips in chart.tips.values()] == [2]
    assert paired_chart([run for run in made if run.seed == 0]) is None
    assert paired_chart([run for run in made if run.method == "FedAvg"]) is None


def test_the_loss_is_the_mean_over_seeds(runs: list[RunResult]) -> None:
    chart = loss_chart(runs)
    assert chart is not None
    losses = [run.rounds[-1].mean_train_loss for run in runs if run.method == "FedAvg"]
    assert chart.values.rows[-1][2].split()[0] == f"{sum(losses) / 2:.4g}"
    unknown = [
        replace(run, rounds=tuple(replace(r, train_loss=None) for r in run.rounds)) for run in runs
    ]
    assert loss_chart(unknown) is None


def test_participation_counts_the_updates_used(runs: list[RunResult]) -> None:
    assert participation_chart(runs) is None  # every client takes part in every round
    first, *others = runs[0].rounds
    client = next(iter(first.weights))
    without = replace(first, dropped={client: "failed"})
    chart = participation_chart([replace(runs[0], rounds=(without, *others))])
    assert chart is not None
    n_clients = len(runs[0].clients)
    assert [row[1] for row in chart.values.rows] == [str(n_clients - 1), str(n_clients)]


def test_the_time_of_a_round_is_its_mean_over_seeds(runs: list[RunResult]) -> None:
    assert time_chart(runs, {}) is None
    times = {
        (run.method, run.seed): [
            RoundTime(r.round, 10.0 * r.round, 10.0 * r.round + r.round + run.seed)
            for r in run.rounds
        ]
        for run in runs
        if run.method == "FedAvg"
    }
    chart = time_chart(runs, times)
    assert chart is not None
    assert chart.values.headings == ("round", "FedAvg")
    assert chart.values.rows[0] == ("1", "1.5 (1 to 2)")
