"""Run folders that commit f7782e9 wrote are read, resumed and reported.

`old_runs` holds two finished runs and two that were cut off, of a simulation and of a server, with
the files as that commit wrote them. Everything that decides the runs is set here by hand, without
calibration and random initial parameters, so that their fingerprints are the same on any machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import trained_vector
from torch import nn

from noisewise.aggregation.methods import make_method
from noisewise.data.examples import Examples, Scaling
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec
from noisewise.federation import Prepared, TrainingSettings, load_run, make_clients, simulate
from noisewise.federation.round_record import RoundRecord
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.declaration import Declaration
from noisewise.privacy.plan import LocalPlan
from noisewise.report.comparison_report import write_report
from noisewise.report.run_sets import find_runs

OLD = Path(__file__).parent / "old_runs"
ROUNDS, RATE = 4, 0.5
NAMES = ("simulated_finished", "simulated_cut", "server_finished", "server_cut")


def zero_model() -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def prepared_run() -> Prepared:
    """The run of the two simulated folders."""
    specs, data, plans = [], [], []
    for number in range(3):
        epsilon = 10.0 * (number + 1)
        inputs = (np.arange(16, dtype=np.float32).reshape(8, 2) + number) / 16
        train = Examples(inputs, np.arange(8, dtype=np.int64) % 2, Scaling((0.0,), (1.0,)))
        specs.append(ClientSpec(f"client-{number}", 8, 4, epsilon, 1e-3))
        data.append(ClientData(train, train.take(np.arange(2))))
        budget = PrivacyBudget(epsilon, 1e-3)
        plans.append(LocalPlan(0.5, 4, 2, 1.0, 2.0, ROUNDS, "rdp", budget))
    settings = TrainingSettings(ROUNDS, RATE)
    return Prepared(
        make_clients(specs, data), plans, make_method("RobustHDP"), zero_model(), settings
    )


def copy_of(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(OLD / name, tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_is_read(name: str) -> None:
    run = load_run(OLD / name)
    assert run.method == "RobustHDP"
    assert run.status == ("finished" if name.endswith("finished") else "unfinished")
    assert run.deployed == name.startswith("server")
    assert run.settings["rounds"] == ROUNDS
    assert run.settings["learning_rate"] == RATE
    if run.deployed:
        assert run.declarations == {"1": Declaration("record", 2.0, 1e-5)}
        assert run.guarantee is None
        assert run.rounds[0].accuracy == {"public records": 0.1}
        assert "not finite" in run.rounds[0].dropped["4"]
    else:
        assert run.clients["client-2"]["planned_epsilon"] == 30.0
        assert run.guarantee == {"epsilon": 30.0, "delta": 1e-3}


def test_an_old_finished_simulation_is_returned_without_training(tmp_path: Path) -> None:
    folder = copy_of("simulated_finished", tmp_path)
    computed: list[RoundRecord] = []
    result = simulate(prepared_run(), folder=folder, on_round=computed.append)
    assert not computed
    assert result == load_run(OLD / "simulated_finished")
    assert (folder / "result.json").read_bytes() == (
        OLD / "simulated_finished" / "result.json"
    ).read_bytes()


def test_an_old_simulation_is_resumed_and_ends_with_the_same_model(tmp_path: Path) -> None:
    folder, known = copy_of("simulated_cut", tmp_path), load_run(OLD / "simulated_cut")
    result = simulate(prepared_run(), folder=folder)
    assert result.status == "finished"
    assert len(result.rounds) == ROUNDS
    assert result.rounds[: len(known.rounds)] == known.rounds
    assert load_run(folder) == result
    check_model(folder, "simulated_finished")


def check_model(folder: Path, name: str) -> None:
    """Equal but for the last bits, which depend on the processor."""
    made, expected = (trained_vector(f / "model.safetensors") for f in (folder, OLD / name))
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-6)


def test_an_old_run_of_a_server_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
    from flower_cases import LocalGrid
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    from noisewise.flower.strategy import NoiseAware

    def site(number: int) -> Any:
        def answer(message: Message) -> Message:
            if message.metadata.message_type == "evaluate":
                record = MetricRecord({"noised-accuracy": 0.25 * number})
                return Message(RecordDict({"metrics": record}), reply_to=message)
            rng = np.random.default_rng([number, int(message.content["config"]["server-round"])])
            delta = {
                name: Array((0.1 * rng.standard_normal(array.shape)).astype(np.float32))
                for name, array in message.content["arrays"].items()
            }
            return Message(RecordDict({"delta": ArrayRecord(delta)}), reply_to=message)

        return answer

    folder, known = copy_of("server_cut", tmp_path), load_run(OLD / "server_cut")
    assert len(known.rounds) == 1
    grid = LocalGrid({number: site(number) for number in (1, 2, 3)})
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=folder, evaluate_every=2)
    start = ArrayRecord(dict(zero_model().named_parameters()))

    def score(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.1 * number})

    strategy.start(grid, start, ROUNDS, evaluate_fn=score)
    run = load_run(folder)
    assert run.deployed
    assert (run.status, len(run.rounds)) == ("finished", ROUNDS)
    assert run.rounds[:1] == known.rounds
    assert [query.metadata.dst_node_id for query in grid.queries] == [2, 3]  # 1 has declared
    assert run.declarations == known.declarations
    assert run.rounds[2].noised_accuracy is None
    assert run.rounds[3].noised_accuracy == {"1": 0.25, "2": 0.5, "3": 0.75}
    check_model(folder, "server_finished")


def test_old_runs_are_reported(tmp_path: Path) -> None:
    for name in ("simulated_cut", "server_finished"):
        write_report(find_runs([OLD / name]).sets, tmp_path / name)
        page = (tmp_path / name / "report.html").read_text()
        assert ("a server sees updates" in page) == name.startswith("server")
