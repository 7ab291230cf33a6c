"""`nw.run` and `nw.compare`: one call from a config to results, each part made once."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import noisewise as nw
from noisewise.errors import AccountingError, InvalidValueError, MissingExtraError
from noisewise.experiments import population
from noisewise.experiments.config import dump_config, load_config
from noisewise.federation.round_record import RoundRecord
from noisewise.privacy import plan as plan_module

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
SMALL: dict[str, Any] = {
    "training.rounds": 2,
    "training.accountant": "rdp",
    "data.clients": 4,
    "population.epsilon": [1.0, 4.0, 9.0, 9.0],
}
CONTENT: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2},
    "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 1, "learning_rate": 0.5, "clip_norm": 1.0, "accountant": "rdp"},
}


def counted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, file: Path
) -> Callable[[], list[str]]:
    """Count calls of a function in this process and its children: process and arguments of each."""
    function = getattr(module, name)

    def recorded(*args: Any, **options: Any) -> Any:
        shown = [a for a in args if isinstance(a, (int, float, str)) or hasattr(a, "epsilon")]
        with open(file, "a") as lines:
            lines.write(f"{os.getpid()} {shown} {options.get('seed')}\n")
        return function(*args, **options)

    monkeypatch.setattr(module, name, recorded)
    return lambda: file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_comparison_makes_each_part_once(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dataset, split of each seed, calibration of each plan: all in the parent process."""
    population._read.cache_clear()
    plan_module._calibrated.cache_clear()
    reads = counted(monkeypatch, population, "load_dataset", tmp_path / "reads")
    splits = counted(monkeypatch, population, "split_dataset", tmp_path / "splits")
    plans = counted(monkeypatch, plan_module, "calibrate", tmp_path / "plans")
    methods = ["RobustHDP", "DPFedAvg", "MinEpsilon"]
    comparison = nw.compare(DEMO, methods, 3, set=SMALL, workers=workers)
    assert len(comparison.results) == 9
    assert not comparison.failures
    assert len(reads()) == 1
    parent = str(os.getpid())
    assert [line.split()[0] for line in (*reads(), *splits(), *plans())] == [parent] * (
        1 + 3 + len(plans())
    )
    assert [line.split()[-1] for line in splits()] == ["0", "1", "2"]
    assert set(Counter(plans()).values()) == {1}
    # 4 clients under 3 seeds, with their own budget and with the smallest.
    assert len(plans()) <= 2 * 4 * 3
    nw.compare(DEMO, methods, 3, set=SMALL, workers=workers)
    assert len(plans()) == len(set(plans()))  # all known already


@pytest.mark.parametrize("workers", [1, 2])
def test_only_one_seeds_records_stay_in_memory(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, records, alive = population.split_dataset, [], []

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in records))
        parts = split(*args, **options)
        records.append(weakref.ref(parts[0]))
        return parts

    monkeypatch.setattr(population, "split_dataset", watched)
    nw.compare(DEMO, ["FedAvg", "DPFedAvg"], 4, set=SMALL, workers=workers)
    assert len(alive) == 4
    assert max(alive) == 1  # the seed before, whose last run may be training


def test_results_depend_neither_on_workers_nor_on_the_folder(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def listen(method: str, seed: int, record: RoundRecord) -> None:
        seen.append((method, seed, record.round))

    methods = ["NoiseWise", "WeiAvg"]
    alone = nw.compare(DEMO, methods, 2, set=SMALL, on_round=listen)
    together = nw.compare(DEMO, methods, 2, set=SMALL, folder=tmp_path / "out", workers=3)
    assert alone.results == together.results
    assert sorted(seen) == [(m, s, r) for m in methods for s in (0, 1) for r in (1, 2)]
    assert alone.folder is None
    for result in alone.results:
        assert result == nw.run(DEMO, result.method, result.seed, set=SMALL)
        folder = tmp_path / "out" / "runs" / f"{result.method}-seed{result.seed}"
        assert nw.load_result(folder) == result
        assert not (folder / "config.toml").exists()
    again = nw.compare(tmp_path / "out" / "config.toml", methods, 2, folder=tmp_path / "out")
    assert again.results == alone.results


def test_a_config_may_be_a_file_a_mapping_or_an_object() -> None:
    config = nw.ExperimentConfig(**CONTENT)
    first, *others = [
        nw.run(source, "DPFedAvg", set={"training.rounds": 2}) for source in (config, CONTENT)
    ]
    assert others == [first]
    assert len(first.rounds) == 2
    assert config.training.rounds == 1  # not changed
    method = nw.MethodConfig(name="PFA", options={"dimension": 1})
    assert [r.method for r in nw.compare(CONTENT, [method, "WeiAvg"], 1).results] == [
        "PFA(dimension=1)", "WeiAvg",
    ]  # fmt: skip
    with pytest.raises(InvalidValueError, match=r"training\.rounds = 0"):
        nw.run(config, set={"training.rounds": 0})
    with pytest.raises(InvalidValueError, match="seeds = 0"):
        nw.compare(config, seeds=0)
    with pytest.raises(InvalidValueError, match="methods"):
        nw.compare(config, [])
    with pytest.raises(InvalidValueError, match="seed = -1"):
        nw.prepare(config, seed=-1)


def test_prepare_is_what_run_trains() -> None:
    prepared = nw.prepare(CONTENT, "NoiseWise", 3)
    assert isinstance(prepared, nw.Prepared)
    assert (prepared.seed, prepared.method.name) == (3, "NoiseWise")
    assert nw.simulate(prepared) == nw.run(CONTENT, "NoiseWise", 3)


def test_a_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    result = nw.run(CONTENT, "DPFedAvg", folder=tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} >= {"config.toml", "result.json"}
    assert nw.run(tmp_path / "mine" / "config.toml", "DPFedAvg") == result
    with pytest.raises(
        InvalidValueError, match=r"training\.rounds = 2: .* contains runs of 1 round,"
    ):
        nw.run(CONTENT, "DPFedAvg", folder=tmp_path / "mine", set={"training.rounds": 2})
    with pytest.raises(InvalidValueError, match="model"):
        nw.run(CONTENT, folder=tmp_path / "other", set={"model.name": "nosuch"})
    assert not (tmp_path / "other").exists()


def test_rows_and_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = nw.compare(DEMO, ["RobustHDP", "FedAvg"], 2, set=SMALL)
    rows = comparison.to_rows()
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("RobustHDP", 0), ("FedAvg", 0), ("RobustHDP", 1), ("FedAvg", 1),
    ]  # fmt: skip
    for row, result in zip(rows, comparison.results, strict=True):
        assert row["accuracy"] == result.accuracy
        assert row["status"] == "finished"
    by_round = comparison.to_rows(by="round")
    assert len(by_round) == 2 * 2 * 2
    assert by_round[1]["accuracy"] == comparison.results[0].rounds[1].mean_accuracy
    assert math.isnan(by_round[2]["largest_epsilon"])  # FedAvg has no budget
    assert len({tuple(row) for row in by_round}) == 1  # the same columns in each
    with pytest.raises(InvalidValueError, match="by"):
        comparison.to_rows(by="client")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'noisewise\[frame\]'"):
        comparison.to_frame()


@pytest.mark.extras
def test_a_frame_is_a_table_of_pandas() -> None:
    comparison = nw.compare(CONTENT, ["RobustHDP", "FedAvg"], 2)
    frame = comparison.to_frame()
    mean = frame.groupby("method").accuracy.mean()
    accuracies = [r.accuracy for r in comparison.results if r.method == "FedAvg"]
    assert mean["FedAvg"] == pytest.approx(sum(accuracies) / 2)
    assert list(comparison.to_frame(by="round").columns[:3]) == ["method", "seed", "round"]


def test_the_report_of_a_comparison(tmp_path: Path) -> None:
    comparison = nw.compare(CONTENT, ["RobustHDP", "DPFedAvg"], 1)
    with pytest.raises(InvalidValueError, match="folder"):
        comparison.write_report()
    page, *_ = comparison.write_report(tmp_path / "page")
    assert page == tmp_path / "page" / "report.html"
    assert comparison.config is not None
    assert dump_config(comparison.config).splitlines()[-1] in page.read_text()
    assert load_config(DEMO) != comparison.config


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_in_the_preparation_come_before_training(workers: int, tmp_path: Path) -> None:
    """Those of later methods too: `moments` cannot keep the smallest budget for everyone."""
    low = {"population.epsilon": [0.05, 4.0, 9.0, 9.0], "training.accountant": "moments"}
    with pytest.raises(AccountingError, match="floor"):
        nw.compare(
            DEMO, ["FedAvg", "WeiAvg"], 1, set=SMALL | low, folder=tmp_path / "out", workers=workers
        )
    assert not (tmp_path / "out").exists()
    guard = {"policy.tolerated_attackers": 9}
    with pytest.raises(InvalidValueError, match="tolerated_attackers"):
        nw.compare(DEMO, ["FedAvg", "NoiseWise"], 1, set=SMALL | guard, workers=workers)


def test_a_run_whose_process_is_killed_spares_the_others() -> None:
    methods = ["failing_part:Killed", "failing_part:Failing", "DPFedAvg", "WeiAvg"]
    comparison = nw.compare(CONTENT, methods, 1, workers=2)
    assert [result.method for result in comparison.results] == ["DPFedAvg", "WeiAvg"]
    killed, failed = comparison.failures.values()
    assert "exit code -9" in killed
    assert "on purpose" in failed


THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
AFTER_OPENMP = """
import sys
import torch
import noisewise as nw
torch.set_num_threads(2)
torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # starts OpenMP's threads, which no fork has
done = nw.compare(sys.argv[1], ["DPFedAvg", "WeiAvg"], 1, set={"training.rounds": 2}, workers=2)
print(len(done.results))
"""


def test_runs_in_processes_end_where_this_process_uses_several_threads() -> None:
    """The other tests have one thread, see conftest.py; a user's process has one for each core."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS}
    words = [sys.executable, "-c", AFTER_OPENMP, str(DEMO)]
    out = subprocess.run(words, capture_output=True, text=True, timeout=180, env=environment)
    assert (out.returncode, out.stdout) == (0, "2\n"), out.stderr


def test_an_error_of_a_listener_ends_all_processes() -> None:
    def stop(method: str, seed: int, record: RoundRecord) -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        nw.compare(DEMO, ["DPFedAvg", "WeiAvg"], 2, set=SMALL, workers=2, on_round=stop)


def test_a_sweep_in_one_call(tmp_path: Path) -> None:
    values = {"training.clip_norm": [0.5, 2.0]}
    methods = ["DPFedAvg", "failing_part:Failing"]
    swept = nw.compare(CONTENT, methods, 1, sweep=values, folder=tmp_path)
    assert len(swept.results) == len(swept.parts) == 2
    assert [part.settings for part in swept.parts] == [{"training.clip_norm": v} for v in (0.5, 2)]
    assert list(swept.failures) == [
        f"failing_part:Failing, seed 0 (training.clip_norm = {clip})" for clip in (0.5, 2.0)
    ]
    rows = swept.to_rows()
    assert [row["training.clip_norm"] for row in rows] == [0.5, 2.0]
    assert rows[0]["accuracy"] != rows[1]["accuracy"]
    for clip in (0.5, 2.0):
        assert (tmp_path / f"training.clip_norm={clip}" / "report.html").exists()
    assert swept.write_report()[0] == tmp_path / "report.html"
    assert (tmp_path / "sweep.json").exists()
    in_memory = nw.compare(CONTENT, ["DPFedAvg"], 1, sweep=values)
    assert in_memory.results == swept.results
    with pytest.raises(InvalidValueError, match="folder"):
        in_memory.write_report()
    page = in_memory.write_report(tmp_path / "again")[0].read_text()
    assert "Accuracy against training.clip_norm" in page


def test_a_sweep_checks_its_combinations_together() -> None:
    """Neither value of the lists fits the config without the other field."""
    values = {"data.clients": [2, 3], "population.epsilon": [[1.0, 2.0], [1.0, 2.0, 3.0]]}
    with pytest.raises(InvalidValueError, match=r"population\.epsilon"):
        nw.compare(CONTENT, ["DPFedAvg"], 1, sweep=values)
    fits = {"population.epsilon": [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]}
    both = nw.compare(CONTENT, ["DPFedAvg"], 1, sweep=fits, set={"data.clients": 3})
    assert len(both.results) == 2


COMPARE: list[tuple[str, dict[str, Any], str]] = [
    ("a number", {"config": 5}, "config = 'int': must be a config, its content as a mapping"),
    ("no config", {"config": None}, "config = 'NoneType': must be a config"),
    ("a number of methods", {"methods": 5}, "methods = 5: must be a list of names"),
    ("twice", {"methods": ["WeiAvg", "WeiAvg"]}, "compare.methods = 'WeiAvg': is listed twice"),
    ("a class", {"methods": [nw.NoiseWise]}, "method = 'NoiseWise': must be a name, .*MethodConf"),
    ("an object", {"methods": [nw.NoiseWise()]}, "method = 'NoiseWise': must be a name"),
    ("workers as text", {"workers": "2"}, "workers = '2': must be a whole number"),
    ("no workers", {"workers": 0}, "workers = 0: must be a whole number"),
    ("a huge seed", {"set": {"seed": 2**63}}, f"seed = {2**63}: must be at most {2**63 - 1}"),
    ("set as text", {"set": "seed=3"}, "set = 'seed=3': must be a mapping from dotted names"),
    ("set without names", {"set": {5: 1}}, "set = .*must be a mapping from dotted names"),
    ("a swept value", {"sweep": {"seed": 3}}, "sweep: seed = 3: must be a list of values"),
    ("a swept text", {"sweep": {"data.name": "mnist"}}, "sweep: data.name = 'mnist': .* list"),
    ("nothing swept", {"sweep": {"seed": []}}, r"sweep: seed = \[\]: must be one or more values"),
    ("a list to sweep", {"sweep": ["seed"]}, "sweep = .*must be a mapping"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), [c[1:] for c in COMPARE], ids=[c[0] for c in COMPARE]
)
def test_bad_arguments_are_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words) as caught:
        nw.compare(**{"config": CONTENT, "methods": ["DPFedAvg"], "seeds": 1, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", [5, nw.NoiseWise, ["DPFedAvg"], {"name": "DPFedAvg"}])
def test_what_is_no_method_is_one_line(method: Any) -> None:
    with pytest.raises(
        InvalidValueError, match=r"method = .*must be a name, \"package.module:name\""
    ):
        nw.run(CONTENT, method)


def test_one_attacker_and_one_attack_as_text() -> None:
    """A text is one name, not a list of its letters."""
    study = nw.study_attacks(CONTENT, "client-00", methods=["DPFedAvg"], attacks="zero")
    assert [(run.attack, run.attackers) for run in study.runs] == [
        ("no attack", ("client-00",)), ("zero", ("client-00",)),
    ]  # fmt: skip
    assert repr(study) == (
        "AttackStudy(runs=2, methods=['DPFedAvg'], attacks=['no attack', 'zero'])"
    )
    with pytest.raises(InvalidValueError, match="attackers = None: must be a list of names"):
        nw.study_attacks(CONTENT, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="methods = 'WeiAvg': is listed twice"):
        nw.study_attacks(CONTENT, ["client-00"], methods=["WeiAvg", "WeiAvg"])
