"""docs/utility.md shows the committed results, and each of them is a run of the study."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """studies/utility_tables.py, without drawing anything."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    for name in ("utility", "utility_tables", "result_store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("utility_tables")
    monkeypatch.setattr(found, "save_figure", lambda figure, folder, name, kinds: ())
    return found


def test_the_page_shows_what_is_committed(tables: ModuleType) -> None:
    text = tables.PAGE.read_text()
    shown = text.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert shown.strip() == tables.page().strip(), "run: python studies/utility_tables.py"


def test_every_result_is_a_run_of_the_study_and_finished(tables: ModuleType) -> None:
    study = sys.modules["utility"]
    file = study.result_file()
    wanted = {
        file.key_of(study.key_fields(run))
        for runs in study.PARTS.values()
        for seed in range(10)
        for run in runs(seed)
    }
    results = file.read()
    assert results
    assert {file.key_of(result) for result in results} <= wanted
    assert all(result["status"] == "finished" for result in results)


def test_every_image_of_the_page_is_there(tables: ModuleType) -> None:
    lines = tables.PAGE.read_text().splitlines()
    images = [line.partition("](")[2].rstrip(")") for line in lines if line.startswith("![")]
    assert images
    for image in images:
        assert (tables.PAGE.parent / image).is_file(), image


def test_the_automatic_rate_was_fixed_on_mnist_alone(tables: ModuleType) -> None:
    study = sys.modules["utility"]
    runs = list(study.rule(0))
    assert {run.config for run in runs} == {"mnist_head.toml"}
    assert {run.population for run in runs} == {"Dist1", "Dist2", "Dist3"}
