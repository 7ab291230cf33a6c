"""The top of the page: facts from the runs, and a verdict that follows the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from federation_helpers import small_run

from noisewise.federation import RunResult
from noisewise.federation.round_times import RoundTime
from noisewise.report.explain import explain
from noisewise.report.page import Section, render_page
from noisewise.report.page_summary import page_summary, sweep_verdict, verdict
from noisewise.report.paired import best_method, best_methods, method_groups, paired_difference
from noisewise.report.run_sets import RunSet

CONFIG = '[data]\nname = "digits"\n[model]\nname = "softmax"\n[features]\nname = "scattering"\n'


@pytest.fixture(scope="module")
def made() -> dict[str, RunResult]:
    names = ("RobustHDP", "NoiseWise", "WeiAvg", "Oracle", "FedAvg")
    return {name: small_run(name, rounds=1) for name in names}


def scored(run: RunResult, scores: Sequence[float]) -> list[RunResult]:
    """The same run under several seeds, with these accuracies."""
    return [
        replace(
            run,
            seed=seed,
            rounds=(replace(run.rounds[-1], accuracy=dict.fromkeys(run.clients, score)),),
        )
        for seed, score in enumerate(scores)
    ]


def test_the_groups_follow_the_needs_and_the_best_is_told_nothing(
    made: dict[str, RunResult],
) -> None:
    runs = [*scored(made["RobustHDP"], [0.7]), *scored(made["NoiseWise"], [0.8]),
            *scored(made["WeiAvg"], [0.9]), *scored(made["Oracle"], [0.95])]  # fmt: skip
    assert method_groups(runs) == {
        "nothing": ["RobustHDP", "NoiseWise"], "disclosed": ["WeiAvg"], "reference": ["Oracle"],
    }  # fmt: skip
    assert best_method(runs) == "NoiseWise"
    assert best_method(runs, "disclosed") == "WeiAvg"
    assert best_method(runs[2:]) == "WeiAvg"
    assert best_method(scored(made["RobustHDP"], [math.nan])) is None


def test_all_methods_that_tie_are_the_best(made: dict[str, RunResult]) -> None:
    tied = [*scored(made["RobustHDP"], [0.8, 0.7]), *scored(made["NoiseWise"], [0.8, 0.7])]
    runs = [*tied, *scored(made["WeiAvg"], [0.6, 0.5])]
    assert best_methods(runs) == ("RobustHDP", "NoiseWise")
    text = verdict(runs)
    assert text.startswith(
        "RobustHDP and NoiseWise are the best methods that need no disclosures (accuracy 75.0 %); "
        "their difference to WeiAvg, the best method that needs disclosures"
    )
    assert verdict(tied).endswith("no other private method was measured.")
    assert "RobustHDP and NoiseWise have the same final accuracy" in explain(tied)
    page = render_page("title", [Section(RunSet(tuple(runs)), ())])
    assert page.count('<span class="best">best</span>') == 2
    sets = [RunSet(tuple(runs), name="a"), RunSet(tuple(runs[2:]), name="b")]
    assert sweep_verdict(sets).startswith(
        "NoiseWise is best in 2 and RobustHDP in 1 of 2 settings, among the methods that need no "
        "disclosures"
    )
    alone = render_page("title", [Section(RunSet(tuple(scored(made["NoiseWise"], [0.8]))), ())])
    assert '<span class="best">' not in alone  # there is no other method


def test_the_noise_of_tied_methods_is_told_in_words(made: dict[str, RunResult]) -> None:
    runs = [*scored(made["RobustHDP"], [0.8]), *scored(made["NoiseWise"], [0.8])]
    ideal = [
        replace(run, rounds=tuple(replace(r, aggregate_noise=r.oracle_noise) for r in run.rounds))
        for run in runs
    ]
    text = explain(ideal)
    assert "is the least possible for RobustHDP and NoiseWise" in text
    assert "1 times" not in text


def test_a_paired_difference_by_hand(made: dict[str, RunResult]) -> None:
    runs = scored(made["NoiseWise"], [0.80, 0.90, 0.70]) + scored(made["WeiAvg"], [0.79, 0.87])
    difference = paired_difference(runs, "NoiseWise", "WeiAvg")
    assert difference.seeds == (0, 1)
    assert difference.values == pytest.approx((1.0, 3.0))
    assert difference.mean == pytest.approx(2.0)
    assert difference.error == pytest.approx(1.0)  # sd sqrt(2) over sqrt(2) seeds
    assert difference.text() == "+2.0 ± 1.0 points"
    assert not difference.conclusive  # exactly two standard errors
    back = paired_difference(runs, "WeiAvg", "NoiseWise")
    assert back.text() == "-2.0 ± 1.0 points"


@pytest.mark.parametrize(
    ("ours", "theirs", "end"),
    [
        ([0.8, 0.9], [0.7, 0.79], "is +10.5 ± 0.5 points (mean ± paired standard error over 2 "
         "seeds): better by more than two standard errors."),
        ([0.7, 0.79], [0.8, 0.9], "worse by more than two standard errors."),
        ([0.8, 0.9], [0.8, 0.8], "is +5.0 ± 5.0 points (mean ± paired standard error over 2 "
         "seeds): inconclusive."),
        ([0.8], [0.7], "is +10.0 points with one seed: inconclusive."),
    ],
)  # fmt: skip
def test_the_verdict_follows_the_paired_difference(
    ours: list[float], theirs: list[float], end: str, made: dict[str, RunResult]
) -> None:
    runs = scored(made["NoiseWise"], ours) + scored(made["WeiAvg"], theirs)
    text = verdict([*runs, *scored(made["Oracle"], [0.99] * len(ours))])
    assert text.startswith("NoiseWise is the best method that needs no disclosures (accuracy ")
    assert "WeiAvg, the best method that needs disclosures (budgets)" in text
    assert text.endswith(end)
    assert "Oracle" not in text


def test_the_verdict_of_few_methods(made: dict[str, RunResult]) -> None:
    assert "no other private method" in verdict(scored(made["NoiseWise"], [0.8]))
    assert verdict(scored(made["Oracle"], [0.8])) == ""
    both = scored(made["NoiseWise"], [0.8]) + scored(made["RobustHDP"], [0.7])
    assert "RobustHDP, the second best" in verdict(both)


def test_the_facts_are_those_of_the_runs(made: dict[str, RunResult]) -> None:
    run = made["NoiseWise"]
    noon = 1_790_000_000.0  # 2026-09-21
    times = {("NoiseWise", 0): (RoundTime(1, noon, noon + 75),)}
    runs = RunSet((run, made["WeiAvg"]), config=CONFIG, times=times)
    summary = page_summary([runs])
    facts = dict(summary.facts)
    assert summary.title == "digits, model softmax: 2 methods compared"
    assert facts["Date"].startswith("2026-09-21 ")
    assert facts["Date"].endswith("UTC (1 min 15 s)")
    assert facts["Data"] == "digits, features scattering"
    epsilons = [client["epsilon"] for client in run.clients.values()]
    assert f"epsilon {min(epsilons):g} to {max(epsilons):g} and delta" in facts["Privacy"]
    assert f"unit: one record, accountant {run.settings['accountant']}" in facts["Privacy"]
    assert facts["Clients"].startswith(f"{len(run.clients)}, each with ")
    assert facts["Rounds"] == "1; 1 seed of each method"
    assert dict(page_summary([replace(runs, times={})]).facts)["Date"] == "not recorded"
    persons = {c: {**f, "unit": "person"} for c, f in run.clients.items()}
    other = page_summary([RunSet((replace(run, clients=persons),))])
    assert "unit: one person" in dict(other.facts)["Privacy"]
    plain = page_summary([RunSet((made["FedAvg"],))])
    assert dict(plain.facts)["Privacy"].startswith("none")


def test_a_real_federation_has_no_privacy_claim_at_the_top(made: dict[str, RunResult]) -> None:
    run = replace(made["RobustHDP"], deployed=True, guarantee=None)
    summary = page_summary([RunSet((run,))])
    assert summary.title == "Real federation: RobustHDP"
    assert dict(summary.facts)["Privacy"].startswith("not known to the server")


def test_the_page_marks_the_best_method_once(made: dict[str, RunResult]) -> None:
    runs = scored(made["RobustHDP"], [0.7]) + scored(made["NoiseWise"], [0.8])
    page = render_page("T", [Section(RunSet(tuple(runs + scored(made["Oracle"], [0.9]))), ())])
    assert page.count('<span class="best">best</span>') == 1
    row = page[page.index('<span class="best">') - 200 : page.index('<span class="best">')]
    assert "NoiseWise" in row
    for heading in ("Methods that need no disclosures", "References, not for real use"):
        assert heading in page
