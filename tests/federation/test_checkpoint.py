"""Guarantees 12 and 13 of docs/privacy.md: exact resume after kill -9; damage is detected."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from federation_helpers import small_run

from noisewise.errors import InvalidValueError
from noisewise.federation import checkpoint, load_result, load_run
from noisewise.federation.checkpoint import RunFolder
from noisewise.federation.round_record import RoundRecord
from noisewise.storage import sole_lock

HELPERS = str(Path(__file__).parents[1] / "helpers")
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


@pytest.mark.parametrize("kept", [0, 1, ROUNDS - 1])
def test_a_finished_run_with_too_few_records_is_computed_again(
    kept: int, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Privacy would be under-reported: the epsilon of a run is that of its last record."""
    folder = shutil.copytree(whole, tmp_path / "run")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:kept]))
    for read in (load_result, load_run):
        with pytest.raises(InvalidValueError, match=rf"has {kept} rounds, not {ROUNDS}"):
            read(folder)
    seen = finish(folder)
    assert seen == list(range(1, ROUNDS + 1))
    assert f"has {kept} rounds, not {ROUNDS}" in caplog.text
    assert fingerprint(folder) == fingerprint(whole)


def test_a_finished_run_with_another_epsilon_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    *lines, last = (folder / "rounds.jsonl").read_text().splitlines()
    record = json.loads(last)
    record["epsilon_spent"] = dict.fromkeys(record["epsilon_spent"], 0.1)
    (folder / "rounds.jsonl").write_text("\n".join([*lines, json.dumps(record)]) + "\n")
    with pytest.raises(InvalidValueError, match="another epsilon_spent"):
        load_result(folder)


def test_a_finished_run_is_no_longer_called_finished_while_it_is_mended(
    whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(lines[0])
    interrupted(folder, 2)
    known = load_run(folder)
    assert (known.status, len(known.rounds)) == ("unfinished", 2)


@pytest.mark.parametrize("line", ["5", "null", "[]", '"words"'])
@pytest.mark.parametrize("ended", [True, False])
def test_a_line_that_is_no_record_is_an_unreadable_run(
    line: str, ended: bool, whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "rounds.jsonl").write_text(f"{line}\n")
    if not ended:
        (folder / "result.json").unlink()
    with pytest.raises(InvalidValueError, match="must hold a"):
        load_run(folder)


def test_folders_may_be_named_by_words(whole: Path) -> None:
    assert load_result(str(whole)) == load_result(whole) == load_run(str(whole))


def test_records_that_vanish_in_mid_run_are_an_error_and_not_zeros(tmp_path: Path) -> None:
    def cut(record: RoundRecord) -> None:
        if record.round == 3:
            os.truncate(tmp_path / "rounds.jsonl", 10)

    with pytest.raises(InvalidValueError, match=r"rounds\.jsonl has become shorter"):
        small_run(rounds=ROUNDS, folder=tmp_path, on_round=cut)
    assert (tmp_path / "rounds.jsonl").stat().st_size == 10


WAITING = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from federation_helpers import small_run
folder = Path(sys.argv[1])

def wait(record):
    if record.round == 2:
        (folder / "here").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)

small_run(rounds=6, folder=folder, options={"estimate": "first"}, workers=int(sys.argv[3]),
          on_round=wait)
"""


@contextmanager
def trained_elsewhere(folder: Path, workers: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """Another process in the middle of a run, where it stays until there is a file "go"."""
    words = [
        sys.executable,
        "-c",
        WAITING,
        str(folder),
        HELPERS,
        str(workers),
    ]
    process = subprocess.Popen(words, start_new_session=True)
    begun = time.monotonic()
    try:
        while not (folder / "here").exists():
            assert process.poll() is None
            assert time.monotonic() < begun + 120
            time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)


def test_a_run_that_another_process_trains_is_refused_and_left_alone(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.0)
    with trained_elsewhere(tmp_path) as process:
        before = (tmp_path / "rounds.jsonl").read_bytes()
        with pytest.raises(InvalidValueError, match="another process is training this run"):
            finish(tmp_path)
        assert (tmp_path / "rounds.jsonl").read_bytes() == before
        (tmp_path / "go").touch()
        assert process.wait(timeout=120) == 0
    assert fingerprint(tmp_path) == fingerprint(whole)
    assert finish(tmp_path) == []


def test_a_killed_process_leaves_no_lock_though_its_workers_live_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.0)
    with trained_elsewhere(tmp_path, workers=2) as process:
        process.kill()
        process.wait(timeout=60)
        finish(tmp_path)
    assert fingerprint(tmp_path) == fingerprint(whole)
    assert not (tmp_path / ".training.lock").exists()


def test_two_threads_do_not_train_one_run(tmp_path: Path) -> None:
    faults: list[Exception] = []

    def second() -> None:
        try:
            small_run(rounds=2, folder=tmp_path)
        except InvalidValueError as error:
            faults.append(error)

    def meanwhile(record: RoundRecord) -> None:
        if record.round == 1:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

    assert small_run(rounds=2, folder=tmp_path, on_round=meanwhile).status == "finished"
    assert [fault.args[0].partition(": ")[2][:15] for fault in faults] == ["another process"]
    assert small_run(rounds=2, folder=tmp_path / "other").status == "finished"


def holder(path: Path, action: str) -> subprocess.Popen[bytes]:
    """A process that holds a lock; it says so in a file beside it and then does something."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom noisewise.storage import sole_lock\n"
        f"with sole_lock(Path(sys.argv[1])):\n    Path(sys.argv[1] + '.held').touch()\n    {action}"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)])
    begun = time.monotonic()
    while not Path(f"{path}.held").exists():
        assert process.poll() is None
        assert time.monotonic() < begun + 60
        time.sleep(0.01)
    return process


def test_a_lock_is_waited_for_with_patience(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock", "time.sleep(1)")
    with pytest.raises(BlockingIOError), sole_lock(tmp_path / "lock"):
        pass
    with sole_lock(tmp_path / "lock", patience=60):
        assert process.wait(timeout=60) == 0
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_was_removed_while_it_was_opened_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two would hold one lock: the one of a file that is gone, the other of the new file."""
    path, opened = tmp_path / "lock", list[int]()
    really: Callable[..., int] = os.open

    def open_and_lose(*arguments: object) -> int:
        opened.append(really(*arguments))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(os, "open", open_and_lose)
    with sole_lock(path):
        assert len(opened) == 2
        assert path.exists()
    assert not path.exists()


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
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(victim),
        HELPERS,
        str(workers),
    ]
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
