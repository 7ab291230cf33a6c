"""The live view: what a person sees in a terminal and in a log while rounds go by."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from federation_helpers import small_run
from rich.console import Console

from noisewise import display
from noisewise.experiments.config import MethodConfig
from noisewise.experiments.runner import Job
from noisewise.federation.results import RoundRecord


@pytest.fixture(scope="module")
def records() -> tuple[RoundRecord, ...]:
    return small_run("DPFedAvg", rounds=3).rounds


def jobs(*names: str) -> list[Job]:
    return [Job(MethodConfig(name=name), 0) for name in names]


def seen(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_a_terminal_shows_accuracy_noise_and_time_left(records: tuple[RoundRecord, ...]) -> None:
    console = terminal()
    robust, plain = some = jobs("RobustHDP", "DPFedAvg")
    with display.comparison_display(some, 3, title="2/6", console=console) as view:
        view.planning(4, 8)
        for record in records:
            view.on_round(robust, record)
        view.on_round(plain, records[0])
        assert view.bars is not None
        shown = [task.description.strip() for task in view.bars.tasks if task.visible]
    assert shown == ["planning budgets", "2/6", "DPFedAvg, seed 0"]  # the finished run is hidden
    text = seen(console)
    assert f"accuracy {100 * records[0].mean_accuracy:.1f} %" in text
    assert f"noise {records[0].noise_ratio:.2f} x oracle's" in text
    assert "4/6" in text
    assert "--:--" in text or "0:0" in text


def test_an_unevaluated_round_keeps_the_last_accuracy(records: tuple[RoundRecord, ...]) -> None:
    console = terminal()
    (job,) = some = jobs("DPFedAvg")
    with display.comparison_display(some, 3, console=console) as view:
        view.on_round(job, records[0])
        view.on_round(job, replace(records[1], accuracy=None, train_loss=None))
        assert view.bars is not None
        note = view.bars.tasks[0].fields["note"]
    assert note.startswith("DPFedAvg, seed 0: round 2, accuracy ")


@pytest.mark.parametrize("lost", ["aggregate_noise", "accuracy"])
def test_what_is_unknown_is_not_shown(lost: str, records: tuple[RoundRecord, ...]) -> None:
    note = display._note(replace(records[0], **{lost: None}))
    assert ("noise" in note) == (lost == "accuracy")
    assert ("accuracy" in note) == (lost == "aggregate_noise")


def test_a_log_gets_lines_with_the_time_left(
    records: tuple[RoundRecord, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(0, 1000, 20))  # seconds
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(now)))
    (job,) = some = jobs("DPFedAvg")
    with display.comparison_display(some, 3, console=Console(file=io.StringIO())) as view:
        for record in records:
            view.on_round(job, record)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("training: 1 of 3 DPFedAvg, seed 0: round 1, accuracy ")
    assert lines[0].endswith(" left")
    assert "noise" in lines[0]
    assert "left" not in lines[-1]
    assert lines[-1].startswith("training: 3 of 3")


def test_quiet_is_quiet(
    records: tuple[RoundRecord, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    console = terminal()
    (job,) = some = jobs("DPFedAvg")
    with display.comparison_display(some, 3, quiet=True, console=console) as view:
        view.planning(1, 1)
        for record in records:
            view.on_round(job, record)
    assert seen(console) == ""
    assert capsys.readouterr() == ("", "")


def test_clock() -> None:
    assert [display._clock(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
