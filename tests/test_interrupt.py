"""Ctrl-C in a terminal reaches the whole process group: it ends at once, quietly, resumably."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "configs" / "demo.toml"
MANY = ["--set", "training.rounds=2000", "--set", "training.accountant=rdp",
        "--set", "data.clients=4", "--set", "population.epsilon=[1.0,4.0,20.0,20.0]"]  # fmt: skip


def members(group: int) -> list[int]:
    """Processes of a group that are there still."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--methods", "DPFedAvg,WeiAvg", "--seeds", "3", "--workers", "2"],
        ["run", "--method", "DPFedAvg", "--workers", "2"],
        ["compare", "--methods", "DPFedAvg", "--seeds", "2", "--workers", "1"],
    ],
    ids=["jobs side by side", "clients side by side", "one process"],
)
def test_ctrl_c_ends_at_once_and_keeps_the_rounds(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "noisewise.cli", words[0], str(DEMO), *words[1:], *MANY]
    log = tmp_path / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test runner in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        begun = time.monotonic()
        while not list(tmp_path.rglob("rounds.jsonl")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < begun + 120, log.read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
        time.sleep(0.2)
        assert members(process.pid) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert said.rstrip().endswith("noisewise: interrupted; the same command goes on from here")
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("result.json"))
    assert list(tmp_path.rglob("checkpoints/*.ckpt"))
