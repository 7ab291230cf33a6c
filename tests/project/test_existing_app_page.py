"""`examples/existing_app`: a plain Flower app before and after, and the page with the change."""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noisewise.cli import app

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (ROOT / "examples" / "existing_app" / name for name in ("before", "after"))
PAGE = ROOT / "docs" / "existing_flower_app.md"


def changes(name: str) -> str:
    """The lines that differ, as `diff -u` shows them, without file names and line numbers."""
    texts = [(folder / name).read_text().splitlines() for folder in (BEFORE, AFTER)]
    lines = list(difflib.unified_diff(*texts, n=2, lineterm=""))[2:]
    return "\n".join("@@" if line.startswith("@@") else line.rstrip() for line in lines)


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"```{kind}\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)
    return ["\n".join(line.rstrip() for line in block.splitlines()) for block in found]


@pytest.mark.parametrize(
    "name", ["digits_app/server_app.py", "digits_app/task.py", "pyproject.toml"]
)
def test_the_page_shows_every_change(name: str) -> None:
    assert changes(name) in blocks("diff"), f"write this into {PAGE.name}:\n{changes(name)}"


def test_the_page_shows_the_new_files() -> None:
    assert (AFTER / "digits_app" / "client_app.py").read_text().strip() in blocks("py")
    assert (AFTER / "site.toml").read_text().strip() in blocks("toml")


def test_no_other_file_changes() -> None:
    names = [
        {p.relative_to(folder).as_posix() for p in folder.rglob("*") if "__pycache__" not in str(p)}
        for folder in (BEFORE, AFTER)
    ]
    assert names[1] - names[0] == {"site.toml", "make_site.py"}
    assert names[0] <= names[1]


def test_the_noise_floor_is_that_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(AFTER))
    text = (AFTER / "pyproject.toml").read_text()
    (command,) = re.findall(r"^# noisewise (flower floor .*)$", text, flags=re.MULTILINE)
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    rate = ["--learning-rate", str(config["learning-rate"])]
    done = CliRunner().invoke(app, [*command.split(), *rate])
    for name in [name for name in sys.modules if name.startswith("digits_app")]:
        monkeypatch.delitem(sys.modules, name)
    assert done.exit_code == 0, done.output
    assert f"noise-floor = {config['noise-floor']}\n" in done.output
