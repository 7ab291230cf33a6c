"""`explain_model`, own layer rules, and the models that are refused."""

from __future__ import annotations

import pytest
import torch
from gradient_cases import CLASSES, clipped, single_gradients, theta_of
from layer_cases import Encoder
from torch import Tensor, nn
from torch.nn import functional

import noisewise as nw
from noisewise.errors import InvalidValueError, UnsupportedModelError
from noisewise.training import FastGradients, IsolatedGradients
from noisewise.training.engine.layer_interface import LayerRule, Run, row_gradients
from noisewise.training.engine.layer_rules import LAYER_RULES


def test_every_path_is_named() -> None:
    model = nn.Sequential(Encoder(), nn.Linear(CLASSES, CLASSES), nn.LSTM(CLASSES, 3, proj_size=2))
    model[1].requires_grad_(False)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, tokens: Tensor) -> Tensor:
            encoder, linear, cells = self.parts
            return cells(linear(encoder(tokens))[None])[0][0]

    explained = nw.explain_model(Whole(), torch.randint(11, (5, 6)))
    paths = {row.name: row.path for row in explained.rows}
    assert paths["parts.0"] == "shared value"
    assert paths["parts.0.encoder.layers.0.self_attn"] == "rule"
    assert paths["parts.1"] == "frozen"
    assert paths["parts.2"] == "reference layer"
    assert explained.reason == ""
    assert explained.ratio > 0
    costs = {row.name: row.cost for row in explained.rows}
    assert costs["parts.0.encoder.layers.0.self_attn"] > 0
    assert costs["parts.0"] > 0
    assert "register_layer_rule" in str(explained)
    assert str(explained).count("\n") == len(explained.rows) + 2


def test_a_model_that_mixes_records_is_explained() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = nn.Sequential(nn.Linear(5, 5), Mixes(5, CLASSES))
    explained = nw.explain_model(model, torch.randn(4, 5))
    assert {row.path for row in explained.rows} == {"reference engine"}
    assert explained.reason
    assert explained.reason in str(explained)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.expit(x) * self.weight


class ScaleRule(LayerRule):
    factor = 1.0

    def __init__(self, module, values, options) -> None:
        self.weight = values["weight"]

    def run(self, x: Tensor) -> Run:
        return Run(x, torch.special.expit(x) * self.weight.tensor, self.gradients)

    def gradients(self, kept: Tensor, g: Tensor):
        yield from row_gradients(self.weight, lambda: self.factor * torch.special.expit(kept) * g)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_own_rule_is_used_and_a_planted_flaw_shows(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScaleRule, "factor", factor)
    model = nn.Sequential(nn.Linear(5, CLASSES), Scale())
    theta = theta_of(model, torch.float32)
    inputs, targets = torch.randn(6, 5), torch.randint(CLASSES, (6,))
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    try:
        nw.register_layer_rule(Scale, ScaleRule)
        engine = FastGradients(model, functional.cross_entropy)
        total = engine.clipped_sum(theta, inputs, targets, 0.1)
    finally:
        LAYER_RULES.pop(Scale)
    assert engine.network is not None
    assert engine.network.without_rule == []
    assert torch.allclose(total, clipped(gradients, 0.1), atol=1e-6) == (factor == 1.0)


@pytest.mark.parametrize(("kind", "rule"), [(int, ScaleRule), (Scale, Scale), ("Scale", ScaleRule)])
def test_a_wrong_rule_is_refused(kind, rule) -> None:
    with pytest.raises(InvalidValueError, match="must be a subclass of"):
        nw.register_layer_rule(kind, rule)


def with_norm(training: bool, frozen: bool, **options: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, **options), nn.Linear(6, CLASSES))
    model[1].requires_grad_(not frozen)
    model[1].train(training)
    if model[1].running_mean is not None:
        model[1].running_mean.normal_()
    return model


def test_frozen_batch_norm_in_evaluation_mode_trains() -> None:
    model = with_norm(training=False, frozen=True)
    theta = theta_of(model, torch.float32)
    inputs, targets = torch.randn(6, 5), torch.randint(CLASSES, (6,))
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    for kind in (FastGradients, IsolatedGradients):
        total = kind(model, functional.cross_entropy).clipped_sum(theta, inputs, targets, 0.1)
        assert torch.allclose(total, clipped(gradients, 0.1), atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        with_norm(training=False, frozen=False),
        with_norm(training=True, frozen=True),
        with_norm(training=False, frozen=True, track_running_stats=False),
    ],
)
def test_other_batch_norm_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer '1' is BatchNorm1d.*GroupNorm"):
        FastGradients(model, functional.cross_entropy)


def test_compiled_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(5, CLASSES))
    for compiled in (torch.compile(model), nn.Sequential(torch.compile(model))):
        with pytest.raises(UnsupportedModelError, match="compiled"):
            FastGradients(compiled, functional.cross_entropy)


@pytest.mark.parametrize("kind", [FastGradients, IsolatedGradients])
def test_autocast_is_refused(kind) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    theta = theta_of(model, torch.float32)
    engine = kind(model, functional.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError):
        engine.clipped_sum(theta, torch.randn(2, 5), torch.zeros(2).long(), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    inputs, targets = torch.randn(6, 5), torch.randint(CLASSES, (6,))
    theta = theta_of(model, torch.float32)
    exact = FastGradients(model, functional.cross_entropy).clipped_sum(theta, inputs, targets, 0.1)
    engine = FastGradients(model.to(dtype), functional.cross_entropy)
    total = engine.clipped_sum(theta.to(dtype), inputs.to(dtype), targets, 0.1)
    assert float((total - exact).norm() / exact.norm()) < 0.05
    assert float(total.norm()) <= 6 * 0.1 * (1 + 1e-6)


LINEAR, WORDS = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
BAD_SAMPLES = {
    "shape": (LINEAR, torch.rand(3, 5), "must take inputs of float32(3, 5)"),
    "one record": (LINEAR, torch.rand(4), "must take inputs of float32(1,)"),
    "ids": (WORDS, torch.full((3, 2), 9), "inputs are in 9..9, embeddings have [5] rows"),
    "none": (LINEAR, None, "sample = 'NoneType': must be a tensor"),
    "list": (LINEAR, [1, 2], "sample = 'list': must be a tensor"),
    "empty": (LINEAR, torch.rand(0, 4), "at least one record"),
    "no tensor": (LINEAR, {}, "at least one tensor"),
    "nested": (LINEAR, {"a": {"b": torch.rand(2, 4)}}, "sample['a'] = 'dict': must be a tensor"),
    "records": (LINEAR, (torch.rand(3, 4), torch.rand(2, 4)), "must be 3, as in the first"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_sample_that_does_not_fit_is_one_line(name: str) -> None:
    model, sample, said = BAD_SAMPLES[name]
    with pytest.raises(InvalidValueError) as caught:
        nw.explain_model(model, sample)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nested_inputs_of_an_engine_are_one_line() -> None:
    model = nn.Linear(4, 3)
    nested = {"a": {"b": torch.rand(2, 4)}}
    with pytest.raises(InvalidValueError, match="flatten nested inputs"):
        FastGradients(model, functional.cross_entropy).clipped_sum(
            theta_of(model, torch.float32), nested, torch.zeros(2, dtype=torch.int64), 1.0
        )
