"""Simulations whose budgets protect persons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import compare
from noisewise.experiments.config import as_config
from noisewise.experiments.prepare import prepare
from noisewise.federation.fingerprint import fingerprint
from noisewise.federation.simulation import simulate
from noisewise.report.model_card import model_card
from noisewise.report.page import disclosure_table

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2, "limit": 400, "records_per_person": 4},
    "population": {
        "epsilon": 4.0, "batch_size": 8, "delta": 1e-3, "unit": "person", "max_records": 3,
    },
    "model": {"name": "softmax"},
    "training": {"rounds": 2, "learning_rate": 0.5, "clip_norm": 1.0},
    "method": {"name": "WeiAvg"},
}  # fmt: skip
RECORDS = {"population.unit": "record", "population.max_records": None}


def test_n_is_the_number_of_persons() -> None:
    prepared = prepare(CONFIG)
    assert [client.spec.n_examples for client in prepared.clients] == [40, 40]
    assert [len(client.data.train) for client in prepared.clients] == [160, 160]
    assert {plan.unit for plan in prepared.plans} == {"person"}
    records = prepare(as_config(CONFIG, RECORDS))
    assert [client.spec.n_examples for client in records.clients] == [160, 160]
    for one, other in zip(prepared.clients, records.clients, strict=True):
        assert np.array_equal(one.data.train.targets, other.data.train.targets)  # the same split
    assert fingerprint(prepared) != fingerprint(records)


def test_results_say_the_unit(tmp_path: Path) -> None:
    result = simulate(prepare(CONFIG))
    assert result.unit == "person"
    assert {facts["max_records"] for facts in result.clients.values()} == {3}
    assert "one person" in disclosure_table([result]).rows[0][2]
    card = model_card(result)
    assert "all records of one person" in card
    assert "at most 3 records" in card
    records = simulate(prepare(as_config(CONFIG, RECORDS)))
    assert records.unit == "record"
    assert all("unit" not in facts for facts in records.clients.values())
    assert "(unit: record)" in model_card(records)
    assert result.rounds != records.rounds


def test_heads_and_engines_train_the_same_persons() -> None:
    prepared = prepare(CONFIG)
    network = replace(prepared, model=torch.nn.Sequential(prepared.model, torch.nn.Identity()))
    one, other = (
        torch.cat([part.flatten() for part in simulate(run).model.state_dict().values()])
        for run in (prepared, network)  # the second has no closed form
    )
    assert float((one - other).norm() / one.norm()) < 1e-5


def test_runs_of_a_comparison_agree_with_single_runs(tmp_path: Path) -> None:
    config = as_config(CONFIG, {"compare.seeds": 1, "compare.methods": ["WeiAvg", "DPFedAvg"]})
    results = compare(config, folder=tmp_path).results
    alone = simulate(prepare(config, "WeiAvg"))
    together = next(result for result in results if result.method == "WeiAvg")
    assert together.unit == "person"
    assert together.score == pytest.approx(alone.score, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data.records_per_person": None}, "population.unit"),
        ({"population.max_records": None}, "population.max_records"),
        ({"population.unit": "record"}, "population.max_records"),
        ({"population.unit": "patient"}, "population.unit"),
        ({"data.person": "who"}, "data.person"),
        ({"population.batch_size": 41}, "batch_size"),
    ],
)
def test_bad_settings_name_their_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValueError, match=field.replace(".", r"\.")):
        prepare(as_config(CONFIG, changes))
