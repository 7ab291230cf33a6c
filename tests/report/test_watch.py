"""`noisewise watch`: the page of a folder while runs train, are killed and end. It only reads."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser

import noisewise as nw
from noisewise.errors import InvalidValueError
from noisewise.federation.planned_runs import read_planned_runs
from noisewise.federation.round_record import RoundRecord
from noisewise.report.live_progress import Progress, ProgressReader, RunProgress
from noisewise.report.watch_page import progress_html
from noisewise.report.watch_server import WatchServer
from noisewise.storage import lock_is_held, sole_lock, to_json

CONFIG = {
    "data": {"name": "digits", "clients": 3},
    "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 2, "learning_rate": 0.5, "clip_norm": 1.0, "accountant": "rdp"},
}


def all_files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))
    }


@contextmanager
def serving(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: WatchServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    link.request(method, path, headers={} if host is None else {"Host": host})
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, text


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "comparison"
    nw.compare(CONFIG, ["RobustHDP", "WeiAvg"], 1, folder=folder)
    return folder


def test_a_finished_comparison_is_shown_and_not_touched(compared: Path) -> None:
    before = all_files(compared)
    with serving(compared) as server:
        status, progress = ask(server, "/progress")
        assert status == 200
        assert "Finished at" in progress
        assert "4 of 4 rounds, 2 of 2 runs ended" in progress
        status, report = ask(server, "/report")
        assert status == 200
        assert "Accuracy over rounds" in report
        status, page = ask(server, "/")
        assert "Watch comparison" in page
        assert ask(server, "/../config.toml")[0] == 404
        assert ask(server, "/", method="HEAD") == (200, "")
        assert ask(server, "/", method="POST")[0] == 501
    assert all_files(compared) == before


def test_only_loopback_names_are_answered(compared: Path) -> None:
    with serving(compared) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/", f"localhost:{port}")[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            status, text = ask(server, "/report", host)
            assert status == 421
            assert "RobustHDP" not in text


def test_a_missing_folder_a_file_and_a_port_in_use_are_refused(compared: Path) -> None:
    for path in (compared / "missing", compared / "config.toml"):
        with pytest.raises(InvalidValueError, match="folder"):
            WatchServer(path, 0)
    with serving(compared) as server, pytest.raises(InvalidValueError, match="in use"):
        WatchServer(compared, server.server_port)


def test_a_folder_without_runs_waits(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "contains no run yet" in ask(server, "/progress")[1]
        assert "No run has begun yet" in ask(server, "/report")[1]


def test_a_sweep_plans_all_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nw.Comparison, "write_report", lambda self: ())  # takes seconds
    nw.compare(CONFIG, ["WeiAvg"], 1, sweep={"training.clip_norm": [0.5, 1.0]}, folder=tmp_path)
    assert len(read_planned_runs(tmp_path)) == 2
    progress = ProgressReader(tmp_path).read(time.time())
    assert (progress.state, progress.done, progress.planned) == ("ended", 4, 4)
    assert len(progress.runs) == 2
    assert "training.clip_norm=0.5" in progress_html(progress, time.time())


def test_dropped_updates_are_shown_with_their_reasons(compared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    source = compared / "runs" / "WeiAvg-seed0"
    run.mkdir()
    (run / "run.json").write_bytes((source / "run.json").read_bytes())
    records = [
        RoundRecord(1, {"client-0": 1.0}, {"<b>mallory": "other names"}, None, None),
        RoundRecord(2, {"client-0": 0.5, "<b>mallory": 0.5}, {}, None, None),
    ]
    (run / "rounds.jsonl").write_text("".join(to_json(vars(r)) + "\n" for r in records))
    moment = run.joinpath("rounds.jsonl").stat().st_mtime + 100
    progress = ProgressReader(tmp_path).read(moment)
    assert [one.state for one in progress.runs] == ["stopped"]
    html = progress_html(progress, moment)
    assert "other names" in html
    assert "1 of 2" in html
    assert "<b>mallory" not in html
    assert "1 min 40 s ago" in html


def test_nothing_outside_of_the_folder_is_shown(compared: Path, tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "link").symlink_to(compared, target_is_directory=True)
    planned = [
        {"folder": folder, "method": "leak", "seed": 0, "rounds": 5}
        for folder in (str(compared / "runs"), "../outside", "in/../../outside")
    ]
    (watched / "planned.json").write_text(to_json({"runs": planned}))
    with serving(watched) as server:
        status, progress = ask(server, "/progress")
        assert status == 200
        assert "contains no run yet" in progress
        assert "leak" not in progress
        assert "WeiAvg" not in ask(server, "/report")[1]
        for path in ("//etc/passwd", "/link/config.toml", "/%2e%2e/config.toml", "/progress/.."):
            assert ask(server, path)[0] == 404


def test_damaged_huge_and_half_written_files_do_not_stop_the_page(
    compared: Path, tmp_path: Path
) -> None:
    shutil.copytree(compared, tmp_path, dirs_exist_ok=True)
    good = tmp_path / "runs" / "WeiAvg-seed0"
    for name in ("deep", "pipe", "huge"):
        shutil.copytree(good, tmp_path / "runs" / name)
    (tmp_path / "runs" / "deep" / "result.json").write_text("[" * 100_000)
    rounds = tmp_path / "runs" / "pipe" / "rounds.jsonl"
    rounds.unlink()
    os.mkfifo(rounds)  # reading it would wait for ever
    with open(tmp_path / "runs" / "huge" / "rounds.jsonl", "r+b") as file:
        file.truncate(1 << 31)  # sparse: takes no space on the disk
    (good / "result.json").unlink()
    with open(good / "rounds.jsonl", "a") as out:
        out.write('{"round": 3, "weig')
    with serving(tmp_path) as server:
        status, progress = ask(server, "/progress")
        assert status == 200
        assert progress.count("damaged or too large") == 3
        assert "2 of 2" in progress
        status, report = ask(server, "/report")
        assert status == 200
        assert "WeiAvg" in report


def test_an_error_while_reading_is_answered(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(compared) as server:

        def fail() -> None:
            raise KeyError("field of another version")

        monkeypatch.setattr(server._progress, "get", fail)
        status, text = ask(server, "/progress")
        assert status == 500
        assert "another version" not in text
        assert ask(server, "/")[0] == 200


def test_many_open_connections_do_not_take_many_threads(compared: Path) -> None:
    with serving(compared) as server:
        before = threading.active_count()
        address = ("127.0.0.1", server.server_port)
        links = [socket.create_connection(address, timeout=60) for _ in range(100)]
        try:
            closed = [link for link in links[32:] if link.recv(1) == b""]
            assert len(closed) == 68
            assert threading.active_count() - before <= 32
        finally:
            for link in links:
                link.close()
        wait_for(lambda: threading.active_count() <= before, "the threads end")
        assert ask(server, "/")[0] == 200


def test_time_left_follows_the_last_rounds() -> None:
    runs = [
        RunProgress("a", "A", 0, "training", 4, 10, seconds=2.0),
        RunProgress("b", "A", 1, "training", 8, 10, seconds=2.0),
        RunProgress("c", "A", 2, "waiting", 0, 10),
    ]
    progress = Progress(tuple(runs), "", "training", 0.0, 0.0)
    assert progress.seconds_left == pytest.approx(18.0)  # 18 rounds at 1 round a second
    alone = Progress(tuple(runs[:1]), "", "training", 0.0, 0.0)
    assert alone.seconds_left == pytest.approx(12.0)


def test_a_lock_is_seen_from_another_process_without_taking_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert lock_is_held(lock) is False
    code = (
        "import sys; from pathlib import Path; from noisewise.storage import lock_is_held;"
        "print(lock_is_held(Path(sys.argv[1])))"
    )

    def seen() -> str:
        command = [sys.executable, "-c", code, str(lock)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with sole_lock(lock):
        assert seen() == "True"
        assert seen() == "True"  # asking did not release it
    lock.touch()
    assert seen() == "False"


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def start_comparison(folder: Path, rounds: int) -> subprocess.Popen[bytes]:
    config = folder.parent / "long.toml"
    config.write_text(
        f"""
        [data]
        name = "digits"
        clients = 5
        [population]
        epsilon = 8.0
        batch_size = 64
        delta = 1e-3
        [model]
        name = "softmax"
        [training]
        rounds = {rounds}
        learning_rate = 0.5
        clip_norm = 1.0
        accountant = "rdp"
        """
    )
    command = [
        sys.executable, "-m", "noisewise.cli", "compare", str(config), "--methods",
        "WeiAvg,DPFedAvg", "--seeds", "1", "--workers", "1", "--output", str(folder),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.browser
def test_in_a_browser_while_a_run_goes_on_is_killed_and_finishes(
    tmp_path: Path, compared: Path
) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    command = [sys.executable, "-m", "noisewise.cli", "watch", str(folder), "--port", "0"]
    watch = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True,
        # A test runner in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    runs: list[subprocess.Popen[bytes]] = []
    try:
        assert watch.stdout is not None
        address = watch.stdout.readline().split()[0]
        with Browser(tmp_path / "profile") as browser:
            browser.open(address)

            def state() -> str:
                sentence = "document.getElementById('state')?.innerText ?? ''"
                return str(browser.evaluate(sentence))

            wait_for(lambda: "no run yet" in state(), "waiting")
            runs.append(start_comparison(folder, 5000))
            wait_for(lambda: state().startswith("Training") and " left" in state(), "training")
            first = state()
            wait_for(lambda: state().startswith("Training") and state() != first, "refreshes")
            chart = "frames[0].document.querySelectorAll('figure svg').length"
            wait_for(lambda: int(browser.evaluate(chart)) >= 3, "the report has charts")
            assert "5 clients took part" in browser.evaluate("document.body.innerText")

            runs[0].kill()
            runs[0].wait()
            wait_for(lambda: state().startswith("Stopped"), "a killed run")
            assert "No progress since" in state()
            done = int(state().split(" rounds")[0].split()[-3])
            assert 0 < done < 10_000
            browser.screenshot(tmp_path / "stopped.png")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 1280

            for name in ("runs", "planned.json", "config.toml"):
                (folder / name).rename(tmp_path / f"old-{name}")
            shutil.copytree(compared, folder, dirs_exist_ok=True)
            all_ended = "4 of 4 rounds, 2 of 2 runs ended"  # a part of them before all are copied
            wait_for(
                lambda: state().startswith("Finished") and all_ended in state(), "a finished run"
            )
            outside = [url for url in browser.requests() if not url.startswith((address, "data:"))]
            assert outside == []
            assert browser.complaints() == []

            watch.send_signal(signal.SIGINT)
            assert watch.wait(timeout=60) == 0
            lost = "document.getElementById('lost').hidden"
            wait_for(lambda: browser.evaluate(lost) is False, "the page says that watch ended")
    finally:
        for process in (watch, *runs):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
