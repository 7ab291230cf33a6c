"""The study's page shows the committed results, and each result belongs to a study run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from noisewise.experiments.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """studies/tables.py, without drawing anything."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    for name in ("method", "tables", "hostile", "result_store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("tables")
    monkeypatch.setattr(found, "save_figure", lambda figure, folder, name, kinds: ())
    return found


def test_the_page_shows_what_is_committed(tables: ModuleType) -> None:
    text = tables.PAGE.read_text()
    shown = text.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert shown.strip() == tables.page().strip(), "run: python studies/tables.py"


def test_every_result_belongs_to_a_study_run_and_finished(tables: ModuleType) -> None:
    files = {path.name for path in tables.RESULTS.glob("[!.]*")}
    parts = {f"{part}.jsonl" for part in tables.PARTS}
    others = {"pilots.jsonl", "hostile.jsonl", "attacks.json", "utility.jsonl", "demo.json"}
    assert files == parts | others | {"utility_clients.json"}
    for part, study_runs in tables.PARTS.items():
        wanted = {(study_run.name, study_run.seed) for study_run in study_runs()}
        there = [(result["name"], result["seed"]) for result in tables.result_file(part).read()]
        assert there
        assert set(there) <= wanted
        assert len(set(there)) == len(there)
        for runs in tables.read(part).values():
            assert all(run["status"] == "finished" for run in runs)
            assert len({run["seed"] for run in runs}) == len(runs)


def test_every_pilot_and_hostile_run_is_one_of_the_study(tables: ModuleType) -> None:
    method, hostile = sys.modules["method"], importlib.import_module("hostile")
    file = method.pilot_file()
    study_runs = [study_run for part in method.PARTS.values() for study_run in part()]
    tried = {
        file.key_of(method.pilot_fields(study_run, rate))
        for study_run in study_runs
        for rate in method.pilot_losses(study_run)
    }
    assert [file.key_of(line) for line in file.read()] == sorted(tried, key=json.loads)
    parts = ("settings", "adaptive", "honest", "frontier", "more")
    wanted = {hostile.RESULTS.key_of(run.key) for part in parts for run in hostile.runs_of(part)}
    assert {hostile.RESULTS.key_of(line) for line in hostile.RESULTS.read()} == wanted


def test_chosen_configs_are_those_of_the_results(tables: ModuleType) -> None:
    wanted = tables.chosen_configs()
    assert len(wanted) == 18
    for file, content in wanted.items():
        assert file.read_text() == content, "run: python studies/tables.py"
    (dist6,) = (file for file in wanted if file.name == "softmax_iid-dist6.toml")
    rates = {m.name: m.learning_rate for m in load_config(dist6).compare.methods}
    runs = tables.read("softmax")
    assert rates["NoiseWise"] == runs["Dist6", "NoiseWise"][0]["learning_rate"]


def test_pilots_go_on_until_the_best_is_not_at_an_end(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    method = sys.modules["method"]
    monkeypatch.setattr(method, "RESULTS", tmp_path)
    study_run = next(iter(method.softmax()))
    tried: list[float] = []
    while wanted := method.pilots(study_run)[1]:
        tried += wanted
        for rate in wanted:  # the best rate is 0.5; larger ones diverge
            loss = abs(rate - 0.5) if rate < 0.7 else None
            method.pilot_file().add(method.pilot_fields(study_run, rate) | {"train_loss": loss})
    assert tried == [0.003, 0.01, 0.03, 0.1, 0.056, 0.18, 0.32, 0.58, 1.0]
    losses = method.pilot_losses(study_run)
    assert min(losses, key=losses.get) == 0.58


_ADD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from result_store import ResultFile
file = ResultFile(Path(sys.argv[2]), ("process", "number"))
for number in range(int(sys.argv[4])):
    file.add({"process": int(sys.argv[3]), "number": number, "value": 0.1 * number})
    print(number, flush=True)
"""


def _adding(path: Path, process: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _ADD, str(ROOT / "studies"), str(path)]
    command += [str(process), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_a_result_file(tables: ModuleType, tmp_path: Path) -> None:
    """No result is lost when several processes write, and the order of the lines is fixed."""
    path = tmp_path / "runs.jsonl"
    processes = [_adding(path, k, 15) for k in range(3)]
    assert all(process.wait(60) == 0 for process in processes)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = [{"process": k, "number": n, "value": 0.1 * n} for k in range(3) for n in range(15)]
    assert lines == wanted
    assert [file.name for file in tmp_path.iterdir()] == ["runs.jsonl"]


def test_a_killed_process_leaves_a_complete_result_file(tables: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    store = sys.modules["result_store"]
    for attempt in range(8):
        process = _adding(path, attempt, 10_000)
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.01 + 0.007 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        reported = [int(line) for line in [first, *process.stdout.read().split()]]
        process.wait(10)
        process.stdout.close()
        lines = store.ResultFile(path, ("process", "number")).read()
        numbers = [line["number"] for line in lines if line["process"] == attempt]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= len(reported)  # what was reported is on disk
    assert {line["process"] for line in lines} == set(range(8))


def test_other_seeds_and_populations_can_be_asked_for(tables: ModuleType) -> None:
    method = sys.modules["method"]
    wanted = argparse.Namespace(dists="Dist6", methods="NoiseWise,WeiAvg", seeds="7,8")
    study_runs = method.chosen(list(method.softmax()), wanted)
    assert [(r.name, r.seed) for r in study_runs] == [
        ("Dist6-NoiseWise", 7), ("Dist6-NoiseWise", 8), ("Dist6-WeiAvg", 7), ("Dist6-WeiAvg", 8)
    ]  # fmt: skip


def test_populations_of_a_seed_are_one_group(tables: ModuleType) -> None:
    method = sys.modules["method"]
    groups = method.groups(list(method.softmax()))
    assert [len(group) for group in groups] == [63, 63, 63]
    assert all(len({study_run.seed for study_run in group}) == 1 for group in groups)
    assert [len(group) for group in method.groups(list(method.cnn()))] == [1] * 11


def test_the_cnn_has_a_rate_of_equal_noise(tables: ModuleType) -> None:
    method = sys.modules["method"]
    for dist, rate in method.SAME_NOISE.items():
        assert method.same_noise(dist) == pytest.approx(rate, rel=0.01)


def test_rounds_in_numbers_are_those_that_were_played(tables: ModuleType) -> None:
    """The ratio of way and noise, from plans, is what the runs noted down from their weights."""
    runs = {key: several[0] for key, several in tables.read("cnn").items()}
    for dist, rest in runs:
        best, found = (
            tables.one_round(dist, name) for name in ("NoiseWise", runs[dist, rest]["method"])
        )
        share = (found[0] / found[1]) ** 2 / (best[0] / best[1]) ** 2
        assert share == pytest.approx(runs[dist, rest]["signal_share"], rel=0.01)
