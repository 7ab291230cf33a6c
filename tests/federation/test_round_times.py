"""`times.jsonl`: when each round took place, also of a run that was resumed or damaged."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from federation_helpers import small_run

from noisewise.federation.round_times import TIMES_FILE, RoundTime, append_time, read_times


class StopError(Exception):
    pass


def test_every_round_of_a_resumed_run_has_its_time(tmp_path: Path) -> None:
    def stop(record: object) -> None:
        if record.round == 2:  # type: ignore[attr-defined]
            raise StopError

    start = time.time()
    with pytest.raises(StopError):
        small_run("DPFedAvg", rounds=4, folder=tmp_path, on_round=stop)
    small_run("DPFedAvg", rounds=4, folder=tmp_path)
    times = read_times(tmp_path)
    assert [one.round for one in times] == [1, 2, 3, 4]
    assert all(start <= one.began <= one.ended <= time.time() for one in times)
    assert all(a.ended <= b.began for a, b in pairwise(times))
    assert times[0].seconds == times[0].ended - times[0].began


def test_the_times_are_not_part_of_the_records(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_run("DPFedAvg", rounds=2, folder=tmp_path / name)
    records = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("a", "b")]
    assert records[0] == records[1]


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert read_times(tmp_path) == ()
    append_time(tmp_path, RoundTime(1, 5.0, 6.5))
    append_time(tmp_path, RoundTime(2, 6.5, 7.0))
    append_time(tmp_path, RoundTime(2, 9.0, 9.5))
    with open(tmp_path / TIMES_FILE, "a") as file:
        file.write('null\n5\n{"round": 3}\n{"round": 4, "began": NaN, "ended": 1}\n{"rou')
    assert read_times(tmp_path) == (RoundTime(1, 5.0, 6.5), RoundTime(2, 9.0, 9.5))
    assert read_times(tmp_path)[0].seconds == 1.5
