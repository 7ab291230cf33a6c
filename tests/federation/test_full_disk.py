"""A full disk ends a run with one line and exit code 1; the same command resumes it exactly."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import Answer, Noisewise

from noisewise import storage
from noisewise.data import cache
from noisewise.data.catalogue import MNIST
from noisewise.errors import DiskFullError, SourceError
from noisewise.federation.checkpoint import RunFolder
from noisewise.federation.results import load_result
from noisewise.federation.round_times import TIMES_FILE
from noisewise.storage import disk_full, reserve, write_atomic

ROOT = Path(__file__).parents[2]
TIME_FIGURE = re.compile(rb'<figure id="[^"]*" class="chart time">.*?</figure>', re.DOTALL)
WHEN = re.compile(rb"20\d\d-\d\d-\d\d \d\d:\d\d[ to\d:-]* UTC \([\w. ]+\)")  # in a report
DEMO = ROOT / "configs" / "demo.toml"
SMALL = ["--set", "training.rounds=4", "--set", "data.clients=3",
         "--set", "population.epsilon=[4.0,8.0,8.0]"]  # fmt: skip
REMEDY = "free disk space, then run the same command again to resume"
COMMANDS = {
    "run": ["run", DEMO, *SMALL, "--workers", "1"],
    "compare": ["compare", DEMO, "--methods", "WeiAvg,DPFedAvg", "--seeds", "1", *SMALL,
                "--workers", "1"],
    "sweep": ["compare", DEMO, "--methods", "WeiAvg", "--seeds", "1", *SMALL, "--workers", "1",
              "--set", "training.clip_norm=0.5,1"],
    "reproduce": ["reproduce", "noise-table"],
}  # fmt: skip


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process and of those that it starts grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder without what says when and how fast it ran."""
    dated = {folder / "result.json", folder / "README.md"}
    return {
        str(path.relative_to(folder)): TIME_FIGURE.sub(b"", WHEN.sub(b"DATE", path.read_bytes()))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in dated and path.name != TIMES_FILE and path.stem != "time"
    }


def is_one_line(out: Answer, reason: str = os.strerror(errno.EFBIG)) -> bool:
    """Whether a command ended as it should: one line of its own besides the progress."""
    said = [line for line in out.stderr.splitlines() if not line.startswith(("training", "plan"))]
    said = [line for line in said if " of 2: " not in line and not line[0].isdigit()]
    last = said[-1] if said else ""
    return (
        out.returncode == 1
        and len(said) == 1
        and last.startswith("noisewise: ")
        and last.endswith(f"{reason}; {REMEDY}")
    )


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrate once for all commands."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NOISEWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.mark.parametrize(
    "name",
    ["run", "compare", "reproduce", pytest.param("sweep", marks=pytest.mark.slow)],
)
def test_the_same_command_resumes_to_the_same_bytes(
    name: str, tmp_path: Path, noisewise: Noisewise
) -> None:
    words = [*COMMANDS[name], "--output", "out"]
    whole, limited = tmp_path / "whole", tmp_path / "limited"
    whole.mkdir()
    limited.mkdir()
    assert noisewise(*words, folder=whole).returncode == 0
    expected = contents(whole / "out")
    records = [len(found) for path, found in expected.items() if path.endswith("rounds.jsonl")]
    largest = max(map(len, expected.values()))
    limits = [max(records, default=largest) * 5 // 8]  # no room for a round's record
    if name == "compare":
        limits.append(largest * 7 // 8)  # the runs end, but there is no room for the page
    for size in limits:
        with largest_file(size):
            assert is_one_line(noisewise(*words, folder=limited))
        assert not list(limited.rglob("*.tmp"))
    assert noisewise(*words, folder=limited).returncode == 0
    assert contents(limited / "out") == expected


def test_the_check_of_the_line_notices_a_traceback(
    tmp_path: Path, noisewise: Noisewise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "DISK_FULL_CODES", frozenset())
    with largest_file(3000), pytest.raises(OSError, match="File too large"):
        noisewise(*COMMANDS["run"], "--output", "out", folder=tmp_path)


def test_the_comparison_of_the_bytes_notices_what_a_full_disk_left_behind(
    tmp_path: Path, noisewise: Noisewise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: RunFolder, line: bytes) -> None:
        with open(self.records_file, "ab") as file:
            file.write(line)

    words = [*COMMANDS["run"], "--output", "out"]
    noisewise(*words, folder=tmp_path)
    expected = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(RunFolder, "_append", careless)
    with largest_file(len(expected["RobustHDP-seed0/rounds.jsonl"]) * 5 // 8):
        noisewise(*words, folder=tmp_path)
    noisewise(*words, folder=tmp_path)
    assert contents(tmp_path / "out") != expected


ON_A_DISK = """
set -eu
mount -t tmpfs -o size="$1" tmpfs "$2"
shift
cd "$1"
shift
code=0
"$@" >../out 2>../err || code=$?
echo $code >../code
mount -o remount,size=64m .
"$@" >>../out 2>>../err
cp -r out ../resumed
"""


def test_a_real_disk_that_is_full(tmp_path: Path, noisewise: Noisewise) -> None:
    """A disk of its own where the system lets us make one; else a limit of the files' sizes."""
    words = [*map(str, COMMANDS["compare"][:-1]), "2", "--output", "out"]  # with two workers
    disk, whole = tmp_path / "disk", tmp_path / "whole"
    disk.mkdir()
    whole.mkdir()
    noisewise(*words, folder=whole)
    expected = contents(whole / "out")
    command = [sys.executable, "-m", "noisewise.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    probe = subprocess.run([*private, f"mount -t tmpfs tmpfs {disk}"], capture_output=True)
    if probe.returncode == 0:
        subprocess.run(
            [*private, ON_A_DISK, "sh", "80k", str(disk), *command],
            check=True, timeout=300, env=environment,
        )  # fmt: skip
        reason = os.strerror(errno.ENOSPC)
    else:
        limit = [
            "sh",
            "-c",
            'ulimit -f 8; code=0; "$@" >../out 2>../err || code=$?; echo $code >../code',
        ]
        subprocess.run([*limit, "sh", *command], cwd=disk, check=True, timeout=300, env=environment)
        subprocess.run(command, cwd=disk, check=True, timeout=300, env=environment)
        (disk / "out").rename(tmp_path / "resumed")
        reason = os.strerror(errno.EFBIG)
    assert (tmp_path / "code").read_text() == "1\n"
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said
    assert said.count(f"{reason}; {REMEDY}") == said.count("noisewise: ") == 1
    assert contents(tmp_path / "resumed") == expected


def test_a_page_about_runs_and_a_figure(tmp_path: Path, noisewise: Noisewise) -> None:
    noisewise(*COMMANDS["run"], "--output", "out", folder=tmp_path)
    for words in (["report", "out", "--output", "page"],
                  ["population", DEMO, "--output", "figures"]):  # fmt: skip
        with largest_file(2000):
            assert is_one_line(noisewise(*words, folder=tmp_path))
        assert noisewise(*words, folder=tmp_path).returncode == 0


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_below_the_output_of_a_command(full: str) -> None:
    words = [sys.executable, "-m", "noisewise.cli", "methods"]
    words += ["--nonsense"] if full == "stderr" else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with open("/dev/full", "w") as disk:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        out = subprocess.run(words, **pipes, text=True, timeout=120, env=environment)  # type: ignore[call-overload]
    if full == "stdout":
        assert out.returncode == 1
        assert out.stderr == f"noisewise: output: {os.strerror(errno.ENOSPC)}; {REMEDY}\n"
    else:
        assert out.returncode != 0
        assert out.stdout == ""


def test_the_cache_of_datasets_reserves_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))
    filled: list[object] = []
    with largest_file(100_000), pytest.raises(OSError, match="File too large"):
        cache.publish(MNIST, filled.append, "nowhere")  # type: ignore[arg-type]
    assert not filled
    assert not list(cache.dataset_folder("mnist").iterdir())
    with pytest.raises(SourceError, match="differ from the published SHA-256"):
        cache.publish(MNIST, filled.append, "nowhere")  # type: ignore[arg-type]


MAPPED = """
import sys, numpy as np
from pathlib import Path
from noisewise.storage import reserve
path = Path(sys.argv[1]) / "mapped.npy"
values = np.lib.format.open_memmap(path, "w+", dtype=np.uint8, shape=(1_000_000,))
if sys.argv[2] == "reserve":
    reserve(path)
values[:] = 1
"""


@pytest.mark.parametrize("how", ["reserve", "planted flaw"])
def test_a_mapped_file_without_room_is_an_error_and_not_the_end_of_the_process(
    how: str, tmp_path: Path
) -> None:
    """On a disk that is really full, writing to a mapped file ends the process by SIGBUS."""
    words = f'mount -t tmpfs -o size=200k tmpfs "$1"; exec {sys.executable} -c "$0" "$@"'
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        words,
        MAPPED,
        str(tmp_path),
        how,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if "unshare" in out.stderr or "mount:" in out.stderr:  # no disk of our own on this system
        path = tmp_path / "sparse"
        path.touch()
        os.truncate(path, 1000)
        reserve(path)
        assert path.stat().st_blocks > 0
        return
    if how == "reserve":
        assert out.returncode == 1
        assert "DiskFullError" in out.stderr
    else:
        assert out.returncode < 0 or out.returncode > 128


def test_an_old_file_stays_if_there_is_no_room_for_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with largest_file(1000), pytest.raises(DiskFullError) as raised:
        write_atomic(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    assert raised.value.filename == str(path)
    assert str(raised.value) == f"{path}: {os.strerror(errno.EFBIG)}; {REMEDY}"


def test_a_full_disk_is_found_behind_other_errors() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count=2")
    connection.execute("CREATE TABLE t (x)")
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    wrapped = RuntimeError("a library's own error")
    wrapped.__cause__ = raised.value
    found = disk_full(wrapped)
    assert found is not None
    assert found.errno == errno.ENOSPC
    assert disk_full(PermissionError(errno.EACCES, "Permission denied", "file")) is None
    assert disk_full(None) is None
    loop = ValueError()
    loop.__cause__ = loop
    assert disk_full(loop) is None


def test_a_run_survives_a_disk_that_is_full_in_every_round(
    tmp_path: Path, noisewise: Noisewise
) -> None:
    """Room for one more round at a time: each call gets a little further."""
    words = [*COMMANDS["run"], "--output", "out", "--set", "training.rounds=12"]
    codes = []
    for size in range(3500, 40_000, 1500):
        with largest_file(size):
            codes.append(noisewise(*words, folder=tmp_path).returncode)
        if not codes[-1]:
            break
    assert codes.count(1) >= 2
    assert codes[-1] == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    noisewise(*words, folder=whole)
    assert contents(tmp_path / "out") == contents(whole / "out")
    assert load_result(tmp_path / "out" / "RobustHDP-seed0").status == "finished"
