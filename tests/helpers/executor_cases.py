"""Test that an executor with several processes survives a killed worker, for all executors."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import dying_parts
import pytest
from federation_helpers import small_run

from noisewise.federation import RunResult, load_result
from noisewise.federation.round_record import RoundRecord

ROUNDS = 3
FILES = ("result.json", "rounds.jsonl", "model.safetensors")


def hashes(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def reference_run(folder: Path) -> RunResult:
    return small_run(rounds=ROUNDS, folder=folder, executor="serial", loss=dying_parts.loss)


def run_with_a_kill(
    folder: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[int]:
    """Run, kill -9 the worker that trains a client in round 2, and compare with the reference.

    Returns the ids of the killed processes.
    """
    marks = folder / "marks"
    marks.mkdir(parents=True)
    monkeypatch.setenv(dying_parts.VARIABLE, str(marks))
    killed: list[int] = []
    over = threading.Event()  # no time limit: a busy machine may be slow for minutes

    def kill() -> None:
        while not killed and not over.wait(0.02):
            for file in marks.glob("victim-*"):
                killed.append(int(file.name.removeprefix("victim-")))
                assert killed[0] != os.getpid()
                os.kill(killed[0], signal.SIGKILL)

    def on_round(record: RoundRecord) -> None:
        if record.round == 1:
            (marks / "armed").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = small_run(
            rounds=ROUNDS,
            folder=folder / "run",
            loss=dying_parts.loss,
            on_round=on_round,
            **options,
        )
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1, "no process was killed: the test has no power"
    assert hashes(folder / "run") == hashes(reference)
    assert result.epsilon_spent == load_result(reference).epsilon_spent
    return killed
