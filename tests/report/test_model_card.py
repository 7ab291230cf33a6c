"""The model card names every budget, what was disclosed, and the versions."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_helpers import EPSILONS, small_run

import noisewise as nw
from noisewise.federation.result_facts import ClientFacts

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2},
    "population": {"epsilon": [2.0, 8.0], "batch_size": 64, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 2, "learning_rate": 0.5, "clip_norm": 1.0},
}


def test_a_run_writes_its_card_once(tmp_path: Path) -> None:
    nw.run(CONFIG, "WeiAvg", folder=tmp_path)
    card = (tmp_path / "model_card.md").read_text()
    disclosed = "privacy budget, as the client reports it"
    versions = (torch.__version__, nw.__version__)
    for text in ("WeiAvg", "digits", "softmax", "pld", "unit: record", disclosed, *versions):
        assert text in card, text
    (tmp_path / "model_card.md").write_text("edited by hand")
    nw.run(CONFIG, "WeiAvg", folder=tmp_path)  # read only
    assert (tmp_path / "model_card.md").read_text() == "edited by hand"


def test_epsilons_of_every_client_are_listed() -> None:
    result = small_run(rounds=2, planned=4)
    card = nw.model_card(result, day=date(2026, 11, 18))
    rows = [line for line in card.splitlines() if line.startswith("| client-")]
    assert len(rows) == len(EPSILONS)
    for line, (client, facts) in zip(rows, result.clients.items(), strict=True):
        spent = result.epsilon_spent[client]
        assert spent is not None
        assert spent < facts["epsilon"]  # half of the rounds
        assert [cell.strip() for cell in line.split("|")[1:5]] == [
            client, f"{facts['epsilon']:g}", f"{spent:.4g}", "0.001",
        ]  # fmt: skip
    assert "2026-11-18" in card
    records = sum(facts["n_examples"] for facts in result.clients.values())
    assert result.trained is not None
    assert result.trained.sizes() == (650, 650)
    cells = [[cell.strip() for cell in line.split("|")] for line in card.splitlines()]
    assert ["", "training records", f"{records:,}", ""] in cells
    assert ["", "parameters", "650", ""] in cells
    assert ["", "trained parameters", "650", ""] in cells


def test_without_privacy_the_card_says_so() -> None:
    assert "without privacy" in nw.model_card(small_run("FedAvg", rounds=1))


@pytest.mark.parametrize("declared", [None, {"unit": "record", "epsilon": 3.0, "delta": 1e-5}])
def test_a_server_repeats_claims_as_claims(declared: dict[str, Any] | None) -> None:
    result = replace(
        small_run(rounds=1), deployed=True, guarantee=None,
        clients={"7": ClientFacts(declared=declared)},
    )  # fmt: skip
    card = nw.model_card(result)
    assert "did not check" in card
    assert ("not declared" if declared is None else "| 7 | record | 3 | 1e-05 |") in card


def test_names_cannot_break_the_table() -> None:
    result = small_run(rounds=1)
    facts = next(iter(result.clients.values()))
    hostile = replace(
        result,
        clients={"a|b\n# fake": facts},
        rounds=(replace(result.rounds[0], epsilon_spent={"a|b\n# fake": 1.0}),),
    )
    card = nw.model_card(hostile)
    assert "\n# fake" not in card
    assert "a|b" not in card
