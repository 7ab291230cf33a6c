"""Models: parameter counts, initial parameters, gradients per record, own models and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from noisewise.data import load_dataset
from noisewise.errors import InvalidValueError
from noisewise.training.models import make_model, model_names


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "options", "parameters"),
    [
        ("cnn", (1, 28, 28), 10, {}, 28_938),  # the paper's table of the CNN
        ("resnet18", (3, 32, 32), 10, {}, 11_181_642),  # the paper's table of datasets
        ("resnet34", (3, 32, 32), 10, {}, 21_272_778),
        ("resnet34", (3, 32, 32), 100, {}, 21_272_778 + 90 * 513),
        ("resnet18", (3, 32, 32), 10, {"stem": "cifar"}, 11_181_642 - 64 * 3 * (49 - 9)),
        ("softmax", (1, 8, 8), 10, {}, 650),
        ("mlp", (1, 8, 8), 10, {}, 65 * 64 + 65 * 10),
        ("mlp", (5,), 3, {"hidden": [7, 4]}, 6 * 7 + 8 * 4 + 5 * 3),
        ("mlp", (5,), 3, {"hidden": []}, 18),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple, n_classes: int, options: dict, parameters: int
) -> None:
    model = make_model(name, shape, n_classes, seed=0, **options)
    assert count(model) == parameters
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, n_classes)


def test_the_cnn_has_the_layers_of_the_table() -> None:
    model = make_model("cnn", (1, 28, 28), 10, seed=0)
    sizes = [count(layer) for layer in model if count(layer)]
    assert sizes == [416, 12_832, 15_690]
    logits = model(torch.randn(64, 1, 28, 28))
    assert bool((logits < 0).any())  # no ReLU behind the last layer


def test_a_head_starts_at_zero_and_appends_a_constant() -> None:
    model = make_model("head", (2, 3), 4, seed=0, constant=0.5)
    (weight,) = model.parameters()
    assert weight.shape == (4, 7)
    assert not weight.any()
    with torch.no_grad():
        weight[:, -1] = 2.0
    assert torch.equal(model(torch.randn(5, 2, 3)), torch.ones(5, 4))


@pytest.mark.parametrize("name", [n for n in model_names() if n not in ("resnet34", "head")])
def test_the_seed_decides_the_parameters_and_global_state_stays(name: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (make_model(name, (1, 8, 8), 10, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    flat = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, again, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


@pytest.mark.parametrize("name", model_names())
def test_no_layer_mixes_records(name: str) -> None:
    """The output of a record is the same alone and in a batch, in training mode (no BatchNorm)."""
    model = make_model(name, (3, 16, 16), 4, seed=0).train()
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = model(x), model(x[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)
    assert not any("BatchNorm" in type(m).__name__ for m in model.modules())
    assert not list(model.buffers())


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_residual_networks_start_at_a_sane_scale(name: str) -> None:
    model = make_model(name, (3, 32, 32), 10, seed=0)
    with torch.no_grad():
        x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        logits = model(x)
    assert 0.01 < float(logits.std()) < 10


@pytest.mark.parametrize("name", model_names())
def test_per_sample_gradients_work(name: str) -> None:
    model = make_model(name, (3, 16, 16), 4, seed=0)
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(theta: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, theta, (x[None],)), y[None])

    x, y = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    assert all(torch.isfinite(g).all() for g in gradients.values())


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_small_models_learn_the_digits(name: str) -> None:
    inputs, targets = load_dataset("digits").train.arrays()
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    model = make_model(name, (1, 8, 8), 10, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:1400]), y[:1400]).backward()
        optimiser.step()
    accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
    assert accuracy > 0.8


OWN = """
from torch import nn

constant = 3

def tiny(input_shape, n_classes, width=2):
    layers = nn.Linear(input_shape[0], width), nn.Linear(width, n_classes)
    return nn.Sequential(nn.Flatten(), *layers)

def nothing(input_shape, n_classes):
    return None
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models_for_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_models_for_test"


def test_own_function_by_name(own_module: str) -> None:
    model = make_model(f"{own_module}:tiny", (4,), 3, seed=7, width=5)
    assert count(model) == 5 * 5 + 6 * 3
    again = make_model(f"{own_module}:tiny", np.array([4]), 3, seed=7, width=5)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_own_function_itself() -> None:
    def make(input_shape: tuple[int, ...], n_classes: int, bias: bool = True) -> nn.Module:
        return nn.Linear(input_shape[0], n_classes, bias=bias)

    models = [make_model(make, (4,), 3, seed=7, bias=False) for _ in range(2)]
    assert count(models[0]) == 12
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    ("name", "shape", "options", "field"),
    [
        ("resnet50", (3, 32, 32), {}, "model"),
        ("own_models_for_test:missing", (3,), {}, "model"),
        ("own_models_for_test:constant", (3,), {}, "model"),
        ("own_models_for_test:nothing", (3,), {}, "model"),
        ("no_such_module_here:f", (3,), {}, "model"),
        ("softmax", (3,), {"hidden": 4}, "model"),
        ("mlp", (3,), {"hidden": 0}, "hidden"),
        ("cnn", (784,), {}, "input_shape"),
        ("cnn", (1, 3, 3), {}, "input_shape"),
        ("softmax", (0,), {}, "input_shape"),
        ("resnet18", (3, 32, 32), {"norm": "batch"}, "norm"),
        ("resnet18", (3, 32, 32), {"groups": 7}, "groups"),
        ("resnet18", (3, 32, 32), {"stem": "tiny"}, "stem"),
    ],
)
def test_bad_models_name_the_field(
    own_module: str, name: str, shape: tuple, options: dict, field: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make_model(name, shape, 10, seed=0, **options)
    assert caught.value.field == field
