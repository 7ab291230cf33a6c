"""Own parts in the current folder are imported, and cannot replace installed modules."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import Noisewise

from noisewise.errors import InvalidValueError
from noisewise.plugins import load_object

ROOT = Path(__file__).parents[2]
NAMES = ("json", "csv", "random", "sched", "numpy", "torch", "ray", "safetensors", "matplotlib")
OWN = """
import sched, csv, json, random

from noisewise.aggregation import Aggregation, weighted_sum


class Own:
    needs = frozenset()

    def aggregate(self, view, state):
        import own_helper  # when the class is used, not when it is imported

        weights = own_helper.equal(view.updates.n_clients)
        return Aggregation(weighted_sum(view.updates.values, weights), weights)
"""
HELPER = "import numpy\n\n\ndef equal(n):\n    return numpy.full(n, 1 / n)\n"
SCRIPT = "import sys\nfrom noisewise.cli import main\nsys.exit(main())\n"  # as pip writes it
FIRST = (
    "import os, sys, noisewise.plugins\n"
    "noisewise.plugins._append_current_folder = lambda: sys.path.insert(0, os.getcwd())\n"
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with an own part beside files that have the names of installed modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    (folder / "own_rule.py").write_text(OWN)
    (folder / "own_helper.py").write_text(HELPER)
    return folder


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A copy of sys.path for one test, which imports these modules anew."""
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", path)
    for name in ("own_rule", "own_helper", "sched"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return path


def run_script(folder: Path, start: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    script = folder.parent / "bin" / "noisewise"
    script.parent.mkdir()
    script.write_text(start + SCRIPT)
    words = ["run", ROOT / "configs" / "demo.toml", "--method", "own_rule:Own", "--workers", "2"]
    words += ["--set", "training.rounds=1", "--set", "training.executor=processes"]
    words += ["--set", "data.clients=2", "--set", "population.epsilon=[8.0,8.0]", "--output", "out"]
    return subprocess.run(
        [sys.executable, *options, str(script), *map(str, words)],
        capture_output=True, text=True, timeout=600, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def imported(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("imported-*"))


def test_the_command_uses_own_parts_and_no_other_file_of_the_folder(hostile: Path) -> None:
    out = run_script(hostile)
    assert out.returncode == 0, out.stderr
    assert "own_rule:Own" in out.stdout
    assert imported(hostile) == []


def test_the_test_notices_a_folder_that_comes_first(hostile: Path) -> None:
    run_script(hostile, FIRST)
    assert "imported-sched" in imported(hostile)


def test_python_with_a_safe_path_protects_the_module_form_of_the_command(hostile: Path) -> None:
    words = ["-m", "noisewise.cli", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    safe = [sys.executable, "-P", *words]
    subprocess.run(safe, check=True, capture_output=True, cwd=hostile, env=environment)
    assert imported(hostile) == []


def test_only_a_module_found_nowhere_else_changes_the_path(
    hostile: Path, own_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    before = list(own_path)
    load_object("torch.nn.functional:cross_entropy")
    load_object("sched:scheduler")
    assert own_path == before
    load_object("own_rule:Own")
    load_object("own_helper:equal")
    assert own_path == [*before, str(hostile)]
    assert imported(hostile) == []


def test_a_hidden_file_is_named(
    hostile: Path, own_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    where = sysconfig.get_path("stdlib")
    with pytest.raises(InvalidValueError, match=r"sched\.py of the current folder is hidden by"):
        load_object("sched:Own", "method.name")
    with pytest.raises(InvalidValueError, match=f"{where}.*: rename it"):
        load_object("sched:Own", "method.name")
    with pytest.raises(InvalidValueError) as raised:
        load_object("own_rule:Other")
    assert "hidden" not in str(raised.value)
    assert imported(hostile) == []


@pytest.mark.parametrize("spec", ["", ":", "math", "math:", ":sqrt", ".rule:f", "a..b:f", "a b:c",
                                  "math:sqrt.", "/tmp/rule.py:f", "ma\x1bth:sqrt"])  # fmt: skip
def test_a_malformed_name_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValueError, match=r"must be .package\.module:name."):
        load_object(spec)


def _weights(n: int) -> list[float]:
    from own_helper import equal  # type: ignore[import-not-found]

    return list(equal(n))


def test_a_spawned_worker_finds_own_parts(
    hostile: Path, own_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    function: Any = load_object("own_helper:equal")
    monkeypatch.chdir("/")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert list(pool.submit(function, 2).result(60)) == [0.5, 0.5]
        assert pool.submit(_weights, 4).result(60) == [0.25] * 4
    assert imported(hostile) == []


def test_a_wrong_name_on_the_command_line_is_one_line(noisewise: Noisewise, hostile: Path) -> None:
    out = noisewise("run", ROOT / "configs" / "demo.toml", "--method", "sched:Own",
                    folder=hostile)  # fmt: skip
    assert out.returncode == 2
    assert len(out.stderr.strip().splitlines()) == 1
    assert "sched.py of the current folder is hidden" in out.stderr
