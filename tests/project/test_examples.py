"""Every script in examples/ runs without an error and prints something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example(script: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "NOISEWISE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert done.stderr == ""


@pytest.mark.extras
@pytest.mark.parametrize(
    "command",
    [
        ["finetune_spam.py", "--tiny", "--rounds", "1", "--folder", "{folder}/saved"],
        [
            *("-m", "noisewise.cli", "run", "spam_lora.toml", "--output", "{folder}/run"),
            *("--set", "data.name=finetune_spam:made_up", "--set", "model.options.base=tiny"),
            *("--set", "training.rounds=1"),
        ],
    ],
    ids=["script", "config"],
)
def test_fine_tuning(command: list[str], tmp_path: Path) -> None:
    """With random weights and made-up records: nothing is downloaded."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "NOISEWISE_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *(part.format(folder=tmp_path) for part in command)],
        cwd=ROOT / "examples" / "fine_tuning",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ccuracy" in done.stdout
    saved = tmp_path / (
        "saved/lora" if command[0].endswith(".py") else "run/NoiseWise-seed0/pretrained"
    )
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "cache" / "encoders").exists()


def test_there_are_examples() -> None:
    assert {script.name for script in SCRIPTS} >= {"own_data.py", "own_arrays.py"}
