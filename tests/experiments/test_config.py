"""Configs are strict: one line names the field, its value and what is allowed."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from noisewise.errors import InvalidValueError
from noisewise.experiments.config import dump_config, load_config, parse_config
from noisewise.experiments.population import make_population
from noisewise.experiments.runner import comparison_jobs

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2},
    "population": {"epsilon": [1.0, 2.0], "batch_size": 8, "delta": 1e-3},
    "model": {"name": "softmax"},
    "training": {"rounds": 3, "learning_rate": 0.1, "clip_norm": 1.0},
}
ATTACK = {"kind": "zero", "clients": ["a"]}
PERMITTED = {"epsilon": 1.0, "delta": 1e-3, "n_examples": 100, "batch_size": 8}


def changed(path: str, value: object) -> dict[str, Any]:
    content = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    table = content
    for parent in parents:
        table = table.setdefault(parent, {})
    table[last] = value
    return content


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("training.rounds", -3, "greater than or equal to 1"),
        ("training.rounds", "x", "integer"),
        ("training.rounds", True, "integer"),
        ("training.rounds", 2.5, "integer"),
        ("training.learning_rate", 0, "greater than 0"),
        ("training.accountant", "none", "'pld', 'rdp' or 'moments'"),
        (
            "training.lerning_rate",
            0.1,
            "unknown key, did you mean learning_rate? It must be one of",
        ),
        ("sead", 1, "unknown key, did you mean seed? It must be one of attacks, columns, compare"),
        ("population.epsilon", 0, "greater than 0"),
        ("population.epsilon", -1.0, "greater than 0"),
        ("population.epsilon", float("nan"), "finite"),
        ("population.epsilon", float("inf"), "finite"),
        ("population.epsilon", True, "number"),
        ("population.epsilon", "Dist10", "Dist9"),
        ("population.epsilon", [1.0, 0.0], "greater than 0"),
        ("population.epsilon", [1.0], "one value or data.clients = 2"),
        ("population.batch_size", [8, 0], "greater than or equal to 1"),
        ("population.delta", 1.0, "less than 1"),
        ("population.batch_size", None, "or batch_share"),
        ("population.batch_share", 1.5, "less than or equal to 1"),
        ("data.test_fraction", 1.0, "less than 1"),
        ("compare.methods", [], "at least 1"),
        ("compare.methods", [{"name": "WeiAvg", "lr": 1}], "methods.0.lr = 1: unknown key"),
        ("compare.methods", [3], "methods.0 = 3: must be a valid string or must be a table"),
        ("compare.seeds", 0, "greater than or equal to 1"),
        ("attacks", [ATTACK | {"strenght": 1.0}], "clients, kind, strength"),
        ("attacks", [ATTACK, {"knd": "zero"}], "attacks.1.knd = 'zero': unknown key"),
        ("attacks", [{"clients": ["a"]}], "attacks.0.kind = None: is missing"),
        ("policy.permitted", [{"epsilon": 2.0}], "permitted.0.delta = None: is missing"),
        ("policy.permitted", [PERMITTED, PERMITTED | {"eps": 2.0}], "batch_size, delta, epsilon"),
        ("model", "softmax", "a table"),
        ("seed", -1, "greater than or equal to 0"),
    ],
)
def test_faults_are_named(field: str, value: object, words: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse_config(changed(field, value))
    text = str(caught.value)
    assert text.startswith(field)
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize("table", ["data", "population", "model", "training"])
def test_missing_tables_and_fields(table: str) -> None:
    content = {key: value for key, value in BASE.items() if key != table}
    with pytest.raises(InvalidValueError, match=f"{table} .*missing"):
        parse_config(content)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="can be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(InvalidValueError, match="must be TOML"):
        load_config(tmp_path / "bad.toml")


def test_dump_is_read_back_as_the_same_config() -> None:
    content = changed("compare.methods", ["WeiAvg", {"name": "PFA", "options": {"dimension": 2}}])
    content["population"]["reported_epsilon"] = {"client-00": 9.0}
    config = parse_config(content)
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_config(path)
    assert comparison_jobs(config)


def test_overrides_reach_nested_fields(tmp_path: Path) -> None:
    path = ROOT / "configs" / "demo.toml"
    config = load_config(path, {"training.rounds": 2, "method.options": {"estimate": "first"}})
    assert config.training.rounds == 2
    assert config.method.options == {"estimate": "first"}
    with pytest.raises(InvalidValueError, match="seed"):
        load_config(path, {"seed.deep": 3})


def test_jobs_are_paired_seed_by_seed() -> None:
    config = parse_config(changed("compare.methods", ["WeiAvg", "PFA"]))
    jobs = comparison_jobs(config, seeds=2)
    assert [(j.label, j.seed) for j in jobs] == [
        ("WeiAvg", 0), ("PFA", 0), ("WeiAvg", 1), ("PFA", 1),
    ]  # fmt: skip
    with pytest.raises(InvalidValueError, match="Nonsense"):
        comparison_jobs(config, ["Nonsense"])
    with pytest.raises(InvalidValueError, match="twice"):
        comparison_jobs(config, ["PFA", "PFA"])


def test_the_split_follows_the_seed_and_the_population_does_not() -> None:
    config = parse_config(BASE)
    one, two = make_population(config, 0), make_population(config, 1)
    assert [c.spec.epsilon for c in one] == [c.spec.epsilon for c in two]
    assert (one[0].data.train.inputs != two[0].data.train.inputs).any()


def test_a_batch_share_gives_everyone_the_same_number_of_steps() -> None:
    content = copy.deepcopy(BASE)
    content["data"] = {"name": "digits", "clients": 10, "partition": "quantity", "alpha": 3.0}
    content["population"] = {"epsilon": 1.0, "batch_share": 0.125, "delta": 1e-3}
    clients = make_population(parse_config(content), 0)
    assert len({c.spec.n_examples for c in clients}) > 5
    for client in clients:
        assert client.spec.batch_size == max(1, round(client.spec.n_examples / 8))
    content["population"]["batch_size"] = 8
    with pytest.raises(InvalidValueError, match="instead of it"):
        parse_config(content)


def test_limit_and_normalisation() -> None:
    content = copy.deepcopy(BASE)
    content["data"] |= {"limit": 100, "mean": [0.5], "std": [0.25]}
    plain, scaled = (make_population(parse_config(c), 0) for c in (BASE, content))
    assert sum(c.spec.n_examples + len(c.data.test) for c in scaled) == 100
    assert scaled[0].data.train.arrays()[0].min() == pytest.approx(-2)
    assert plain[0].data.train.arrays()[0].min() == 0
    content["data"]["limit"] = 10**6
    with pytest.raises(InvalidValueError, match=r"data\.limit"):
        make_population(parse_config(content), 0)
    del content["data"]["std"]
    with pytest.raises(InvalidValueError, match=r"data\.mean"):
        make_population(parse_config(content), 0)


def test_distributions_and_scale() -> None:
    content = copy.deepcopy(BASE)
    content["data"] = {"name": "digits", "clients": 20}
    content["population"] = {
        "epsilon": "Dist6", "batch_size": "mixed", "delta": 1e-4, "epsilon_scale": 10.0,
    }  # fmt: skip
    with pytest.raises(InvalidValueError, match="batch_size"):  # 128 > N_i: the error says so
        make_population(parse_config(content), 0)
    content["population"]["batch_size"] = 16
    clients = make_population(parse_config(content), 0)
    assert len({c.spec.epsilon for c in clients}) > 5
    assert min(c.spec.epsilon for c in clients) > 1
    content["population"]["draws"] = "sampled"
    sampled = make_population(parse_config(content), 0)
    assert [c.spec.epsilon for c in sampled] != [c.spec.epsilon for c in clients]
