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
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert done.stderr == ""


def test_there_are_examples() -> None:
    assert {script.name for script in SCRIPTS} >= {"own_data.py", "own_arrays.py"}
