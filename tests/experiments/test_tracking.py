"""TensorBoard and MLflow read back the values of the rounds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noisewise.errors import InvalidValueError, MissingExtraError
from noisewise.experiments import compare, run
from noisewise.experiments.config import ExperimentConfig, load_config
from noisewise.experiments.tracking import run_name
from noisewise.federation.round_table import round_metrics

ROOT = Path(__file__).parents[2]


def small_config(**more: Any) -> ExperimentConfig:
    fields = {"training.rounds": 3, "data.clients": 4, "population.epsilon": [1.0, 4.0, 9.0, 9.0]}
    return load_config(ROOT / "configs" / "demo.toml", fields | more)


@pytest.mark.parametrize("library", ["tensorboard", "mlflow"])
def test_without_the_library_the_install_command_is_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    config = small_config(**{f"track.{library}": str(tmp_path / "there")})
    words = rf"track\.{library} needs \w+: pip install 'noisewise\[track\]'"
    with pytest.raises(MissingExtraError, match=words):
        run(config)
    with pytest.raises(MissingExtraError, match=words):
        compare(config, ["DPFedAvg"], 1, folder=tmp_path / "runs")
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_nothing_is_loaded_or_written_unless_asked_for(tmp_path: Path) -> None:
    before = set(sys.modules)
    run(small_config(), folder=tmp_path / "run")
    assert not [m for m in set(sys.modules) - before if m.startswith(("tensorboard", "mlflow"))]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bad_fields_are_named() -> None:
    with pytest.raises(InvalidValueError, match=r"track\.tensorboard"):
        small_config(**{"track.tensorboard": ""})
    with pytest.raises(InvalidValueError, match="unknown key, must be one of mlflow, tensorboard"):
        small_config(**{"track.wandb": "x"})


def test_names_tell_runs_of_several_comparisons_apart() -> None:
    assert run_name(Path("runs/demo/runs/PFA-seed0"), "x") == "demo/PFA-seed0"
    assert run_name(Path("runs/s/clip_norm=1/runs/PFA-seed0"), "x") == "s/clip_norm=1/PFA-seed0"
    assert run_name(None, "PFA-seed0") == "PFA-seed0"


def test_metrics_leave_out_what_is_not_a_number() -> None:
    record = run(small_config()).rounds[0]
    values = round_metrics(record)
    assert values["accuracy"] == record.mean_accuracy
    assert values["noise_ratio"] == record.noise_ratio >= 1
    assert values["largest_epsilon"] == max(record.epsilon_spent.values())  # type: ignore[type-var]
    bare = replace(record, accuracy=None, train_loss=None, aggregate_noise=None)
    assert not {"accuracy", "train_loss", "noise_ratio", "aggregate_noise"} & set(
        round_metrics(bare)
    )


def interrupted_and_resumed(config: ExperimentConfig, folder: Path) -> Any:
    """Stop a run after its second round, then resume it."""

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, folder=folder, on_round=stop)
    return run(config, folder=folder)


@pytest.mark.extras
def test_tensorboard_reads_each_round_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_config(**{"track.tensorboard": str(tmp_path / "board")})
    folder = tmp_path / "demo" / "runs" / "RobustHDP-seed0"
    result = interrupted_and_resumed(config, folder)
    homes = {path.parent for path in (tmp_path / "board").rglob("events.*")}
    assert len(homes) == 1
    events = EventAccumulator(str(homes.pop())).Reload()
    seen = [(entry.step, entry.value) for entry in events.Scalars("accuracy")]
    assert seen == [(r.round, pytest.approx(r.mean_accuracy)) for r in result.rounds]
    assert {"noise_ratio", "largest_epsilon", "train_loss"} <= set(events.Tags()["scalars"])
    count = len(list((tmp_path / "board").rglob("events.*")))
    run(config, folder=folder)  # finished: read back, not logged again
    assert len(list((tmp_path / "board").rglob("events.*"))) == count


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for MLflow that the tests share: making its tables takes ten seconds."""
    return tmp_path_factory.mktemp("mlflow")


def logged(database: Path) -> tuple[Any, dict[str, Any]]:
    """MLflow's own client, and the runs that it finds, by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("noisewise")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return client, {run.info.run_name.rpartition("/")[2]: run for run in found}


@pytest.mark.slow
@pytest.mark.extras
def test_mlflow_with_workers_that_start_together(database: Path, tmp_path: Path) -> None:
    config = small_config(**{"track.mlflow": str(database)})
    outcome = compare(config, ["WeiAvg", "FedAvg"], 1, folder=tmp_path / "demo", workers=2)
    assert not outcome.failures
    _, found = logged(database)
    for result in outcome.results:
        run = found[f"{result.method}-seed0"]
        assert run.data.params["method"] == result.method
        assert run.data.metrics["accuracy"] == pytest.approx(result.accuracy)
        assert run.info.status == "FINISHED"


@pytest.mark.extras
def test_mlflow_reads_each_round_of_a_resumed_run_once(database: Path, tmp_path: Path) -> None:
    config = small_config(**{"track.mlflow": str(database)})
    result = interrupted_and_resumed(config, tmp_path / "demo" / "runs" / "RobustHDP-seed0")
    client, found = logged(database)
    run = found["RobustHDP-seed0"]
    assert run.info.status == "FINISHED"
    assert run.data.params["training.rounds"] == "3"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in history] == [
        (r.round, pytest.approx(r.mean_accuracy)) for r in result.rounds
    ]
