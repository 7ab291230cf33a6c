"""Records of several tensors, and models that return more than a tensor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradient_cases import CLASSES, clipped, theta_of
from torch import Tensor, nn
from torch.nn import functional

from noisewise.errors import InvalidValueError
from noisewise.privacy import LocalPlan, PrivacyBudget
from noisewise.randomness import SeededRandom
from noisewise.training import (
    FastGradients,
    FunctionalGradients,
    IsolatedGradients,
    ParameterLayout,
    TensorData,
    local_update,
)
from noisewise.training.bounded_scores import SCORE_UNITS, bounded_score
from noisewise.training.inputs import Inputs, call_arguments, output_of, select
from noisewise.training.score_sum import Answers
from noisewise.training.synthetic_records import RecordForm, TensorForm, synthetic_records
from noisewise.training.tasks import CLASSIFICATION


@dataclass
class Output:
    """Like the outputs of Hugging Face models."""

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class Reader(nn.Module):
    """Reads tokens with a mask; the form of its output is an argument."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 6), nn.Linear(6, CLASSES)
        self.returns = returns

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        weights = attention_mask[..., None].to(self.embed.weight.dtype)
        words = torch.tanh(self.embed(input_ids)) * weights
        logits = self.head(words.sum(1) / weights.sum(1))
        forms = {"tensor": logits, "tuple": (logits, words), "object": Output(logits)}
        return forms.get(self.returns, {"logits": logits})


def records(kind: str, n: int = 9) -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(17, (n, 5), generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (n, 1), generator=generator)).long()
    targets = torch.randint(CLASSES, (n,), generator=generator)
    if kind == "tuple":
        return (ids, mask), targets
    return {"attention_mask": mask, "input_ids": ids}, targets


def expected(model: nn.Module, theta: Tensor, inputs: Inputs, targets: Tensor, c: float) -> Tensor:
    model = copy.deepcopy(model)
    ParameterLayout.of(model).load(model, theta)
    rows = []
    for row in range(len(targets)):
        one = slice(row, row + 1)
        positional, named = call_arguments(select(inputs, one))
        loss = functional.cross_entropy(output_of(model(*positional, **named)), targets[one])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]).double())
    return clipped(torch.stack(rows), c)


@pytest.mark.parametrize("engine", [FastGradients, FunctionalGradients, IsolatedGradients])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("returns", ["tensor", "tuple", "object", "dict"])
def test_every_engine_takes_several_tensors(engine, kind: str, returns: str) -> None:
    torch.manual_seed(0)
    model = Reader(returns)
    inputs, targets = records(kind)
    theta = theta_of(model, torch.float32)
    made = engine(model, functional.cross_entropy)
    for c in (0.2, 100.0):
        total = made.clipped_sum(theta, inputs, targets, c)
        true = expected(model, theta, inputs, targets, c)
        assert float((total - true).norm() / true.norm()) < 2e-5
    if engine is FastGradients:
        assert made.fallback_reason is None
    empty = select(inputs, slice(0))
    assert not made.clipped_sum(theta, empty, targets[:0], 1.0).any()


def test_a_broken_record_of_several_tensors_counts_0() -> None:
    """Ids beyond the embedding in one record: exactly that record is left out."""
    model = Reader()
    inputs, targets = records("dict")
    theta = theta_of(model, torch.float32)
    engine = IsolatedGradients(model, functional.cross_entropy)
    rest = torch.tensor([row for row in range(9) if row != 4])
    without = engine.clipped_sum(theta, select(inputs, rest), targets[rest], 1.0)
    inputs["input_ids"][4, 0] = 17
    total = engine.clipped_sum(theta, inputs, targets, 1.0)
    assert torch.allclose(total, without, atol=1e-12)


def test_local_update_and_counts_take_several_tensors() -> None:
    model = Reader("object")
    data = TensorData(*records("dict"))
    theta = theta_of(model, torch.float32)
    plan = LocalPlan(0.5, 4, 2, 1.0, 1.2, 10, "pld", PrivacyBudget(1.0, 1e-5))
    rng = SeededRandom(0, 1, "client 1")
    update = local_update(model, theta, data, plan, 0.1, functional.cross_entropy, rng)
    assert bool(torch.isfinite(update.delta).all())
    outputs = output_of(model(**data.inputs))
    right = int((outputs.argmax(1) == data.targets).sum())
    assert (
        Answers(model).score_sum(theta, data, bounded_score(CLASSIFICATION)) == right * SCORE_UNITS
    )
    with pytest.raises(InvalidValueError, match="one tensor"):
        _ = data.tensor


def test_synthetic_records_stay_below_the_declared_limits() -> None:
    form = RecordForm(
        (TensorForm((5,), torch.int64, 11), TensorForm((5,), torch.int64)),
        TensorForm((3,), torch.float32),
        ("input_ids", "attention_mask"),
    )
    inputs, targets = synthetic_records(form, 50, Reader(), lambda *_: None, torch.device("cpu"))
    assert isinstance(inputs, dict)
    assert int(inputs["input_ids"].max()) == 10
    mask = inputs["attention_mask"]
    assert bool(mask[:, 0].all())
    assert not bool(mask[:, -1].all())
    assert targets.shape == (50, 3)
    assert float(targets.max()) < 1.0


class CodedTokens(nn.Module):
    """Reads tokens from a tensor of floats; subtracts the batch's mean if `mixes`."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.embed, self.head, self.mixes = nn.Embedding(8, 3), nn.Linear(3, CLASSES), mixes

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed(x[:, :2].long()).sum(1) + x[:, 2:]
        return self.head(words - words.detach().mean(0) if self.mixes else words)


@pytest.mark.parametrize("mixes", [False, True])
def test_the_probe_uses_valid_tokens_in_floats(mixes: bool) -> None:
    """`0.5 - x` would be a negative token; zeros only would hide the mean over the batch."""
    model = CodedTokens(mixes)
    inputs = torch.cat([torch.randint(8, (6, 2)).float(), torch.randn(6, 3)], 1)
    engine = FastGradients(model, functional.cross_entropy)
    engine.clipped_sum(theta_of(model, torch.float32), inputs, torch.zeros(6).long(), 1.0)
    assert (engine.fallback_reason is not None) == mixes


@pytest.mark.parametrize("result", [None, "text", (), {"loss": torch.zeros(1)}, ("a", 1)])
def test_another_output_is_refused(result: object) -> None:
    with pytest.raises(InvalidValueError, match="must be a tensor, a tuple"):
        output_of(result)


class Experts(nn.Module):
    """Two heads that are mixed by a gate with more outputs than there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(5, 12)
        self.gate = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.heads(x).view(-1, 6, 2)
        return (scores * self.gate(x).softmax(1)[..., None]).sum(1)


class Pixels(nn.Module):
    """Scores [classes, 2, 2] of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize(
    ("model", "shape", "places", "classes"),
    [(Experts(), (5,), (), 2), (Pixels(), (1, 2, 2), (2, 2), 3)],
    ids=["gate", "places"],
)
def test_synthetic_targets_have_the_range_of_the_models_outputs(
    model: nn.Module, shape: tuple[int, ...], places: tuple[int, ...], classes: int
) -> None:
    form = RecordForm.single(shape, torch.float32, places, torch.int64)

    def works(inputs: Any, targets: Tensor) -> None:  # with a few records only, as the engine does
        functional.cross_entropy(model(inputs[:1]), targets[:1])

    _, targets = synthetic_records(form, 200, model, works, torch.device("cpu"))
    assert set(targets.flatten().tolist()) == set(range(classes))
    engine = IsolatedGradients(model, functional.cross_entropy)
    theta = ParameterLayout.of(model).flatten(model)
    records = torch.rand(6, *shape), torch.zeros(6, *places, dtype=torch.int64)
    total = engine.clipped_sum(theta, *records, 1.0)
    assert bool(total.any())
