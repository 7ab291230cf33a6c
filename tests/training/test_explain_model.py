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
from noisewise.training.engine import fast_gradients, pieces
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


class LongNorms(pieces.Rows):
    """A planted flaw that shows in no sum."""

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        return 4.0 * super().squared_norms(floor)


class WrongNorms(ScaleRule):
    def gradients(self, kept: Tensor, g: Tensor):
        assert self.weight.index is not None
        rows = (torch.special.expit(kept) * g).flatten(1)
        yield LongNorms(self.weight.index, rows)


class Absent(ScaleRule):
    def gradients(self, kept: Tensor, g: Tensor):
        yield from ()


class Failing(ScaleRule):
    def gradients(self, kept: Tensor, g: Tensor):
        raise KeyError("weight")


class Detached(ScaleRule):
    """Correct gradients of its own, none for the layers before it."""

    def run(self, x: Tensor) -> Run:
        out = torch.special.expit(x.detach()) * self.weight.tensor
        return Run(x, out, self.gradients)


class Half(ScaleRule):
    factor = 0.5


class OtherShape(ScaleRule):
    def gradients(self, kept: Tensor, g: Tensor):
        assert self.weight.index is not None
        yield pieces.Rows(self.weight.index, kept[:, :1] * g[:, :1])


FLAWS = [WrongNorms, Absent, Failing, Detached, Half, OtherShape]


@pytest.mark.parametrize("rule", [ScaleRule, *FLAWS])
@pytest.mark.parametrize("kind", [FastGradients, IsolatedGradients])
def test_an_own_rule_is_used_unless_its_gradients_are_wrong(kind, rule, monkeypatch) -> None:
    monkeypatch.setitem(LAYER_RULES, Scale, rule)
    model = nn.Sequential(nn.Linear(5, CLASSES), Scale())
    for theta in (theta_of(model, torch.float32), torch.zeros(5 * CLASSES + 2 * CLASSES)):
        inputs, targets = torch.randn(6, 5), torch.randint(CLASSES, (6,))
        gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
        engine = kind(model, functional.cross_entropy)
        total = engine.clipped_sum(theta, inputs, targets, 0.1)
        assert torch.allclose(total, clipped(gradients, 0.1), atol=1e-6)
        if kind is FastGradients:
            assert engine.fallback_reason is None
            assert engine.by_reference == (() if rule is ScaleRule else ("1",))


@pytest.mark.parametrize("rule", [WrongNorms, Half])
def test_without_the_check_own_rules_would_be_wrong(rule, monkeypatch) -> None:
    monkeypatch.setitem(LAYER_RULES, Scale, rule)
    monkeypatch.setattr(fast_gradients, "check_own_rules", lambda *_: None)
    model = nn.Sequential(nn.Linear(5, CLASSES), Scale())
    theta = theta_of(model, torch.float32)
    inputs, targets = torch.randn(6, 5), torch.randint(CLASSES, (6,))
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    total = FastGradients(model, functional.cross_entropy).clipped_sum(theta, inputs, targets, 0.1)
    assert not torch.allclose(total, clipped(gradients, 0.1), atol=1e-6)


def test_a_registered_rule_is_used(monkeypatch) -> None:
    nw.register_layer_rule(Scale, ScaleRule)  # the fixture `same_layer_rules` takes it back
    model = nn.Sequential(nn.Linear(5, CLASSES), Scale())
    engine = FastGradients(model, functional.cross_entropy)
    engine.clipped_sum(theta_of(model, torch.float32), torch.randn(6, 5), torch.zeros(6).long(), 1)
    assert engine.network is not None
    assert engine.network.own_rules == ["1"]
    assert engine.network.without_rule == []


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
