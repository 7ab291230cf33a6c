"""The study's page shows the results that are committed, and these belong to its cells."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_populations_of_a_seed_are_one_group(tables: ModuleType) -> None:
    method = sys.modules["method"]
    groups = method.groups(list(method.softmax()))
    assert [len(group) for group in groups] == [63, 63, 63]
    assert all(len({cell.seed for cell in group}) == 1 for group in groups)
    assert [len(group) for group in method.groups(list(method.cnn()))] == [1] * 9
