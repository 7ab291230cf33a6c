"""Files of the project beside the code: one version, the changelog's form, references, workflows."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import noisewise

ROOT = Path(__file__).parents[1]


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
