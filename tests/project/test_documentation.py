"""Documentation is executed: its code runs, its commands exist, its links work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from noisewise.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


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
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # the pages speak of a clone
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "docs"})  # noqa: S102


def test_the_readme_has_one_call_and_the_tutorial_its_parts() -> None:
    short = blocks(ROOT / "README.md")[0]
    parts = "\n".join(blocks(ROOT / "docs" / "tutorial.md"))
    assert all(step in short for step in ("nw.compare(", "to_rows", "write_report"))
    assert all(step in parts for step in ("make_clients", "plan_clients", "simulate", "write_"))


def commands() -> list[tuple[str, str]]:
    """The lines of code blocks and the lines in backticks that call the command; no prose."""
    found = []
    for page in PAGES:
        fenced = False
        for line in page.read_text().splitlines():
            stripped = line.strip().strip("`")
            fenced ^= line.lstrip().startswith("```")
            code = fenced or line.startswith(("    ", "\t", "`")) or line.strip().startswith("`")
            if code and stripped.startswith("noisewise ") and "`" not in stripped:
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


def test_the_config_page_has_every_field_and_its_default() -> None:
    from noisewise.data.columns import SPECS
    from noisewise.experiments.config import AttackConfig, ExperimentConfig, FeaturesConfig

    rows: dict[str, str] = {}
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if line.startswith("| `"):
            names, default = (cell.strip() for cell in line.split("|")[1:3])
            rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), default)
    fields = {"seed": ExperimentConfig.model_fields["seed"]}
    for spec in SPECS.values():
        fields |= {f"columns.{name}": member for name, member in spec.model_fields.items()}
    optional = {"attacks": AttackConfig, "features": FeaturesConfig}
    for table, field in ExperimentConfig.model_fields.items():
        kind = optional.get(table, field.annotation)
        if table not in ("seed", "columns"):
            inner = kind.model_fields  # type: ignore[union-attr]
            fields |= {f"{table}.{name}": member for name, member in inner.items()}
    assert set(rows) == set(fields)
    for name, field in fields.items():
        assert field.is_required() == (rows[name] == "required"), name
        if isinstance(field.default, (int, float)):
            assert rows[name] == str(field.default), name
        elif isinstance(field.default, str) and ":" not in field.default:
            assert rows[name].strip("`").strip('"') == field.default, name


def test_the_api_page_covers_what_the_package_exports() -> None:
    import noisewise

    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.M)
    assert len(listed) == len(set(listed))
    for name in set(noisewise.__all__) - {"__version__"}:
        home = getattr(noisewise, name).__module__
        assert any(home == one or home.startswith(f"{one}.") or f"{home}.{name}" == one
                   for one in listed), f"{home}.{name} is not in docs/api.md"  # fmt: skip
