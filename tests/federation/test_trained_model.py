"""The trained model comes back as a module, as named tensors, and from the run's folder."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_helpers import small_model, small_run
from model_files import trained_vector
from safetensors.torch import load_file, save_file
from test_old_runs import OLD, prepared_run
from torch import Tensor, nn

import noisewise as nw
from noisewise.errors import InvalidValueError
from noisewise.federation.trained_model import ModelStructure, TrainedModel
from noisewise.report.chart import method_styles
from noisewise.training.parameters import ParameterLayout


class Partly(nn.Module):
    """Tied weights, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.scale
        return self.last(self.frozen(self.first(x))) * scale  # type: ignore[no-any-return]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_run_in_memory_returns_its_model() -> None:
    result = small_run(rounds=2)
    model = result.model
    assert model is result.model
    assert not model.training
    assert same(model.state_dict(), result.state_dict())
    assert not same(small_model().state_dict(), result.state_dict())  # power: it was trained
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_file_is_a_state_dict_and_equals_the_model_in_memory(tmp_path: Path) -> None:
    result = small_run(rounds=2, folder=tmp_path)
    plain = small_model(seed=1)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))  # strict
    assert same(dict(plain.state_dict()), result.state_dict())
    loaded = nw.load_model(tmp_path, small_model(seed=2))
    assert same(dict(loaded.state_dict()), result.state_dict())
    again = small_run(rounds=2, folder=tmp_path)  # read, not trained
    assert same(dict(again.model.state_dict()), result.state_dict())
    assert same(nw.load_result(tmp_path).state_dict(), result.state_dict())
    with pytest.raises(InvalidValueError, match="load_model"):
        _ = nw.load_result(tmp_path).model


def test_frozen_parameters_buffers_and_tied_weights_are_in_the_file(tmp_path: Path) -> None:
    model = Partly()
    theta = torch.arange(16.0)
    TrainedModel(theta, ModelStructure.of(model)).write(tmp_path)
    file = tmp_path / "model.safetensors"
    assert set(load_file(file)) == set(model.state_dict())
    other = Partly()
    other.load_state_dict(load_file(file))  # strict
    assert torch.equal(other.first.weight, theta.view(4, 4))
    assert torch.equal(other.last.weight, theta.view(4, 4))
    assert torch.equal(other.frozen.weight, model.frozen.weight)
    assert torch.equal(trained_vector(file), theta)
    assert not torch.equal(model.first.weight, theta.view(4, 4))  # the run's model is not changed


def test_a_file_of_a_server_fills_the_trainable_parameters(tmp_path: Path) -> None:
    layout = ParameterLayout.of(Partly())
    TrainedModel(torch.ones(16), ModelStructure(layout)).write(tmp_path)
    model = Partly()
    frozen = model.frozen.weight.clone()
    nw.load_model(tmp_path, model)
    assert torch.equal(model.last.weight, torch.ones(4, 4))
    assert torch.equal(model.frozen.weight, frozen)


def test_an_old_folder_is_loaded(tmp_path: Path) -> None:
    old = OLD / "simulated_finished"
    expected = trained_vector(old / "model.safetensors")
    run = prepared_run()
    model = nw.load_model(old, copy.deepcopy(run.model))
    assert torch.equal(ParameterLayout.of(model).flatten(model), expected)
    shutil.copytree(old, tmp_path / "run")
    result = nw.simulate(run, folder=tmp_path / "run")
    assert torch.equal(ParameterLayout.of(result.model).flatten(result.model), expected)
    with pytest.raises(InvalidValueError, match="load_model"):
        nw.load_result(old).state_dict()


@pytest.mark.parametrize("flaw", ["missing", "truncated", "other shape", "other names", "old size"])
def test_a_wrong_file_is_one_line_and_changes_nothing(tmp_path: Path, flaw: str) -> None:
    file = tmp_path / "model.safetensors"
    names = {"noisewise": json.dumps({"version": 2, "trained": ["1.weight", "1.bias"]})}
    good = small_model(seed=1).state_dict()
    if flaw == "truncated":
        save_file(dict(good), file, names)
        file.write_bytes(file.read_bytes()[:-10])
    elif flaw == "other shape":
        save_file({**good, "1.bias": torch.zeros(9)}, file, names)
    elif flaw == "other names":
        save_file({"head.weight": torch.zeros(10, 64)}, file, names)
    elif flaw == "old size":
        save_file({"theta": torch.zeros(649)}, file)
    model = small_model()
    with pytest.raises(InvalidValueError) as caught:
        nw.load_model(tmp_path, model)
    assert "\n" not in str(caught.value)
    assert same(dict(model.state_dict()), dict(small_model().state_dict()))


class Adapter(nn.Sequential):
    """A model with `save_pretrained`, as peft and transformers have it."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        save_file(dict(self.state_dict()), Path(folder) / "adapter.safetensors")


class Broken(Adapter):
    """Its `save_pretrained` fails halfway."""

    def save_pretrained(self, folder: str) -> None:
        super().save_pretrained(folder)
        raise OSError("no hub")


def test_save_pretrained_of_the_model_is_called(tmp_path: Path) -> None:
    theta = torch.arange(6.0)
    TrainedModel(theta, ModelStructure.of(Adapter(nn.Linear(2, 2)))).write(tmp_path)
    adapter = load_file(tmp_path / "pretrained" / "adapter.safetensors")
    assert torch.equal(adapter["0.weight"], theta[:4].view(2, 2))


def test_a_failing_save_pretrained_leaves_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TrainedModel(torch.ones(6), ModelStructure.of(Broken(nn.Linear(2, 2)))).write(tmp_path)
    assert "no hub" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_no_trained_model_is_an_error_with_the_reason(tmp_path: Path) -> None:
    alone = small_run("Alone", rounds=1, folder=tmp_path)
    with pytest.raises(InvalidValueError, match="model of its own"):
        _ = alone.model
    client = next((tmp_path / "clients").iterdir())
    assert same(
        dict(nw.load_model(client, small_model()).state_dict()),
        load_file(client / "model.safetensors"),
    )


def test_results_show_themselves_shortly_and_as_a_frame() -> None:
    pytest.importorskip("pandas", reason="needs requirements-extras.lock")
    result = small_run(rounds=3, evaluate_every=2)
    assert len(repr(result)) < 200
    frame = result.to_frame()
    assert list(frame["round"]) == [1, 2, 3]
    assert frame["accuracy"].isna().tolist() == [True, False, False]
    assert frame.shape == (3, len(frame.columns))
    assert all(not isinstance(value, dict | list) for value in frame.to_numpy().ravel())


def test_the_notebook_view_refers_to_nothing_outside_and_escapes() -> None:
    result: Any = small_run(rounds=2)
    page = result._repr_html_()
    assert page.count("<polyline") == 1
    assert "http" not in page
    assert "<script" not in page
    object.__setattr__(result, "method", "<script>alert(1)</script>")
    assert "<script>" not in result._repr_html_()


def test_a_curve_in_a_notebook_has_the_colour_of_its_method() -> None:
    for method in ("NoiseWise", "WeiAvg"):
        page = small_run(method, rounds=1)._repr_html_()
        assert f'stroke="{method_styles([method])[method].colour}"' in page


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"folder = '.*nowhere': must be the folder of a"):
        nw.load_model(tmp_path / "nowhere", small_model())
