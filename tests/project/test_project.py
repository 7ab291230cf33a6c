"""Project files besides the code: version, changelog, references, workflow, templates."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import noisewise

ROOT = Path(__file__).parents[2]


def built_version(root: Path) -> str:
    """The version that setuptools writes into the metadata of a wheel."""
    project = read_configuration(root / "pyproject.toml", expand=True)["project"]
    return str(project["version"])


def cited_version(text: str) -> str:
    return re.findall(r"^version: (.+)$", text, flags=re.MULTILINE)[0].strip("\"'")


def test_the_version_has_one_source(tmp_path: Path) -> None:
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert built_version(ROOT) == noisewise.__version__
    package = tmp_path / "src" / "noisewise"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    code = (ROOT / "src" / "noisewise" / "__init__.py").read_text()
    (package / "__init__.py").write_text(code.replace(f'"{noisewise.__version__}"', '"98.76.5"'))
    assert built_version(tmp_path) == "98.76.5"


def test_the_citation_has_the_version_of_the_package() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert cited_version(text) == noisewise.__version__
    assert cited_version("cff-version: 1.2.0\nversion: 98.76.5\n") != noisewise.__version__


GROUPS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def changelog_faults(text: str) -> list[str]:
    """What differs from the form of Keep a Changelog."""
    faults = []
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    if not versions or not versions[0].startswith("[Unreleased]\n"):
        faults.append("the first section is not [Unreleased]")
    for section in versions:
        heading, _, body = section.partition("\n")
        if not re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading):
            faults.append(f"heading {heading!r}")
        before, *groups = re.split(r"^### ", body, flags=re.MULTILINE)
        faults += [f"text before the groups of {heading}"] if before.strip() else []
        names = [group.partition("\n")[0] for group in groups]
        faults += [f"group {name!r}" for name in names if name not in GROUPS]
        faults += [f"groups {names} are not unique"] if len(set(names)) < len(names) else []
        for name, group in zip(names, groups, strict=True):
            lines = group.partition("\n")[2].strip().splitlines()
            if not lines or not all(re.match(r"- \S|  \S", line) for line in lines):
                faults.append(f"{name} is not a list")
    return faults


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert changelog_faults(text) == []
    released = text.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.1.0] - 2027-01-01\n")
    assert changelog_faults(released) == []
    for flaw, replacement in (
        ("## [Unreleased]", "## 0.1.0 (unreleased)"),
        ("### Added", "### New"),
        ("### Changed", "### Added"),
        ("### Fixed\n", "### Fixed\n\nText.\n"),
        ("### Security\n", "### Deprecated\n\n### Security\n"),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- A line without a group.\n"),
    ):
        assert flaw in text
        assert changelog_faults(text.replace(flaw, replacement)), replacement


SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".cff"}
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", "studies", "configs", ".ci", ".github")


def lost_pages(text: str) -> list[str]:
    """Pages that the text refers to and that the repository does not have."""
    names = re.findall(r"(?<![\w/.-])(?:docs/[\w/]+|[A-Z]{4,})\.md\b", text)
    return sorted({name for name in names if not (ROOT / name).is_file()})


def test_references_lead_to_pages_of_the_repository() -> None:
    paths = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    for folder in FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert len(paths) > 300
    lost = {str(path.relative_to(ROOT)): lost_pages(path.read_text()) for path in paths}
    assert {path: names for path, names in lost.items() if names} == {}
    assert lost_pages("as PRIVACY" + ".md 2 and docs/" + "lost.md say, or README.md") == [
        "PRIVACY" + ".md",
        "docs/" + "lost.md",
    ]


def symbolic_links(folder: Path) -> list[str]:
    """Symbolic links in the parts of a checkout that belong to the repository."""
    paths = list(folder.iterdir())
    for name in (*FOLDERS, "reproduction"):
        paths += (folder / name).rglob("*")
    own = [path for path in paths if path.name not in (".venv", "runs", "site")]
    return sorted(str(path.relative_to(folder)) for path in own if path.is_symlink())


def test_there_are_no_symbolic_links(tmp_path: Path) -> None:
    """Archives and some systems do not keep them."""
    assert symbolic_links(ROOT) == []
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page").symlink_to(ROOT / "README.md")
    (tmp_path / "link").symlink_to(ROOT / "README.md")
    assert symbolic_links(tmp_path) == ["docs/page", "link"]


PARTS = ["lint", "types", "tests", "docs", "build"]


def read_yaml(path: str) -> Any:
    import yaml

    return yaml.safe_load((ROOT / path).read_text())


def test_ci_refuses_an_unknown_part() -> None:
    result = subprocess.run(
        [str(ROOT / ".ci" / "run"), "nonsense"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2
    assert result.stderr == f"nonsense: must be one of {', '.join(PARTS)}, slow\n"


@pytest.mark.extras
def test_the_workflow_calls_every_part_of_ci() -> None:
    (job,) = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["part"] == [*PARTS, "slow"]
    assert job["steps"][-1]["run"] == ".ci/run ${{ matrix.part }}"
    assert f"set -- {' '.join(PARTS)}\n" in (ROOT / ".ci" / "run").read_text()
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert job["container"]["image"].startswith(f"python:{python.removeprefix('>=')}-")


def test_project_files_name_no_host() -> None:
    files = [
        *(ROOT / ".github").rglob("*.*"),
        ROOT / ".pre-commit-config.yaml",
        ROOT / "SECURITY.md",
    ]
    assert len(files) >= 7
    for path in files:
        assert "://" not in path.read_text(), path
        assert not re.search(r"\w@\w+\.\w", path.read_text()), path


@pytest.mark.extras
def test_the_commit_hooks_run_the_projects_ruff(tmp_path: Path) -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    commands = {}
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        assert program == ".venv/bin/ruff"
        assert hook["language"] == "system"
        commands[hook["id"]] = [str(Path(sys.executable).parent / "ruff"), *words]
    assert set(commands) == {"ruff-check", "ruff-format"}
    path = tmp_path / "flawed.py"
    path.write_text("import os\nx = [1,2]\n")
    checked = subprocess.run([*commands["ruff-check"], str(path)], capture_output=True, timeout=600)
    assert checked.returncode == 1
    assert b"F401" in checked.stdout
    subprocess.run([*commands["ruff-format"], str(path)], check=True, timeout=600)
    assert path.read_text() == "import os\n\nx = [1, 2]\n"


def form_faults(form: dict[str, Any]) -> list[str]:
    """What a forge would refuse in an issue form."""
    faults = [key for key in ("name", "description", "body") if not form.get(key)]
    ids = [field["id"] for field in form["body"] if "id" in field]
    faults += ["ids"] if len(set(ids)) < len(ids) else []
    for field in form["body"]:
        wanted = {"markdown": "value", "textarea": "label", "dropdown": "options"}
        if wanted.get(field["type"]) not in field["attributes"]:
            faults.append(f"{field['type']} {field.get('id')}")
    if all(field["type"] == "markdown" for field in form["body"]):
        faults.append("nothing to fill in")
    return faults


@pytest.mark.extras
@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_are_complete(name: str) -> None:
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form_faults(form) == []
    assert form_faults(form | {"name": ""}) == ["name"]
    assert form_faults(form | {"body": [*form["body"], form["body"][-1]]}) == ["ids"]
    assert form_faults(form | {"body": [{"type": "text", "attributes": {}}]}) == ["text None"]
