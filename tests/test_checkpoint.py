"""PRIVACY.md 12 and 13: kill -9 and resume bit for bit; damage is noticed and survived."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation_helpers import small_run

from noisewise.errors import InvalidValueError
from noisewise.federation import load_result
from noisewise.federation.results import RoundRecord

ROUNDS = 6


class StopHereError(Exception):
    """Raised to leave a run in the middle."""


def stop_after(number: int) -> object:
    def on_round(record: RoundRecord) -> None:
        if record.round == number:
            raise StopHereError

    return on_round


def fingerprint(folder: Path) -> dict[str, str]:
    names = ["result.json", "rounds.jsonl", "model.safetensors"]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    small_run(rounds=ROUNDS, folder=folder, options={"estimate": "first"})
    return folder


def interrupted(folder: Path, after: int = 4) -> None:
    with pytest.raises(StopHereError):
        small_run(
            rounds=ROUNDS,
            folder=folder,
            options={"estimate": "first"},
            on_round=stop_after(after),
        )


def finish(folder: Path) -> list[int]:
    computed: list[int] = []
    small_run(
        rounds=ROUNDS,
        folder=folder,
        options={"estimate": "first"},
        on_round=lambda record: computed.append(record.round),
    )
    return computed


@pytest.mark.parametrize("after", [1, 4, ROUNDS])
def test_resumed_is_bit_identical(after: int, whole: Path, tmp_path: Path) -> None:
    interrupted(tmp_path, after)
    finish(tmp_path)
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_resumed_with_other_workers_is_bit_identical(whole: Path, tmp_path: Path) -> None:
    interrupted(tmp_path)
    small_run(rounds=ROUNDS, folder=tmp_path, options={"estimate": "first"}, workers=2)
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_a_finished_run_is_read_back_and_not_computed(whole: Path) -> None:
    before = fingerprint(whole)
    assert finish(whole) == []
    assert fingerprint(whole) == before
    result = load_result(whole)
    assert result.rounds == small_run(rounds=ROUNDS, options={"estimate": "first"}).rounds


def test_crash_between_record_and_checkpoint(whole: Path, tmp_path: Path) -> None:
    """Records beyond the last checkpoint, even half a line, are cut off."""
    interrupted(tmp_path)
    with open(tmp_path / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 5, "weig')
    finish(tmp_path)
    assert fingerprint(tmp_path) == fingerprint(whole)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign"])
def test_a_damaged_checkpoint_falls_back_with_a_message(
    damage: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        content = content[:-7]
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"something else")
    newest.write_bytes(content)
    finish(tmp_path)
    assert "damaged" in caplog.text
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_every_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    from noisewise.federation.checkpoint import RunFolder

    interrupted(tmp_path, 2)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    original = newest.read_bytes()
    run = RunFolder(tmp_path, "not this run")
    for place in range(0, len(original), max(1, len(original) // 60)):
        damaged = bytearray(original)
        damaged[place] ^= 0x10
        newest.write_bytes(damaged)
        with pytest.raises((ValueError, KeyError)) as caught:
            run._decode(newest)
        assert not isinstance(caught.value, InvalidValueError), f"byte {place} went unnoticed"


def test_damaged_records_start_again_with_a_message(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path)
    records = bytearray((tmp_path / "rounds.jsonl").read_bytes())
    records[40] ^= 1
    (tmp_path / "rounds.jsonl").write_bytes(records)
    assert finish(tmp_path)[0] == 1
    assert "damaged" in caplog.text
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_a_folder_of_another_run_is_refused_and_left_alone(whole: Path, tmp_path: Path) -> None:
    interrupted(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(InvalidValueError, match="other settings"):
        small_run(rounds=ROUNDS, folder=tmp_path, seed=5)
    with pytest.raises(InvalidValueError, match="other settings"):
        small_run(rounds=ROUNDS, folder=whole, seed=5)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from federation_helpers import small_run
small_run(rounds=40, folder=sys.argv[1], evaluate_every=5, workers=int(sys.argv[3]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_at_random_moments(tmp_path: Path, workers: int) -> None:
    """A real process, killed again and again until it gets through, ends with the same bytes."""
    reference, victim = tmp_path / "reference", tmp_path / "victim"
    small_run(rounds=40, folder=reference, evaluate_every=5)
    command = [sys.executable, "-c", SCRIPT, str(victim), str(Path(__file__).parent), str(workers)]
    moments = random.Random(workers)
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen(command, start_new_session=True)
        started = time.monotonic()
        before = len(list((victim / "checkpoints").glob("*"))) if attempt else 0
        patience = moments.uniform(0.05, 0.4)
        grown: float | None = None
        while process.poll() is None and time.monotonic() - started < 120:
            now = (
                len((victim / "rounds.jsonl").read_bytes())
                if (victim / "rounds.jsonl").exists()
                else 0
            )
            grown = grown or (time.monotonic() if now > before else None)
            if kills < 4 and grown and time.monotonic() - grown > patience:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.02)
        if process.wait(timeout=60) == 0:
            break
    assert kills >= 1, "never killed: the test has no power"
    assert fingerprint(victim) == fingerprint(reference)
