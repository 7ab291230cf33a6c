"""The study's page shows the results that are committed, and these belong to its cells."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from noisewise.experiments.config import load_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """studies/tables.py, without drawing anything."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    for name in ("method", "tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("tables")
    monkeypatch.setattr(found, "save_figure", lambda figure, folder, name: (folder / name,))
    return found


def test_the_page_shows_what_is_committed(tables: ModuleType) -> None:
    text = tables.PAGE.read_text()
    shown = text.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert shown.strip() == tables.page().strip(), "run: python studies/tables.py"


def test_every_result_belongs_to_a_cell_and_finished(tables: ModuleType) -> None:
    wanted = {tables.result_file(cell) for cells in tables.PARTS.values() for cell in cells()}
    there = set(tables.RESULTS.glob("*/*.json")) - set(tables.RESULTS.glob("pilots/*"))
    assert there
    assert there <= wanted
    for part in tables.PARTS:
        for runs in tables.read(part).values():
            assert all(run["status"] == "finished" for run in runs)
            assert len({run["seed"] for run in runs}) == len(runs)


def test_chosen_configs_are_those_of_the_results(tables: ModuleType) -> None:
    wanted = tables.chosen_configs()
    assert len(wanted) == 18
    for file, content in wanted.items():
        assert file.read_text() == content, "run: python studies/tables.py"
    (dist6,) = (file for file in wanted if file.name == "softmax_iid-dist6.toml")
    rates = {m.name: m.learning_rate for m in load_config(dist6).compare.methods}
    runs = tables.read("softmax")
    assert rates["NoiseWise"] == runs["Dist6", "NoiseWise"][0]["learning_rate"]


def test_pilots_go_on_until_the_best_is_not_at_an_end(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    method = sys.modules["method"]
    monkeypatch.setattr(method, "RESULTS", tmp_path)
    (tmp_path / "pilots").mkdir()
    cell = next(iter(method.softmax()))
    tried: list[float] = []
    while wanted := method.pilots(cell)[1]:
        tried += wanted
        for rate in wanted:  # the best rate is 0.5; larger ones diverge
            loss = abs(rate - 0.5) if rate < 0.7 else None
            content = {"rate": rate, "train_loss": loss}
            method.pilot_file(cell, rate).write_text(json.dumps(content))
    assert tried == [0.003, 0.01, 0.03, 0.1, 0.056, 0.18, 0.32, 0.58, 1.0]
    assert min(method.pilot_losses(cell), key=method.pilot_losses(cell).get) == 0.58


def test_other_seeds_and_populations_can_be_asked_for(tables: ModuleType) -> None:
    method = sys.modules["method"]
    wanted = argparse.Namespace(dists="Dist6", methods="NoiseWise,WeiAvg", seeds="7,8")
    cells = method.chosen(list(method.softmax()), wanted)
    assert [(c.name, c.seed) for c in cells] == [
        ("Dist6-NoiseWise", 7), ("Dist6-NoiseWise", 8), ("Dist6-WeiAvg", 7), ("Dist6-WeiAvg", 8)
    ]  # fmt: skip


def test_populations_of_a_seed_are_one_group(tables: ModuleType) -> None:
    method = sys.modules["method"]
    groups = method.groups(list(method.softmax()))
    assert [len(group) for group in groups] == [63, 63, 63]
    assert all(len({cell.seed for cell in group}) == 1 for group in groups)
    assert [len(group) for group in method.groups(list(method.cnn()))] == [1] * 11


def test_the_cnn_has_a_rate_of_equal_noise(tables: ModuleType) -> None:
    method = sys.modules["method"]
    for dist, rate in method.SAME_NOISE.items():
        assert method.same_noise(dist) == pytest.approx(rate, rel=0.01)


def test_rounds_in_numbers_are_those_that_were_played(tables: ModuleType) -> None:
    """The ratio of way and noise, from plans, is what the runs noted down from their weights."""
    runs = {key: several[0] for key, several in tables.read("cnn").items()}
    for dist, rest in runs:
        best, found = (
            tables.one_round(dist, name) for name in ("NoiseWise", runs[dist, rest]["method"])
        )
        share = (found[0] / found[1]) ** 2 / (best[0] / best[1]) ** 2
        assert share == pytest.approx(runs[dist, rest]["signal_share"], rel=0.01)
