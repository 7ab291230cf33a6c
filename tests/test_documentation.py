"""Documentation is executed: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from noisewise.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def sessions(page: Path) -> list[str]:
    """What runs together: each block by itself, or all of a page that says so."""
    found = blocks(page)
    return ["\n".join(found)] if "in one session" in page.read_text() else found


CODE = [(page.name, code) for page in PAGES for code in sessions(page)]


@pytest.mark.parametrize(
    ("page", "code"), CODE, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CODE)]
)
def test_python_in_the_docs_runs(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "docs"})  # noqa: S102


def test_the_readme_has_its_ten_lines() -> None:
    code = blocks(ROOT / "README.md")[0]
    assert all(step in code for step in ("make_clients", "plan_clients", "simulate", "write_"))


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            stripped = line.strip().strip("`")
            if stripped.startswith("noisewise ") and "`" not in stripped:
                found.append((page.name, stripped.split("#")[0].strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_in_the_docs_parse(page: str, line: str) -> None:
    """Every option and subcommand that the docs show exists."""
    words = shlex.split(line.replace("...", "1"))[1:]
    command = typer.main.get_command(app)
    context = command.make_context("noisewise", words, resilient_parsing=False)
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, found, words = command.resolve_command(context, rest)
        assert found is not None, f"{page}: no command {name}"
        command = found
        context = command.make_context(name, words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "path", re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "privacy.md").read_text())
)
def test_every_promise_names_a_test_that_exists(path: str) -> None:
    assert (ROOT / path).exists()
