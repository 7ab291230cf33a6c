"""The layout of docs/design.md: imports go only to folders above, and pickle is not used."""

from __future__ import annotations

import ast
import re
from collections import Counter
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
    "errors", "checks", "lazy_imports", "npy", "palette", "plugins", "randomness", "schema",
    "storage", "text", "worker_processes", "__version__",
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


def forbidden_imports(path: Path, package: Path = PACKAGE) -> set[str]:
    """The folders and root files that a file imports and must not import."""
    parts = path.relative_to(package).parts
    if parts == ("__init__.py",):
        return set()  # its names are imported on first use
    allowed = COMMON if len(parts) == 1 else ALLOWED[parts[0]] | COMMON | {parts[0]}
    used = {m.split(".")[1] for m in imported_modules(path) if m.startswith("noisewise.")}
    return used - allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_only_to_rows_above(path: Path) -> None:
    """Root files import only each other."""
    assert not forbidden_imports(path)


@pytest.mark.parametrize(
    ("name", "line", "forbidden"),
    [
        ("checks.py", "from noisewise.data.specs import ClientSpec", {"data"}),
        ("checks.py", "def late():\n    import noisewise.cli", {"cli"}),
        ("checks.py", "from noisewise import report", {"report"}),
        ("checks.py", "from noisewise.errors import InvalidValueError", set()),
        ("noise/gram.py", "from noisewise.training import tasks", {"training"}),
        ("noise/gram.py", "from noisewise.storage import cache_folder", set()),
    ],
)
def test_the_check_sees_a_forbidden_import(
    name: str, line: str, forbidden: set[str], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert forbidden_imports(path, tmp_path) == forbidden


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
    assert files == set(
        re.findall(r"`(\w+)\.py`", DESIGN.split("Files outside of these folders")[1])
    )
    planted = DESIGN.replace("| `data`, `privacy` |", "| `data`, `report` |")
    assert described_layout(planted) != layout


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_pickle(path: Path) -> None:
    modules = imported_modules(path)
    assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    text = path.read_text()
    assert all("weights_only=True" in call for call in re.findall(r"torch\.load\([^\n]*", text))
    assert "allow_pickle=True" not in text


def repeated_names(paths: list[Path]) -> set[str]:
    """Base names of more than one file."""
    count = Counter(path.stem for path in paths)
    return {name for name, n in count.items() if n > 1} - {"__init__"}


def test_no_two_files_have_the_same_base_name() -> None:
    assert not repeated_names(FILES)
    assert repeated_names([*FILES, PACKAGE / "report" / "storage.py"]) == {"storage"}


def test_only_dataset_reading_imports_pillow() -> None:
    users = [p for p in FILES if any(m.split(".")[0] == "PIL" for m in imported_modules(p))]
    assert [str(p.relative_to(PACKAGE)) for p in users] == ["data/layouts.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_first_line_says_what_the_file_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
