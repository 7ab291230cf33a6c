"""The fast engine compared with one ordinary backward pass for each record, rule by rule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradient_cases import CASES, CLASSES, Case, clipped, single_gradients, theta_of
from loop_agreement import compare, disagreement
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine import FastGradients, cost_model, fast_gradients, make_engine
from noisewise.training.engine.layer_rules import LAYER_RULES, RULES_BY_NAME
from noisewise.training.gradients import FunctionalGradients
from noisewise.training.models import make_model


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rule_agrees_with_the_loop(case: Case, dtype: torch.dtype) -> None:
    compare(case, dtype)


def test_every_rule_has_a_case() -> None:
    """A new rule must be compared with the loop: this fails until `CASES` has a model with it."""
    compared = {type(module) for case in CASES for module in case.build().modules()}
    assert set(LAYER_RULES) <= compared
    assert set(RULES_BY_NAME) <= {f"{kind.__module__}.{kind.__name__}" for kind in compared}


@pytest.mark.parametrize("ghost", [True, False], ids=["ghost", "materialised"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_ways_agree_with_the_loop(
    case: Case, ghost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the cost model would have picked."""
    from noisewise.training.engine import convolution, pieces, volume_convolution

    def always(records: int, positions: int, inputs: int, outputs: int) -> bool:
        return ghost

    for module in (convolution, pieces, volume_convolution, cost_model):
        monkeypatch.setattr(module, "prefer_ghost", always)
    compare(case, torch.float64, n=3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_batch_in_portions_agrees_with_the_loop(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add_rows = FastGradients.add_rows

    def counted(
        self: FastGradients, theta: Tensor, inputs: Tensor, targets: Tensor, *rest: Any
    ) -> None:
        sizes.append(len(targets))
        add_rows(self, theta, inputs, targets, *rest)

    monkeypatch.setattr(FastGradients, "add_rows", counted)
    monkeypatch.setattr(fast_gradients, "_VALUES_AT_ONCE", 1)
    monkeypatch.setattr(fast_gradients, "_FEWEST_AT_ONCE", 3)
    compare(case, torch.float64, n=7)
    assert set(sizes) <= {1, 3}  # 7 = 3 + 3 + 1


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    parts = (nn.Embedding(2000, 128), nn.TransformerEncoder(layer, 4), nn.Flatten())
    return nn.Sequential(*parts, nn.Linear(64 * 128, 10))


def test_portions_bound_the_memory_of_large_models_only() -> None:
    """32 records of a transformer, whose gradients are large; whole batches of the paper's CNN."""
    sizes = {}
    for name, model, inputs in (
        ("cnn", make_model("cnn", (1, 28, 28), 10, seed=0), torch.rand(2, 1, 28, 28)),
        ("wide", make_model("mlp", (64, 1024), 10, seed=0, hidden=512), torch.rand(2, 64, 1024)),
        ("encoder", transformer(), torch.randint(0, 2000, (2, 64))),
    ):
        engine = FastGradients(model, functional.cross_entropy)
        engine.clipped_sum(theta_of(model, torch.float32), inputs, torch.zeros(2).long(), 1.0)
        sizes[name] = engine.records_at_once(inputs)
    assert sizes["cnn"] >= 256
    assert sizes["wide"] >= 128  # the gradients of a matrix used once are never formed
    assert 32 <= sizes["encoder"] <= 48


@pytest.mark.parametrize("n", [1, 2, 23])
def test_any_number_of_records(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "_CHUNK_BYTES", 4000)  # several chunks of records
    by_name = {case.name: case for case in CASES}
    for name in ("conv 3x3", "conv 3x3 of few channels", "conv stride of many channels", "mlp"):
        compare(by_name[name], torch.float64, n=n)


def test_resnet18() -> None:
    model = make_model("resnet18", (3, 16, 16), CLASSES, seed=0, groups=8)
    theta = theta_of(model, torch.float64)
    inputs = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    targets = torch.tensor([0, 3])
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    engine = FastGradients(model, functional.cross_entropy)
    total = engine.clipped_sum(theta, inputs, targets, 0.5 * float(gradients.norm(dim=1).min()))
    expected = clipped(gradients, 0.5 * float(gradients.norm(dim=1).min()))
    assert disagreement(total, expected) < 1e-9
    single = engine.clipped_sum(theta.float(), inputs.float(), targets, 1.0)
    assert disagreement(single, clipped(gradients, 1.0)) < 1e-5
    assert engine.fallback_reason is None


def half_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum, not a mean: only right if it is applied to each record alone."""
    return 0.5 * (outputs - functional.one_hot(targets, CLASSES)).square().sum()


def squared_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not even additive over records."""
    return functional.cross_entropy(outputs, targets).square() + outputs.mean() ** 2


LOSSES = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    nn.CrossEntropyLoss(reduction="sum"),
    nn.MultiMarginLoss(),
    half_of_squares,
    squared_sum,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "__name__", str(loss)))
def test_any_loss_applies_to_each_record_alone(loss) -> None:
    by_name = {case.name: case for case in CASES}
    compare(by_name["mlp"], torch.float64, loss=loss)


def test_outputs_and_targets_with_more_dimensions() -> None:
    """Cross-entropy of [b, classes, T] averages over T within a record."""
    model = nn.Sequential(nn.Conv1d(2, CLASSES, 3, padding=1))
    theta = theta_of(model, torch.float64)
    inputs = torch.randn(5, 2, 6, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (5, 6))
    targets[0, :3] = -100  # ignored positions
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    engine = FastGradients(model, functional.cross_entropy)
    total = engine.clipped_sum(theta, inputs, targets, 0.1)
    assert disagreement(total, clipped(gradients, 0.1)) < 1e-9


def test_a_record_with_an_ignored_target_contributes_nothing() -> None:
    case = CASES[0]
    model = case.build()
    theta = theta_of(model, torch.float64)
    inputs, targets = case.records(4, torch.float64)
    engine = FastGradients(model, functional.cross_entropy)
    without = engine.clipped_sum(theta, inputs[1:], targets[1:], 1.0)
    targets[0] = -100
    assert torch.allclose(engine.clipped_sum(theta, inputs, targets, 1.0), without)


def test_agrees_with_the_reference_engine() -> None:
    model = make_model("cnn", (1, 12, 12), 10, seed=0)
    theta = theta_of(model, torch.float32)
    inputs, targets = torch.randn(9, 1, 12, 12), torch.randint(0, 10, (9,))
    fast = make_engine(model, functional.cross_entropy, isolate=False)
    reference = FunctionalGradients(model, functional.cross_entropy)
    for clip_norm in (None, 1.0, 100.0):
        one = fast.clipped_sum(theta, inputs, targets, clip_norm)
        other = reference.clipped_sum(theta, inputs, targets, clip_norm)
        assert disagreement(one, other) < 1e-5


def test_dtype_may_change_between_calls_and_sums_add_up() -> None:
    case = CASES[2]
    model = case.build()
    engine = FastGradients(model, functional.cross_entropy)
    inputs, targets = case.records(6, torch.float64)
    theta = theta_of(model, torch.float64)
    double = engine.clipped_sum(theta, inputs, targets, 1.0)
    single = engine.clipped_sum(theta.float(), inputs.float(), targets, 1.0)
    assert disagreement(single, double) < 1e-5
    total = torch.zeros_like(double)
    engine.add_clipped_sum(theta, inputs[:2], targets[:2], 1.0, total)
    engine.add_clipped_sum(theta, inputs[2:], targets[2:], 1.0, total)
    assert disagreement(total, double) < 1e-12


def test_later_parameters_are_used() -> None:
    """The engine keeps nothing of an earlier theta."""
    case = CASES[2]
    model = case.build()
    inputs, targets = case.records(5, torch.float64)
    engine = FastGradients(model, functional.cross_entropy)
    for seed in range(3):
        theta = torch.randn(
            engine.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
        total = engine.clipped_sum(theta, inputs, targets, 0.5)
        assert disagreement(total, clipped(gradients, 0.5)) < 1e-9


def test_model_and_arguments_are_left_alone() -> None:
    model = make_model("cnn", (1, 8, 8), 10, seed=0)
    before = copy.deepcopy(model.state_dict())
    hooks = [dict(vars(module)) for module in model.modules()]
    theta = torch.randn(FunctionalGradients(model, functional.cross_entropy).layout.size)
    inputs, targets = torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))
    copies = [t.clone() for t in (theta, inputs, targets)]
    state = torch.get_rng_state()
    make_engine(model, functional.cross_entropy, isolate=False).clipped_sum(
        theta, inputs, targets, 1.0
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip((theta, inputs, targets), copies, strict=True))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for module, attributes in zip(model.modules(), hooks, strict=True):
        assert vars(module).keys() == attributes.keys()


def test_dropout_draws_for_each_record() -> None:
    """Two equal records get different masks; without dropout they would agree."""
    model = nn.Sequential(nn.Linear(30, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES))
    theta = theta_of(model, torch.float64)
    inputs = torch.randn(1, 30, dtype=torch.float64).expand(2, 30)
    targets = torch.zeros(2, dtype=torch.int64)
    engine = FastGradients(model, functional.cross_entropy)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        both = engine.clipped_sum(theta, inputs, targets, None)
        torch.manual_seed(0)
        again = engine.clipped_sum(theta, inputs, targets, None)
        other = engine.clipped_sum(theta, inputs, targets, None)
    assert torch.equal(both, again)
    assert not torch.equal(both, other)
    assert engine.fallback_reason is None
