"""One spelling of keys: underscores in our own files, hyphens in Flower's files and in options.

Keys that are names of something else (client ids, methods, labels of a table, packages) keep the
spelling of that name.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Noisewise
from site_cases import make_site

from noisewise.cli import app
from noisewise.experiments import config as experiment_config
from noisewise.flower.new_app import write_app
from noisewise.paper import artefacts
from noisewise.schema import Strict
from noisewise.site import site_config

ROOT = Path(__file__).parents[2]
NOT_OURS = re.compile(r"[a-z][a-z0-9]*([-. ][a-z].*)+|[a-z]+[A-Z].*")  # clip-norm, clipNorm
NOT_FLOWERS = re.compile(r".*_.*|[a-z]+[A-Z].*")  # clip_norm
BY_NAME = {"versions", "grids", "overrides"}
"""Tables of results whose keys are names: packages, tables with rows and columns, config fields."""

TOML = [
    *(ROOT / "configs").rglob("*.toml"),
    *(ROOT / "src" / "noisewise" / "paper" / "configs").glob("*.toml"),
]


def keys(content: Any) -> Iterator[str]:
    """All keys of all tables."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            if key not in BY_NAME:
                yield from keys(value)
    elif isinstance(content, list):
        for value in content:
            yield from keys(value)


def check(found: list[str], wrong: re.Pattern[str]) -> None:
    assert found
    assert [key for key in found if wrong.fullmatch(key)] == []


def strict_tables(base: type[Strict] = Strict) -> Iterator[type[Strict]]:
    for table in base.__subclasses__():
        yield table
        yield from strict_tables(table)


def test_fields_of_configs_and_site_files_have_underscores() -> None:
    tables = set(strict_tables())
    modules = {experiment_config.__name__, site_config.__name__, artefacts.__name__}
    assert {table.__module__ for table in tables} >= modules
    check([name for table in tables for name in table.model_fields], NOT_OURS)
    for wrong in ("clip-norm", "clip norm", "clipNorm"):
        with pytest.raises(AssertionError):
            check(["rounds", wrong], NOT_OURS)
    with pytest.raises(AssertionError):
        check(["rounds", "clip_norm"], NOT_FLOWERS)
    check(["rounds", "clip_norm", "client-07", "RobustHDP", "0.95", "5000"], NOT_OURS)


@pytest.mark.parametrize("path", TOML, ids=lambda path: path.name)
def test_shipped_configs_have_underscores(path: Path) -> None:
    check(list(keys(tomllib.loads(path.read_text()))), NOT_OURS)


def test_a_new_app_has_hyphens_in_flowers_file_and_underscores_in_the_sites(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    check(list(project["tool"]["flwr"]["app"]["config"]), NOT_FLOWERS)
    check(list(keys(tomllib.loads((tmp_path / "app" / "site.toml").read_text()))), NOT_OURS)


def options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--"))
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


def test_options_of_commands_have_hyphens() -> None:
    found = [option.removeprefix("--") for option in options(typer.main.get_command(app))]
    assert "learning-rate" in found
    check(found, NOT_FLOWERS)


def test_what_a_comparison_writes_has_underscores(tmp_path: Path, noisewise: Noisewise) -> None:
    done = noisewise(
        "compare", ROOT / "configs" / "demo.toml", "--set", "training.rounds=1", "--set",
        "data.clients=3", "--set", "population.epsilon=[1.0,4.0,20.0]", "--methods", "NoiseWise",
        "--seeds", 1, "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    json_files = [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]
    names = {path.name for path in json_files}
    assert names >= {"run.json", "result.json", "rounds.jsonl", "summary.json"}
    seen = 0
    for path in json_files:
        text = path.read_text()
        contents = text.splitlines() if path.suffix == ".jsonl" else [text]
        found = [key for content in contents for key in keys(json.loads(content))]
        seen += len(found)
        check(found, NOT_OURS)
    assert seen > 50
    for path in tmp_path.rglob("*.csv"):
        check(next(csv.reader(path.open())), NOT_OURS)
    check(list(keys(tomllib.loads((tmp_path / "config.toml").read_text()))), NOT_OURS)


def test_what_a_ledger_exports_has_underscores(tmp_path: Path, noisewise: Noisewise) -> None:
    ledger = make_site(tmp_path, records=60).parent / "site.ledger"
    for kind in ("json", "csv"):
        done = noisewise("ledger", "export", ledger, "-o", tmp_path / f"statement.{kind}")
        assert done.returncode == 0, done.stderr
    check(list(keys(json.loads((tmp_path / "statement.json").read_text()))), NOT_OURS)
    check(next(csv.reader((tmp_path / "statement.csv").open())), NOT_OURS)


def test_results_of_the_studies_have_underscores() -> None:
    paths = list((ROOT / "studies" / "results").glob("*.jsonl"))
    assert len(paths) == 10
    for path in paths:
        lines = path.read_text().splitlines()
        check([key for line in lines for key in keys(json.loads(line))], NOT_OURS)


def test_results_of_the_reproduction_have_underscores() -> None:
    paths = list((ROOT / "reproduction").rglob("result.json"))
    assert paths
    for path in paths:
        check(list(keys(json.loads(path.read_text()))), NOT_OURS)
