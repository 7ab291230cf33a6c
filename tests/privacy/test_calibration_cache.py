"""The cache of calibrations only saves time: no cached file can make a plan less private."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from noisewise.data import ClientSpec
from noisewise.privacy import (
    Calibration,
    PrivacyBudget,
    calibrate,
    calibration,
    epsilon_of,
    make_plan,
)

BUDGET, RATE, STEPS = PrivacyBudget(1.0, 1e-5), 0.1, 40
Plan = Callable[[], Calibration]


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, as a new process on a new machine sees it."""
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration-3.jsonl"


def plan() -> Calibration:
    return calibrate(BUDGET, RATE, STEPS)


def key(budget: PrivacyBudget = BUDGET) -> str:
    return calibration._key(budget, RATE, STEPS, "pld")


def forget() -> None:
    """What a new process knows: nothing but the file."""
    calibration._read_cache.cache_clear()
    epsilon_of.cache_clear()


def fill(cache_file: Path, content: bytes) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    cache_file.write_bytes(content)
    forget()


def line(noise_multiplier: str, epsilon: str = "0.9999") -> bytes:
    entry = f'{{"key": {json.dumps(key())}, "noise_multiplier": {noise_multiplier}, '
    return (entry + f'"epsilon": {epsilon}}}\n').encode()


def check_safe_and_tight(make: Plan) -> None:
    found = make()
    reached = epsilon_of(RATE, found.noise_multiplier, STEPS, BUDGET.delta)
    assert reached <= BUDGET.epsilon, "unsafe"
    assert reached >= 0.99 * BUDGET.epsilon, "needlessly noisy"
    assert found.epsilon == reached, "reports another epsilon than it reaches"


POISON = {
    "too small": line("0.3"),
    "a bit too small": line("2.6"),
    "too large": line("1e4"),
    "far too large": line("1e300"),
    "zero": line("0"),
    "negative": line("-3.0"),
    "nan": line("NaN"),
    "inf": line("Infinity"),
    "huge integer": line("1" + "0" * 400),
    "string": line('"3.1x"'),
    "null": line("null"),
    "list": line("[3.1]"),
    "wrong epsilon": line("0.3", "0.2"),
    "epsilon missing": line("0.3").replace(b', "epsilon": 0.9999', b""),
    "not json": b"hello\n\n{",
    "other json": b'[1]\n3\nnull\n"x"\n{"key": []}\n',
    "not text": bytes(range(256)) * 3,
    "nested": b"[" * 200_000,
    "half a line": line("3.1")[:-30],
    "two lines, the last one bad": line("3.09") + line("0.5"),
    "empty": b"",
}


@pytest.mark.parametrize("name", POISON)
def test_no_content_makes_a_plan_unsafe(cache_file: Path, name: str) -> None:
    fill(cache_file, POISON[name])
    check_safe_and_tight(plan)
    forget()
    check_safe_and_tight(plan)  # and what was written after it can be read again
    spec = ClientSpec("a", 400, 40, BUDGET.epsilon, BUDGET.delta)
    forget()
    made = make_plan(spec, rounds=4, clip_norm=1.0)
    assert epsilon_of(RATE, made.noise_multiplier, STEPS, BUDGET.delta) <= BUDGET.epsilon


def trusting() -> Calibration:
    """A cache that is believed."""
    known = calibration._read_cache(calibration._cache_file()).get(key())
    return known if known is not None and known.noise_multiplier > 0 else plan()


@pytest.mark.parametrize(
    ("name", "seen"),
    [("too small", "unsafe"), ("a bit too small", "unsafe"), ("too large", "needlessly noisy")],
)
def test_planted_trust_is_seen(cache_file: Path, name: str, seen: str) -> None:
    fill(cache_file, POISON[name])
    with pytest.raises(AssertionError, match=seen):
        check_safe_and_tight(trusting)


def test_the_cache_is_used(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan()
    assert cache_file.exists()

    def no_search(*_: object) -> Calibration:
        raise RuntimeError("searched again")

    monkeypatch.setattr(calibration, "_search", no_search)
    assert plan() == found
    forget()
    assert plan() == found
    for other in (PrivacyBudget(1.1, 1e-5), PrivacyBudget(1.0, 2e-5)):
        with pytest.raises(RuntimeError, match="searched again"):
            calibrate(other, RATE, STEPS)
    for rate, steps, accountant in [(0.11, 40, "pld"), (0.1, 41, "pld"), (0.1, 40, "rdp")]:
        with pytest.raises(RuntimeError, match="searched again"):
            calibrate(BUDGET, rate, steps, accountant)


def test_a_hit_costs_one_evaluation(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan()
    forget()
    asked = []

    def counted(*args: object) -> float:
        asked.append(args)
        return epsilon_of(*args)

    monkeypatch.setattr(calibration, "epsilon_of", counted)
    plan()
    assert len(asked) == 1


def test_a_torn_last_line_swallows_nothing(cache_file: Path) -> None:
    fill(cache_file, b'{"key": "torn off he')
    found = plan()
    forget()
    assert calibration._read_cache(cache_file)[key()] == found


def test_another_version_of_the_accountant_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(calibration, "version", lambda name: "9.9")
    assert key() != before


def test_without_a_disk_there_is_still_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "file" / "cache"))
    check_safe_and_tight(plan)
    (tmp_path / "folder" / "calibration-3.jsonl").mkdir(parents=True)
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "folder"))
    check_safe_and_tight(plan)


def test_processes_share_the_file(cache_file: Path) -> None:
    """Three processes calibrate at once; every line of theirs can be read."""
    code = (
        "import sys; from noisewise.privacy import *\n"
        "for k in range(5): calibrate(PrivacyBudget(1 + k + float(sys.argv[1]), 1e-5), 1.0, 3)"
    )
    source = str(Path(calibration.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(k / 10)], env=environment)
        for k in range(3)
    ]
    assert [process.wait(timeout=600) for process in running] == [0] * 3
    forget()
    assert len(calibration._read_cache(cache_file)) == 15
