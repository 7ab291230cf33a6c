"""Checks before a run find invalid own parts, folders of other runs and changed code."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from federation_helpers import small_clients, small_model

from noisewise.aggregation import make_method, plan_clients
from noisewise.errors import InvalidValueError, NoisewiseError, UpdateError
from noisewise.experiments import compare, run
from noisewise.experiments.config import ExperimentConfig, MethodConfig, dump_config, load_config
from noisewise.experiments.population import read_dataset
from noisewise.experiments.prepare import prepare
from noisewise.federation import Prepared, TrainingSettings, simulate

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
SMALL = {
    "training.rounds": 1,
    "training.accountant": "rdp",
    "data.clients": 4,
    "population.epsilon": [1.0, 4.0, 20.0, 20.0],
}
OWN = """
import numpy as np
import torch
from noisewise.aggregation import Aggregation, weighted_sum

class Uniform:
    needs = frozenset()
    def __init__(self, first=1.0):
        self.first = first
    def aggregate(self, view, state):
        weights = np.ones(view.updates.n_clients)
        weights[0] = self.first
        weights /= weights.sum()
        return Aggregation(weighted_sum(view.updates.values, weights), weights, state=state)

class Bare(Uniform):
    def aggregate(self, view, state):
        return view.updates.values.mean(1)

class Words(Uniform):
    needs = frozenset({"epsilon"})

def narrow(input_shape, n_classes):
    return torch.nn.Linear(3, n_classes)

def fitting(input_shape, n_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, n_classes))

def many(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

def mean(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def config(**fields: object) -> ExperimentConfig:
    named = {key.replace("__", "."): value for key, value in fields.items()}
    return load_config(DEMO, SMALL | named)


@pytest.mark.parametrize(
    ("field", "part", "said"),
    [
        ("model__name", "mine:narrow", "model.name = 'mine:narrow': must take inputs of float32("),
        ("training__loss", "mine:many", "training.loss = 'mine:many': must take the model's out"),
        ("training__loss", "mine:fitting", "training.loss"),
        ("training__metric", "mine:mean", "for each record: shape (9,), not ()"),
    ],
)
def test_own_parts_that_do_not_fit_are_one_line(
    own: Path, field: str, part: str, said: str
) -> None:
    wanted = config(**{field: part})
    for attempt in (prepare, run):
        with pytest.raises(InvalidValueError) as caught:
            attempt(wanted, "DPFedAvg")
        assert said in str(caught.value)
    with pytest.raises(InvalidValueError):
        compare(wanted, ["DPFedAvg"], 1)
    assert run(config(model__name="mine:fitting"), "DPFedAvg").status == "finished"


def test_own_aggregators_and_data_that_do_not_fit(own: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"mine:Words.needs .*Disclosure"):
        make_method("mine:Words")
    with pytest.raises(UpdateError, match=r"mine:Bare: aggregate\(\) must return an Agg"):
        run(config(), "mine:Bare")
    with pytest.raises(InvalidValueError, match=r"data.name = 'mine:narrow': must be a func"):
        read_dataset(config(data__name="mine:narrow").data)


def test_a_folder_of_other_settings_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    first = config()
    compare(first, ["DPFedAvg"], 1, folder=tmp_path)
    before = (tmp_path / "config.toml").read_bytes()
    for changed in (config(training__rounds=2), config(population__delta=1e-4)):
        with pytest.raises(
            InvalidValueError, match=r"(rounds = 2: .* contains|delta = 0.001, not 0.0001)"
        ):
            compare(changed, ["DPFedAvg"], 1, folder=tmp_path)
        assert (tmp_path / "config.toml").read_bytes() == before
    same = config(compare__seeds=7, training__executor="serial")
    assert compare(same, ["DPFedAvg"], 1, folder=tmp_path).failures == {}


@pytest.mark.parametrize("beside", [None, "runs/config/RobustHDP-seed0/run.json", "remark"])
def test_a_config_of_the_users_own_is_not_replaced(beside: str | None, tmp_path: Path) -> None:
    wanted = config()
    if beside == "remark":  # a comparison's folder whose config was edited by hand
        compare(wanted, ["DPFedAvg"], 1, folder=tmp_path)
    elif beside is not None:  # runs/ that is the default output of other commands
        (tmp_path / beside).parent.mkdir(parents=True)
        (tmp_path / beside).touch()
    mine = tmp_path / "config.toml"
    remark = "# mine\n" if beside == "remark" else ""
    mine.write_text(remark + dump_config(wanted).replace("seeds = ", "seeds  = "))
    before = mine.read_bytes()
    with pytest.raises(
        InvalidValueError, match=r"config\.toml that was not written by a comparison"
    ):
        compare(mine, ["DPFedAvg"], 1, folder=tmp_path)
    assert mine.read_bytes() == before
    assert len(list(tmp_path.rglob("result.json"))) == int(beside == "remark")


def test_a_comparison_that_has_only_begun_is_resumed(tmp_path: Path) -> None:
    """It was ended before its first run; one of an older version has not even runs/."""
    wanted = config()
    for made in ("new/runs", "failed/runs/DPFedAvg-seed0", "killed/runs/DPFedAvg-seed0", "old"):
        (tmp_path / made).mkdir(parents=True)
        if made.startswith("killed"):
            (tmp_path / made / ".training.lock").touch()
        folder = tmp_path / made.partition("/")[0]
        first = wanted if made == "old" else config(compare__seeds=5)
        (folder / "config.toml").write_text(dump_config(first))
        assert compare(wanted, ["DPFedAvg"], 1, folder=folder).failures == {}
        assert (folder / "config.toml").read_text() == dump_config(wanted)


OWN_WRITER = """attacks = []
seed = 0

[data]
name = "digits"
clients = 4
partition = "quantity"
alpha = 3.0
test_fraction = 0.2

[population]
epsilon = [1.0, 4.0, 20.0, 20.0]
batch_share = 0.125
delta = 0.001
local_epochs = 1
epsilon_scale = 1.0
draws = "authors"
seed = 0
reported_epsilon = {}

[model]
name = "softmax"
options = {}

[training]
rounds = 1
learning_rate = 1.0
clip_norm = 1.0
accountant = "rdp"
participation = 1.0
evaluate_every = 1
physical_batch = 256
device = "cpu"
loss_records = 128
loss = "torch.nn.functional:cross_entropy"
metric = "noisewise.federation.evaluation:accuracy"

[method]
name = "RobustHDP"
options = {}

[compare]
methods = ["DPFedAvg", {"name" = "RobustHDP", "options" = {"estimator" = "norm"}}]
seeds = 3

[policy]
tolerated_attackers = 0

[track]
"""


def test_a_folder_of_the_earlier_toml_writer_is_resumed(tmp_path: Path) -> None:
    """Versions before tomli_w wrote the same settings in another form of TOML."""
    (tmp_path / "earlier.toml").write_text(OWN_WRITER)
    earlier = load_config(tmp_path / "earlier.toml")
    robust = MethodConfig(name="RobustHDP", options={"estimator": "norm"})
    assert earlier == config(compare__methods=["DPFedAvg", robust])
    assert dump_config(earlier) != OWN_WRITER
    folder = tmp_path / "runs"
    first = compare(earlier, ["DPFedAvg"], 1, folder=folder)
    (folder / "config.toml").write_text(OWN_WRITER)
    started = (folder / "runs" / "DPFedAvg-seed0" / "run.json").stat().st_mtime_ns
    changed = config(training__rounds=2)
    with pytest.raises(
        InvalidValueError, match=r"training\.rounds = 2: .* contains runs of 1 round,"
    ):
        compare(changed, ["DPFedAvg"], 1, folder=folder)
    assert (folder / "config.toml").read_text() == OWN_WRITER
    both = compare(earlier, seeds=1, folder=folder)
    assert both.failures == {}
    assert [result.method for result in both.results] == ["DPFedAvg", robust.label]
    assert both.results[0].rounds == first.results[0].rounds
    assert (folder / "runs" / "DPFedAvg-seed0" / "run.json").stat().st_mtime_ns == started
    assert (folder / "config.toml").read_text() == dump_config(earlier)


@pytest.mark.parametrize("below", ["", "new/folder"])
def test_a_file_in_place_of_the_folder_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InvalidValueError, match=r"must be a folder, and .*notes is a file"):
        compare(config(), ["DPFedAvg"], 1, folder=tmp_path / "notes" / below)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InvalidValueError, match=r"cannot be made: no permission to write to"):
        compare(config(), ["DPFedAvg"], 1, folder=tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []


def finish(folder: Path, **options: float) -> float:
    """A finished run of the own aggregator; its weight of the first client."""
    sys.modules.pop("mine", None)
    importlib.invalidate_caches()
    clients, method = small_clients(), make_method("mine:Uniform", options)
    plans = plan_clients([c.spec for c in clients], method, rounds=1, clip_norm=1.0)
    settings = TrainingSettings(1, 0.2)
    result = simulate(Prepared(clients, plans, method, small_model(), settings), folder=folder)
    return next(iter(result.rounds[0].weights.values()))


def test_own_code_that_changed_is_not_read_back(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert finish(folder) == finish(folder) == 0.25
    own.write_text(OWN + "\n# a remark elsewhere in the file changes nothing\n")
    assert finish(folder) == 0.25
    with pytest.raises(NoisewiseError, match="earlier version of your own code"):
        finish(folder, first=3.0)
    own.write_text(OWN.replace("weights[0] = self.first", "weights[0] = 3"))
    with pytest.raises(NoisewiseError, match="earlier version of your own code"):
        finish(folder)
    assert finish(tmp_path / "other") == 0.5
