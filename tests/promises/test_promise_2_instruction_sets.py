"""Guarantee 2 of docs/privacy.md under other instruction sets: self-check and attack.

Rounding depends on the instructions that torch, oneDNN and MKL use. Each setting runs in a separate
process, which must show that the setting took effect before its result counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
QUICK = ("as it is", "torch without vectors")
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    # MKL_ENABLE_INSTRUCTIONS works on Intel's processors only; MKL_CBWR on all of them.
    "MKL with SSE": {"MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


@cache
def under(setting: str) -> tuple[dict[str, Any], str]:
    """What the process found, and the words in which the libraries tell how they work."""
    process = subprocess.run(
        [sys.executable, str(HELPERS / "isolation_under.py")],
        env={
            **os.environ,
            **SETTINGS[setting],
            "OMP_NUM_THREADS": "1",
            "ONEDNN_VERBOSE": "1",
            "MKL_VERBOSE": "1",
            "PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = process.stdout.splitlines()
    told = [line for line in lines if line.startswith(("onednn_verbose", "MKL_VERBOSE"))]
    (answer,) = [line for line in lines if line.startswith("{")]
    words = [line for line in told if "isa:" in line or "CNR:" in line]
    return json.loads(answer), "\n".join(words)


def took_effect(setting: str) -> bool:
    found, words = under(setting)
    plain, _ = under("as it is")
    match setting:
        case "torch without vectors":
            return found["capability"] == "DEFAULT"
        case "torch with AVX2":
            return found["capability"] == "AVX2"
        case "oneDNN with SSE4.1":
            # On a processor without AVX-512 one convolution may keep its bits while a step differs.
            return "isa:Intel SSE4.1" in words and found != plain
        case "MKL with SSE":
            return "CNR:COMPATIBLE" in words and found["product"] != plain["product"]
    return bool(words)


@pytest.mark.parametrize(
    "setting",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_records_are_isolated_under_every_instruction_set(setting: str) -> None:
    assert took_effect(setting), f"{setting}: no effect, so nothing would be tested"
    found, _ = under(setting)
    for name in ("mlp", "cnn", "sigmoid"):
        assert 0.5 < found[name]["ratio"] <= 1.0, f"{setting}, {name}"
    assert found["simulator"] > 1.001, f"{setting}: the search has no power here"
