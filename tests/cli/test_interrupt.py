"""Ctrl-C ends all processes and the run can be resumed; kill -9 leaves no workers running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
MANY = ["--set", "training.rounds=2000", "--set", "training.accountant=rdp",
        "--set", "data.clients=4", "--set", "population.epsilon=[1.0,4.0,20.0,20.0]"]  # fmt: skip


SIDE_BY_SIDE = [
    ["compare", "--methods", "DPFedAvg,WeiAvg", "--seeds", "3", "--workers", "2"],
    ["run", "--method", "DPFedAvg", "--workers", "2"],
]

pytestmark = [
    pytest.mark.slow,  # five real processes with their start-up
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]


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


def no_members(group: int) -> bool:
    """Whether all processes of a group end, with patience for a busy machine.

    A worker that outlives its parent has 2,000 rounds left, and waits for its parent for ever.
    """
    deadline = time.monotonic() + 60
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return members(group) == []


def start(words: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A command in a process group of its own, in the middle of its rounds; and its log."""
    command = [sys.executable, "-m", "noisewise.cli", words[0], str(DEMO), *words[1:], *MANY]
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test runner in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    begun = time.monotonic()
    while not list(folder.rglob("rounds.jsonl")):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < begun + 300, log.read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    return process, log


def end(group: int) -> None:
    if members(group):
        os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize("words", [*SIDE_BY_SIDE, ["run", "--workers", "1"]], ids=" ".join)
def test_ctrl_c_ends_at_once_and_keeps_the_rounds(words: list[str], tmp_path: Path) -> None:
    process, log = start(words, tmp_path)
    try:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=600) == 130
        assert no_members(process.pid)
    finally:
        end(process.pid)
    said = log.read_text()
    assert said.rstrip().endswith("noisewise: interrupted; run the same command again to resume")
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("result.json"))
    assert list(tmp_path.rglob("checkpoints/*.ckpt"))


@pytest.mark.parametrize("words", SIDE_BY_SIDE, ids=" ".join)
def test_workers_do_not_outlive_a_parent_that_was_killed(words: list[str], tmp_path: Path) -> None:
    process, _ = start(words, tmp_path)
    try:
        assert len(members(process.pid)) >= 3
        process.kill()
        process.wait(timeout=600)
        assert no_members(process.pid)
    finally:
        end(process.pid)
