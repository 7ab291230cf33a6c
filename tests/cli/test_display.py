"""The progress display during a run, in a terminal and in a log file."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from federation_helpers import small_run
from rich.console import Console

from noisewise.cli import display
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.task_info import TaskInfo


@pytest.fixture(scope="module")
def records() -> tuple[RoundRecord, ...]:
    return small_run("DPFedAvg", rounds=3).rounds


def seen(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_a_terminal_shows_accuracy_noise_and_time_left(records: tuple[RoundRecord, ...]) -> None:
    console = terminal()
    with display.TrainingDisplay(console=console) as view:
        view.start("2 of 6: training.clip_norm = 1.0", 2, 3)
        view.planned(4, 8)
        for record in records:
            view.on_round("RobustHDP", 0, record)
        view.on_round("DPFedAvg", 0, records[0])
        assert view.bars is not None
        shown = [task.description.strip() for task in view.bars.tasks if task.visible]
    assert shown == ["planning budgets", "2/6", "DPFedAvg, seed 0"]  # the finished run is hidden
    text = seen(console)
    assert f"accuracy {100 * records[0].mean_accuracy:.1f} %" in text
    assert f"noise {records[0].noise_ratio:.2f} x oracle's" in text
    assert "4/6" in text
    assert "about 0:0" in text


def test_an_unevaluated_round_keeps_the_last_accuracy(records: tuple[RoundRecord, ...]) -> None:
    console = terminal()
    with display.TrainingDisplay(console=console) as view:
        view.start("", 1, 3)
        view.on_round("DPFedAvg", 0, records[0])
        view.on_round("DPFedAvg", 0, replace(records[1], accuracy=None, train_loss=None))
        assert view.bars is not None
        note = view.bars.tasks[0].fields["note"]
    assert note.startswith("DPFedAvg, seed 0: round 2, accuracy ")


@pytest.mark.parametrize("lost", ["aggregate_noise", "accuracy"])
def test_what_is_unknown_is_not_shown(lost: str, records: tuple[RoundRecord, ...]) -> None:
    note = display._note(replace(records[0], **{lost: None}), TaskInfo().main)
    assert ("noise" in note) == (lost == "accuracy")
    assert ("accuracy" in note) == (lost == "aggregate_noise")


def test_a_log_gets_lines_with_the_time_left(
    records: tuple[RoundRecord, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [(20.0 * r.round, "DPFedAvg", r) for r in records]
    lines = logged(1, 3, events, capsys, monkeypatch)
    assert lines[0].startswith("training: 1 of 3 DPFedAvg, seed 0: round 1, accuracy ")
    assert "noise" in lines[0]
    assert "left" not in lines[0]  # nobody knows yet
    assert lines[1].endswith("; about 0:20 left")
    assert "left" not in lines[-1]
    assert lines[-1].startswith("training: 3 of 3")


def logged(
    runs: int,
    rounds: int,
    events: list[tuple[float, str, RoundRecord]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """The lines of a log in which rounds end at the given seconds."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with display.TrainingDisplay(console=Console(file=io.StringIO())) as view:
        view.start("", runs, rounds)
        for now[0], method, record in events:
            view.on_round(method, 0, record)
    return capsys.readouterr().err.splitlines()


def test_stored_rounds_of_a_resumed_run_do_not_count_for_the_time_left(
    records: tuple[RoundRecord, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "DPFedAvg"
    stored = [(1 + 0.001 * (r - 24), name, replace(records[0], round=r)) for r in range(1, 25)]
    trained = [(1 + 16.0 * (r - 24), name, replace(records[0], round=r)) for r in range(25, 40)]
    lines = logged(1, 100, stored + trained, capsys, monkeypatch)
    assert lines[0].endswith("; about 20:00 left")  # 75 rounds of 16 seconds
    assert lines[-1].endswith("; about 16:16 left")  # 61 rounds


def test_runs_in_lock_step_share_the_time_left(
    records: tuple[RoundRecord, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = ["DPFedAvg", "WeiAvg", "RobustHDP"]
    events = [
        (15.0 * r + 0.001 * i, method, replace(records[0], round=r))
        for r in range(1, 31)
        for i, method in enumerate(methods)
    ]
    lines = logged(3, 40, events, capsys, monkeypatch)
    assert lines[-1].startswith("training: 88 of 120")
    minutes, seconds = lines[-1].removesuffix(" left").rsplit(" ", 1)[1].split(":")
    assert 60 * int(minutes) + int(seconds) == pytest.approx(32 * 5, rel=0.1)


def test_quiet_is_quiet(
    records: tuple[RoundRecord, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    console = terminal()
    with display.TrainingDisplay(quiet=True, console=console) as view:
        view.start("", 1, 3)
        view.planned(1, 1)
        for record in records:
            view.on_round("DPFedAvg", 0, record)
    assert seen(console) == ""
    assert capsys.readouterr() == ("", "")


def test_clock() -> None:
    assert [display._clock(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
