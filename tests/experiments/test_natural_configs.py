"""Configs of real federations: natural partitions, ordered epsilons and declared columns."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisewise.data import dataset_from_arrays
from noisewise.data.datasets import Dataset
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import dump_config, parse_config
from noisewise.experiments.population import make_population, read_dataset
from noisewise.experiments.prepare import prepare_seed

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "age (years)": {"type": "number", "range": [0, 100], "missing": 50},
    "sex": {"type": "category", "categories": ["m", "f"], "missing": "own"},
}


def own_federation() -> Dataset:
    """Clients of 10, 40, 20 and 3 records."""
    owners = ["a"] * 10 + ["b"] * 40 + ["c"] * 20 + ["d"] * 3
    inputs = np.arange(len(owners), dtype=np.float32)[:, None]
    return dataset_from_arrays(inputs, np.arange(len(owners)) % 2, groups=owners)


def content(**changes: Any) -> dict[str, Any]:
    """A config; changes are ``table__field``."""
    made: dict[str, Any] = {
        "data": {"name": f"{__name__}:own_federation", "partition": "natural"},
        "population": {"epsilon": "Dist3", "draws": "sampled", "batch_share": 1.0, "delta": 1e-3},
        "model": {"name": "softmax"},
        "training": {"rounds": 1, "learning_rate": 1.0, "clip_norm": 1.0},
    }
    for key, value in changes.items():
        *table, field = key.split("__")
        target = made[table[0]] if table else made
        if value is None:
            target.pop(field, None)
        else:
            target[field] = value
    return made


def test_a_natural_partition_needs_no_number_of_clients() -> None:
    clients = make_population(parse_config(content()), 0)
    assert [client.spec.id for client in clients] == ["a", "b", "c", "d"]
    assert [client.spec.n_examples for client in clients] == [8, 32, 16, 2]
    fewer = make_population(parse_config(content(data__min_records=10)), 0)
    assert [client.spec.id for client in fewer] == ["a", "b", "c"]
    assert make_population(parse_config(content(data__clients=4)), 0)
    with pytest.raises(InvalidValueError, match="the 4 real clients"):
        make_population(parse_config(content(data__clients=5)), 0)
    with pytest.raises(InvalidValueError, match=r"data.clients = None: is missing"):
        parse_config(content(data__partition="iid"))
    with pytest.raises(InvalidValueError, match="must be one value or 4"):
        make_population(parse_config(content(population__epsilon=[1.0, 2.0])), 0)


def test_epsilons_in_the_order_of_the_records() -> None:
    drawn = [c.spec.epsilon for c in make_population(parse_config(content()), 0)]
    strict = {}
    for order in ("small_strict", "large_strict"):
        config = parse_config(content(population__order=order))
        strict[order] = [c.spec.epsilon for c in make_population(config, 0)]
        assert sorted(strict[order]) == sorted(drawn)
    ranks = np.argsort(np.argsort(strict["small_strict"])).tolist()
    assert ranks == [1, 3, 2, 0]  # of a, b, c, d with 8, 32, 16 and 2 records
    assert np.argsort(np.argsort(strict["large_strict"])).tolist() == [2, 0, 1, 3]
    one = parse_config(content(population__order="small_strict", population__epsilon=1.0))
    with pytest.raises(InvalidValueError, match=r"population.order.*one epsilon for each client"):
        make_population(one, 0)
    with pytest.raises(InvalidValueError, match=r"population.order = 'big'"):
        parse_config(content(population__order="big"))


def test_a_limit_keeps_records_and_clients_together() -> None:
    data = read_dataset(parse_config(content(data__limit=10)).data)
    whole = own_federation()
    assert data.groups is not None
    assert whole.groups is not None
    numbers = data.train.inputs[:, 0].astype(int)
    assert len(numbers) == 10
    assert data.groups.tolist() == whole.groups[numbers].tolist()


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for number, name in enumerate(["oslo", "rome"]):
        rows = [f"{20 + i},{'mf?'[i % 3]},{'ab'[(i + number) % 2]}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age (years),sex,outcome", *rows]))
    return tmp_path


def test_csv_files_with_declared_columns(sites: Path) -> None:
    config = parse_config(content(
        data__name="csv", data__folder=str(sites), data__target="outcome", data__classes=["a", "b"],
        columns=COLUMNS,
    ))  # fmt: skip
    clients = make_population(config, 0)
    assert [client.spec.id for client in clients] == ["oslo", "rome"]
    data = read_dataset(config.data, config.columns)
    assert data.train.inputs.shape == (40, 4)
    assert data.n_classes == 2
    again = parse_config(tomllib.loads(dump_config(config)))
    assert again == config


@pytest.mark.parametrize("declared", [{}, {"task__classes": 3}, {"data__classes": ["0", "1", "2"]}])
def test_classes_that_are_not_declared_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declared: dict[str, Any]
) -> None:
    for name in ("oslo", "rome"):
        lines = "\n".join(["x,outcome", *(f"{i},{i % 3}" for i in range(30))])
        (tmp_path / f"{name}.csv").write_text(lines)
    changes = {"data__name": "csv", "data__folder": str(tmp_path), "data__target": "outcome"}
    made = content(task={"name": "classification"}, **changes, **declared)
    with caplog.at_level("WARNING"):
        setup = prepare_seed(parse_config(made), 0)
        prepare_seed(parse_config(made), 1, setup)
    assert setup.task.classes == 3
    told = [record.message for record in caplog.records if "task.classes" in record.message]
    assert len(told) == (0 if declared else 1)


def test_faults_of_columns_and_csv_are_named(sites: Path) -> None:
    wrong = {"age": {"type": "number", "range": [5, 1]}}
    with pytest.raises(InvalidValueError, match=r"columns.age.range = \[5.0, 1.0\]: must be"):
        parse_config(content(columns=wrong))
    config = parse_config(content(columns=COLUMNS))
    with pytest.raises(InvalidValueError, match="own_federation is not a table"):
        read_dataset(config.data, config.columns)
    with pytest.raises(InvalidValueError, match=r"data.folder = None: is required"):
        read_dataset(parse_config(content(data__name="csv")).data)
    with pytest.raises(InvalidValueError, match=r"data.target = 'x': is only for data.name"):
        read_dataset(parse_config(content(data__target="x")).data)
    with pytest.raises(InvalidValueError, match=r"data.text_length = 9: is only for the texts"):
        read_dataset(parse_config(content(data__text_length=9)).data)
    config = parse_config(content(data__name="csv", data__folder=str(sites)))
    with pytest.raises(InvalidValueError, match="target = 'target': must be one of the columns"):
        read_dataset(config.data)


@pytest.mark.parametrize("name", ["fars", "heart", "vietnam", "spam"])
def test_the_shipped_configs_take_one_step_a_round(name: str) -> None:
    config = parse_config(tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text()))
    assert config.data.partition == "natural"
    assert config.data.clients is None
    assert config.population.batch_share == 1
    assert config.training.accountant == "pld"
