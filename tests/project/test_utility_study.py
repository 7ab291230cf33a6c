"""The pages of the study show the committed results, and each of them is a run of the study."""

from __future__ import annotations

import importlib
import math
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from noisewise.aggregation.auto_steps import STRENGTH, AutoSteps
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.federations import FEDERATIONS
from noisewise.training.features import make_features

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """studies/utility_tables.py, without drawing anything."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    for path in (*(ROOT / "studies").glob("utility*.py"), ROOT / "studies" / "result_store.py"):
        name = path.stem
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("utility_tables")
    monkeypatch.setattr(found, "save_figure", lambda figure, folder, name, kinds: ())
    return found


@pytest.mark.parametrize("name", ["page", "rule_page", "federations_page"])
def test_a_page_shows_what_is_committed(name: str, tables: ModuleType) -> None:
    path = {
        "page": tables.PAGE,
        "rule_page": tables.RULE_PAGE,
        "federations_page": tables.FEDERATIONS_PAGE,
    }[name]
    shown = path.read_text().partition(tables.BEGIN)[2].partition(tables.END)[0]
    written = getattr(tables, name)()
    assert shown.strip() == written.strip(), "run: python studies/utility_tables.py"


def test_the_page_of_persons_shows_what_is_committed(tables: ModuleType) -> None:
    text = tables.PERSONS_PAGE.read_text()
    shown = text.partition(tables.BEGIN)[2].partition(tables.END)[0].strip()
    assert shown == "\n".join(tables.persons()).strip() != ""


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


ENCODERS = {"noisewise.encoders:efficientnet_lite0": 1280, "noisewise.encoders:minilm": 384}


def parameters(config: dict[str, Any]) -> int:
    """The number of parameters of a config's head, without its data."""
    data, features = config["data"]["name"], config["features"]["name"]
    federation = FEDERATIONS.get(data)
    if federation is not None:
        shape: tuple[int, ...] = (federation.coder.width if federation.coder else 0,)
        n_classes = len(federation.classes)
    elif data == "digits":
        shape, n_classes = (1, 8, 8), 10
    else:
        shape, n_classes = CATALOGUE[data].shape, CATALOGUE[data].n_classes
    if features == "random_projection:project":
        width = config["features"]["options"]["width"]
    elif features == "scattering":
        width = make_features(features, shape).width
    else:
        width = math.prod(shape) if features == "identity" else ENCODERS[features]
    assert config["model"]["name"] == "head"
    return n_classes * (width + 1)


def is_unlimited(rounds: int, strength: float, config: dict[str, Any]) -> bool:
    """Whether a run is as without a limit: steps of k sqrt(p / T), the last quarter averaged."""
    step = AutoSteps(rounds, strength)
    shares = [step.newest_share(number) for number in range(1, rounds + 1)]
    quarter = [1 / max(1, number - rounds + rounds // 4) for number in range(1, rounds + 1)]
    return strength * (parameters(config) / rounds) ** 0.5 < step.longest and shares == quarter


def test_no_committed_config_reaches_the_limit_of_the_automatic_steps() -> None:
    configs = [tomllib.loads(path.read_text()) for path in (ROOT / "configs").glob("**/*.toml")]
    automatic = [config for config in configs if config["training"]["learning_rate"] == "auto"]
    assert len(automatic) >= 11
    for config in automatic:
        assert is_unlimited(config["training"]["rounds"], STRENGTH, config), config["data"]["name"]
        assert not is_unlimited(5, STRENGTH, config)


def test_the_study_reaches_the_limit_in_runs_of_few_rounds_only(tables: ModuleType) -> None:
    settings: set[tuple[str, str, int, int, float, bool]] = set()
    study = sys.modules["utility"]
    for part, runs in study.PARTS.items():
        for run in runs(0):
            rate, _, variant = str(run.rate).partition(" ")
            if rate == "auto":
                config = tomllib.loads((ROOT / "configs" / run.config).read_text())
                rounds = run.fields.get("training.rounds", config["training"]["rounds"])
                k = float(variant) if variant[:1].isdigit() else STRENGTH
                features = run.fields.get("features.name", config["features"]["name"])
                width = run.fields.get("features.options.width", 0)
                settings.add((run.config, features, width, rounds, k, part in study.FEW))
    assert len(settings) > 30
    for name, features, width, rounds, strength, is_short in settings:
        config = tomllib.loads((ROOT / "configs" / name).read_text())
        config["features"] |= {"name": features, "options": {"width": width}}
        assert is_short == (rounds < 20)
        assert is_short or is_unlimited(rounds, strength, config), (name, features, rounds)


def test_significance_needs_more_than_the_critical_value(tables: ModuleType) -> None:
    gain = sys.modules["utility_joining"].Gain
    assert gain("large", (1.0, 1.1, 0.9, 1.0)).sign == 1
    assert gain("negative", (-1.0, -1.1, -0.9, -1.0)).sign == -1
    assert gain("uncertain", (3.0, -1.0, 0.5, 0.1)).sign == 0
    assert gain("same in all seeds", (0.5,) * 3).sign == 1
    assert gain("one seed", (5.0,)).sign == 0
    # 2.5 standard errors are significant with 10 seeds, but not with 4 (3.18 needed).
    values = tuple(2.5 * (4 / 3) ** 0.5 / 2 + side for side in (-1.0, 1.0, -1.0, 1.0))
    assert gain("few seeds", values).sign == 0


def test_gains_are_paired_by_seed_and_cover_all_clients(tables: ModuleType) -> None:
    found = sys.modules["utility_joining"].gains("heart", "Dist1")
    clients = sys.modules["utility_clients"].read_clients()["heart"]["Dist1"]
    assert {gain.name for gain in found} == set(clients)
    assert all(len(gain.values) == 10 for gain in found)


def test_a_best_rate_at_the_edge_is_named(tables: ModuleType) -> None:
    cells = sys.modules["utility_cells"]
    assert cells.at_the_edge("mnist_moments", "Dist6", "DPFedAvg") == "20"
    assert cells.at_the_edge("mnist", "Dist1") == ""
    assert "mnist: DPFedAvg, moments, 20" in tables.start_edges()


def test_a_missed_goal_is_called_missed(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    goals = sys.modules["utility_goals"]
    assert "**no**" not in "".join(goals.goals())
    real = goals.accuracies
    monkeypatch.setattr(goals, "accuracies", lambda *a: {k: v - 1 for k, v in real(*a).items()})
    missed = [line for line in goals.goals() if "**no**" in line]
    names = [line.split(" | ")[0] for line in missed]
    assert names == ["| MNIST, scattering"] * 2  # 94.0 - 1 < 93.5 and 96.6 - 1 < 96
    monkeypatch.undo()
    monkeypatch.setattr(goals, "leads", lambda *a: [0.9, 0.7] * 5)
    monkeypatch.setattr(goals, "default_differences", lambda *a: [-1.1])
    missed = [line for line in goals.goals() if "**no**" in line]
    assert len(missed) == 4 + 2
    assert "DPFedAvg on heart, large sites stricter (+0.8" in "".join(goals.goals())
