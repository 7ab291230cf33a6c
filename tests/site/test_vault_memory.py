"""Peak memory of a vault in bytes for each parameter, with 11 million parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
START, ROUND = 80, 120
"""Bytes a parameter that docs/vault_reference.md states."""


def test_a_vault_with_eleven_million_parameters_fits_the_stated_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HELPERS / "vault_large.py"), str(tmp_path)],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["p"] > 11e6
    assert found["start"] < START * found["p"]
    assert 8 * found["p"] < found["round"] < ROUND * found["p"]  # power: two copies at least
    text = (ROOT / "docs" / "vault_reference.md").read_text()
    assert f"at most {START} bytes" in text
    assert f"at most {ROUND} bytes" in text
