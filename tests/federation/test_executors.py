"""Serial and process executors give the same bits, also after a worker is killed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executor_cases import hashes, reference_run, run_with_a_kill
from federation_helpers import small_clients, small_model, small_run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from noisewise.aggregation.methods import make_method, plan_clients
from noisewise.cli import app
from noisewise.errors import InvalidValueError, MissingExtraError, NoisewiseError
from noisewise.experiments.config import parse_config
from noisewise.federation.clients import to_tensors
from noisewise.federation.evaluation import Evaluator, accuracy
from noisewise.federation.executors import (
    Execution,
    ProcessExecutor,
    SerialExecutor,
    Workload,
    until_done,
)
from noisewise.federation.stopwatch import Stopwatch
from noisewise.training.parameters import ParameterLayout
from noisewise.training.tasks import CLASSIFICATION

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    reference_run(folder)
    return folder


def workload(**changes: Any) -> Workload:
    clients, method = small_clients(), make_method("DPFedAvg")
    plans = plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
    return Workload(small_model(), cross_entropy, clients, plans, 0.1, 0, **changes)


def vector(work: Workload) -> Tensor:
    return ParameterLayout.of(work.model).flatten(work.model)


class TestDeadWorkers:
    def test_kill_9_in_mid_round(
        self,
        tmp_path: Path,
        reference: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        run_with_a_kill(tmp_path, reference, monkeypatch, workers=2)
        said = [record.message for record in caplog.records if "worker died" in record.message]
        assert len(said) == 1
        assert "round 2" in said[0]
        assert "client-" in said[0]

    def test_giving_up_after_three_deaths(self, caplog: pytest.LogCaptureFixture) -> None:
        asked: list[list[int]] = []

        def attempt(members: list[int]) -> dict[int, None]:
            asked.append(members)
            return {member: None for member in members if member != 2}

        with pytest.raises(NoisewiseError, match="fewer workers"):
            until_done(attempt, workload(), [0, 1, 2], "round 7")
        assert asked == [[0, 1, 2], [2], [2]]
        assert "client-02 again" in caplog.text

    def test_an_error_of_the_work_is_not_a_death(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(ValueError, match="no such loss"):
            small_run(rounds=1, loss=_broken_loss, workers=2)
        assert "worker died" not in caplog.text


def _broken_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("no such loss")


class TestNames:
    def test_default_is_serial_for_one_worker_and_processes_for_more(self) -> None:
        work = workload()
        assert isinstance(Execution(1).start(work, vector(work)), SerialExecutor)
        assert isinstance(Execution(2).start(work, vector(work)), ProcessExecutor)
        assert isinstance(Execution(2, "serial").start(work, vector(work)), SerialExecutor)
        assert isinstance(Execution(1, "processes").start(work, vector(work)), ProcessExecutor)

    def test_one_process_gives_the_same_bits(self, reference: Path, tmp_path: Path) -> None:
        from executor_cases import ROUNDS, dying_parts

        small_run(
            rounds=ROUNDS,
            folder=tmp_path,
            loss=dying_parts.loss,
            executor="processes",
            workers=1,
        )
        assert hashes(tmp_path) == hashes(reference)

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"executor": "threads"}, "training.executor"),
            ({"ray_address": "10.0.0.5:6379"}, "training.ray_address"),
            ({"executor": "ray", "ray_address": " "}, "training.ray_address"),
            ({"workers": 0}, "workers"),
        ],
    )
    def test_bad_values_name_the_field(self, options: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidValueError, match=field):
            small_run(rounds=1, **options)

    def test_other_devices_are_left_to_the_serial_executor(self) -> None:
        work = workload(device="meta")
        assert isinstance(Execution(4).start(work, torch.zeros(1)), SerialExecutor)
        with pytest.raises(InvalidValueError, match=r"training\.executor.*serial"):
            Execution(4, "processes").start(work, torch.zeros(1))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"executor": "threads"}, r"training\.executor"),
            ({"ray_address": "auto"}, r"training\.ray_address"),
            ({"executor": "serial", "ray_address": "auto"}, r"training\.ray_address"),
            ({"loss_records": 0}, r"training\.loss_records"),
        ],
    )
    def test_bad_configs_name_the_field(self, change: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidValueError, match=field):
            parse_config(
                {
                    "data": {"name": "digits", "clients": 2},
                    "population": {"epsilon": 1.0, "batch_size": 8, "delta": 1e-3},
                    "model": {"name": "softmax"},
                    "training": {"rounds": 1, "learning_rate": 0.1, "clip_norm": 1.0} | change,
                }
            )

    def test_without_ray_the_install_command_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'noisewise\[ray\]'"):
            small_run(rounds=1, executor="ray")

    def test_ray_is_not_loaded_unless_wanted(self) -> None:
        code = "import sys, noisewise.federation.ray_executor; sys.exit('ray' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


class _OwnView(nn.Module):
    """A model whose code needs the default layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.view(len(hidden), -1))


class TestEvaluation:
    @pytest.mark.parametrize("model", [small_model(), _OwnView()], ids=["plain", "own view"])
    def test_agrees_with_the_plain_way(self, model: nn.Module) -> None:
        data = small_clients()[0].data
        evaluator = Evaluator(model, cross_entropy, CLASSIFICATION.metrics, 10**6)
        theta = ParameterLayout.of(model).flatten(model)
        scores = evaluator(theta, evaluator.prepare(data))
        with torch.no_grad():
            test, train = to_tensors(data.test), to_tensors(data.train)
            expected = float(accuracy(model(test.inputs), test.targets).mean())
            loss = float(cross_entropy(model(train.inputs), train.targets))
        assert scores.accuracy == pytest.approx(expected)
        assert scores.train_loss == pytest.approx(loss, rel=1e-5)

    def test_train_loss_of_a_sample_that_stays_the_same(self) -> None:
        data = small_clients()[0].data
        evaluator = Evaluator(small_model(), cross_entropy, CLASSIFICATION.metrics, 5)
        first, again = evaluator.prepare(data)[1], evaluator.prepare(data)[1]
        assert len(first) == 5
        assert torch.equal(first.inputs, again.inputs)
        everything = to_tensors(data.train)
        rows = np.linspace(0, len(everything) - 1, 5).astype(int)
        assert torch.equal(first.targets, everything.targets[rows])

    def test_the_sample_changes_nothing_but_the_train_loss(self) -> None:
        from dataclasses import replace

        from noisewise.federation import Prepared, TrainingSettings, simulate

        clients, method = small_clients(), make_method("DPFedAvg")
        plans = plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
        few, all_ = (
            simulate(
                Prepared(
                    clients, plans, method, small_model(), TrainingSettings(2, 0.2, loss_records=n)
                )
            )
            for n in (4, 1000)
        )
        assert few.rounds != all_.rounds
        assert [replace(r, train_loss=None) for r in few.rounds] == [
            replace(r, train_loss=None) for r in all_.rounds
        ]


class TestProfile:
    def test_parts_and_other_add_up(self) -> None:
        clock = Stopwatch()
        small_run(rounds=2, clock=clock)
        assert clock.rounds == 2
        assert sum(row["seconds"] for row in clock.rows()) == pytest.approx(clock.total)
        assert sum(row["share"] for row in clock.rows()) == pytest.approx(1)
        assert all(clock.seconds[part] > 0 for part in ("local training", "evaluation"))

    def test_the_command_writes_timing_beside_an_unchanged_result(self, tmp_path: Path) -> None:
        words = ["run", str(ROOT / "configs" / "demo.toml"), "--workers", "1"]
        for field in ("training.rounds=2", "data.clients=4", "population.epsilon=2.0"):
            words += ["--set", field]
        plain = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "plain")])
        timed = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "timed"), "--profile"])
        assert plain.exit_code == timed.exit_code == 0, plain.output + timed.output
        for part in ("local training", "aggregation", "evaluation", "accounting", "checkpoint"):
            assert part in timed.output
        (one,), (two,) = ((tmp_path / name).iterdir() for name in ("plain", "timed"))
        assert hashes(one) == hashes(two)
        assert not (one / "timing.json").exists()
        timing = json.loads((two / "timing.json").read_text())
        assert timing["rounds"] == 2
        assert sum(row["share"] for row in timing["parts"]) == pytest.approx(1)
        again = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "timed"), "--profile"])
        assert "already finished" in again.output
        assert json.loads((two / "timing.json").read_text()) == timing


def test_logging_names_the_module() -> None:
    """Deaths are reported by the package's logger, which the command line shows."""
    assert logging.getLogger("noisewise.federation.executors").isEnabledFor(logging.WARNING)
