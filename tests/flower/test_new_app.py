"""`noisewise flower new` and `noisewise flower check`. Flower is not required."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from noisewise.aggregation.auto_steps import auto_local_rate
from noisewise.aggregation.permitted_plans import Permitted, floor_basis
from noisewise.cli import app
from noisewise.errors import InvalidValueError, LedgerError, MissingExtraError
from noisewise.flower.new_app import write_app
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.site.site_config import SiteConfig
from noisewise.site.site_file import load_site

ROOT = Path(__file__).parents[2]


def test_the_written_app_passes_the_linter(tmp_path: Path) -> None:
    """The templates are text files, which the project's own lint does not read."""
    write_app(tmp_path)
    ruff = [str(Path(sys.executable).parent / "ruff")]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    assert len(list(tmp_path.rglob("*.py"))) == 4
    for command in (["check", "--ignore", "D,INP001"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    (tmp_path / "demo.py").write_text("import os\n")
    planted = subprocess.run([*ruff, "check", *config], capture_output=True, text=True)
    assert "F401" in planted.stdout


@pytest.mark.parametrize("method", ["RobustHDP", "NoiseWise"])
def test_the_automatic_rate_and_its_noise_floor(method: str, tmp_path: Path) -> None:
    command = ["flower", "new", str(tmp_path), "--method", method, "--learning-rate", "auto"]
    command += ["--model", "head", "--records", "64:400", "--batch", "64", "--epochs", "4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    config = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    assert config["learning-rate"] == "auto"
    plans = list(Permitted().plans())
    assert config["server-steps"] == 1.0 / auto_local_rate(plans)
    basis = floor_basis(method, auto_local_rate(plans), 10 * (64 + 1))
    assert config["noise-floor-for"] == basis


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "automatic", ""])
def test_a_learning_rate_that_is_no_number_is_one_line(rate: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path), f"--learning-rate={rate}"])
    assert done.exit_code != 0
    assert "learning-rate" in str(done.output) + str(done.exception)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InvalidValueError, match="new or empty"):
        write_app(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_the_app_ships_code_only_and_installs_nothing(tmp_path: Path) -> None:
    write_app(tmp_path)
    written = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert written["project"]["dependencies"] == []
    assert written["tool"]["flwr"]["app"]["fab-include"] == ["noisewise_app/*.py"]
    SiteConfig.model_validate(tomllib.loads((tmp_path / "site.toml").read_text()))


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("epsilon = 2.0", "epsilon = 0.0", "budget.epsilon"),
        ("epsilon = 2.0", "epsilon = nan", "budget.epsilon"),
        ("delta = 1e-6", "delta = 1.0", "budget.delta"),
        ("batch_size = 64", "batch_size = 0", "training.batch_size"),
        ("[0.001, 1.0]", "[1.0, 0.001]", "limits.learning_rate = .*must be .lowest, highest"),
        ('file = "records.npz"', "", "data.file = None: must be given, or data.function"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nseed = 3", "training.seed"),
        ("clip_norm = 1.0", "", "training.clip_norm = None: is missing"),
        ("clip_norm = 1.0", "clipping = 1.0", "training.clipping = 1.0: unknown key, .* clip_norm"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nclip = 1.0", "training.clip = 1.0: must be"),
        ("[limits]", "[limit]", "limit = .*unknown key, did you mean limits"),
    ],
)
def test_a_wrong_site_file_is_one_line_that_names_the_field(
    old: str, new: str, field: str, tmp_path: Path
) -> None:
    write_app(tmp_path / "app")
    site = tmp_path / "app" / "site.toml"
    site.write_text(site.read_text().replace(old, new))
    with pytest.raises(InvalidValueError, match=field) as caught:
        load_site(site)
    assert "\n" not in str(caught.value)


def test_check_says_what_a_round_costs_and_charges_nothing(tmp_path: Path) -> None:
    write_app(tmp_path)
    site = tmp_path / "site.toml"
    np.savez(
        tmp_path / "records.npz", inputs=np.zeros((2400, 1, 8, 8)), targets=np.arange(2400) % 9
    )
    Ledger.create(tmp_path / "site.ledger", PrivacyBudget(2.0, 1e-6), "my-dataset")
    for _ in range(2):
        done = CliRunner().invoke(app, ["flower", "check", str(site)])
        assert done.exit_code == 0, done.output
        assert "data.records = 2400 is exactly the number of usable records" in done.output
        assert "for example 2500, and keep it" in done.output
        assert "spent 0." in done.output
    text = site.read_text()
    for declared, words in (
        (2500, "2400 usable records, data.records = 2500: matches the plan."),
        (2399, "data.records = 2399: matches the plan."),
        (2100, "WARNING: 2400 usable records, but data.records = 2100: change one"),
    ):
        site.write_text(text.replace("records = 2400", f"records = {declared}"))
        output = CliRunner().invoke(app, ["flower", "check", str(site)]).output
        assert words in output
        assert output.count("WARNING") == words.count("WARNING")
    Path(tmp_path / "site.ledger").unlink()
    assert isinstance(
        CliRunner().invoke(app, ["flower", "check", str(site)]).exception, LedgerError
    )


def test_check_warns_of_a_weak_budget(tmp_path: Path) -> None:
    write_app(tmp_path)
    site = tmp_path / "site.toml"
    text = site.read_text().replace("epsilon = 2.0", "epsilon = 30.0")
    site.write_text(text.replace("delta = 1e-6", "delta = 0.01").replace("= 2400", "= 2500"))
    np.savez(
        tmp_path / "records.npz", inputs=np.zeros((2400, 1, 8, 8)), targets=np.arange(2400) % 9
    )
    Ledger.create(tmp_path / "site.ledger", PrivacyBudget(30.0, 0.01), "my-dataset")
    output = CliRunner().invoke(app, ["flower", "check", str(site)]).output
    assert "WARNING: epsilon = 30: practically no protection" in output
    assert "WARNING: delta = 0.01 is not below 1/records = 1/2500" in output
    assert output.count("WARNING") == 2


def test_new_on_the_command_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "mine" / "noisewise_app" / "server_app.py").exists()


def test_without_flower_there_is_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    import noisewise.flower as flower

    for name in list(sys.modules):
        if name.partition(".")[0] == "flwr" or name.startswith("noisewise.flower."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(MissingExtraError, match=r"noisewise\[flower\]"):
        _ = flower.NoiseAware
    with pytest.raises(AttributeError):
        _ = flower.nothing
