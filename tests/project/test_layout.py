"""The layout of docs/design.md: imports go only to folders above, and pickle is not used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "noisewise"
ORDER = [
    "data", "privacy", "noise", "training", "encoders", "site", "aggregation", "federation",
    "flower", "report", "experiments", "paper",
]  # fmt: skip
ALLOWED = {
    "data": set(),
    "privacy": {"data"},
    "noise": set(),
    "training": {"data", "privacy"},
    "encoders": {"data", "training"},
    "site": {"data", "privacy", "training"},
    "aggregation": {"data", "noise", "privacy"},
    "federation": {"data", "privacy", "noise", "training", "aggregation"},
    "flower": {"data", "privacy", "training", "site", "aggregation", "federation"},
    "report": {"federation", "privacy"},  # results of runs, and a ledger's statement
    "experiments": set(ORDER) - {"encoders", "site", "flower", "experiments", "paper"},
    "paper": set(ORDER) - {"encoders", "site", "flower", "paper"},
    "cli": set(ORDER),
}
DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
COMMON = {
    "errors", "checks", "npy", "plugins", "randomness", "schema", "storage", "text",
    "worker_processes", "__version__",
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_only_to_rows_above(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return  # __init__.py and the common modules
    folder = parts[0]
    used = {m.split(".")[1] for m in imported_modules(path) if m.startswith("noisewise.")}
    assert used <= ALLOWED[folder] | COMMON | {folder}, f"{path} imports {sorted(used)}"


def test_only_the_command_line_imports_the_paper() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in FILES
        if any(module.startswith("noisewise.paper") for module in imported_modules(path))
    }
    assert users == {"cli", "paper"}


def described_layout(page: str) -> dict[str, set[str]]:
    """The folders of the design page, in order, and what each may import."""
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    return {folder: set(re.findall(r"`(\w+)`", imports)) for folder, imports in rows}


def test_the_design_page_has_this_layout() -> None:
    layout = described_layout(DESIGN)
    assert list(layout) == [*ORDER, "cli"]
    assert {name: imports - {name} for name, imports in ALLOWED.items()} == layout
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(layout)
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert files == set(re.findall(r"`(\w+)\.py`", DESIGN.split("Files beside the folders")[1]))
    planted = DESIGN.replace("| `data`, `privacy` |", "| `data`, `report` |")
    assert described_layout(planted) != layout


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_pickle(path: Path) -> None:
    modules = imported_modules(path)
    assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    text = path.read_text()
    assert all("weights_only=True" in call for call in re.findall(r"torch\.load\([^\n]*", text))
    assert "allow_pickle=True" not in text


def test_only_dataset_reading_imports_pillow() -> None:
    users = [p for p in FILES if any(m.split(".")[0] == "PIL" for m in imported_modules(p))]
    assert [str(p.relative_to(PACKAGE)) for p in users] == ["data/layouts.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_first_line_says_what_the_file_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
