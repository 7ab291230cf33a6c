"""Models that run twice, write to their parameters or replace a layer's forward, and odd losses."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from gradient_cases import CLASSES, clipped
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from noisewise.federation.evaluation import Evaluator
from noisewise.training.bounded_scores import bounded_score
from noisewise.training.engine import FastGradients, make_engine
from noisewise.training.gradients import Loss
from noisewise.training.inputs import Inputs, call_arguments, select
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout
from noisewise.training.score_sum import Answers
from noisewise.training.tasks import TASKS

LENGTH, TOKENS = 6, 11


class Checkpointed(nn.Module):
    """A method with a layer and a parameter, which runs again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)
        self.scale, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, CLASSES)
        self.use_reentrant = use_reentrant

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(checkpoint(self._part, x, use_reentrant=self.use_reentrant))


class OwnSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class CheckpointedSigns(nn.Module):
    """Only torch.func can differentiate it; its own part runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6))

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, OwnSign.apply(self.weight))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._part, x, use_reentrant=False)


class Renormalised(nn.Module):
    """The embedding cuts the rows that it reads; the output layer uses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 5, max_norm=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.embed(tokens).mean(1), self.embed.weight)[:, :CLASSES]


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor, n_tokens: Tensor) -> Tensor:
        x = torch.cumsum(self.embed(tokens), 1)
        return self.head(x.gather(1, (n_tokens - 1)[:, None, None].expand(-1, 1, 5))[:, 0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 5), nn.Linear(4, CLASSES)
        self.recurrent = nn.GRU(5, 4, batch_first=True)

    def forward(self, tokens: Tensor, n_tokens: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), n_tokens, batch_first=True, enforce_sorted=False
        )
        return self.head(self.recurrent(packed)[1][0])


def constant_bias() -> nn.Module:
    """The first layer's own forward gives its bias no gradient, which no output shows."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias.detach())

    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    model[0].forward = types.MethodType(forward, model[0])
    return model


def sparse() -> nn.Module:
    table = nn.Embedding(TOKENS, 3, sparse=True)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(3 * LENGTH, CLASSES))


def numbers(n: int) -> Inputs:
    return torch.randn(n, 5)


def tokens(n: int) -> Inputs:
    return torch.randint(0, TOKENS, (n, LENGTH))


def sequences(n: int) -> Inputs:
    lengths = torch.randint(1, LENGTH + 1, (n,))
    return {"tokens": torch.randint(0, TOKENS, (n, LENGTH)), "n_tokens": lengths}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), numbers),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), numbers),
    "checkpoint in a reference layer": (
        lambda: nn.Sequential(nn.Linear(5, 5), CheckpointedSigns(), nn.Linear(6, CLASSES)),
        numbers,
    ),
    "max_norm": (Renormalised, tokens),
    "sparse embedding": (sparse, tokens),
    "own forward": (constant_bias, numbers),
    "last step": (LastStep, sequences),
    "packed": (Packed, sequences),
}


def loop(model: nn.Module, theta: Tensor, inputs: Inputs, targets: Tensor, loss: Loss) -> Tensor:
    """Gradients [b, p] from one backward pass for each record; 0 where they are not finite."""
    layout, rows = ParameterLayout.of(model), []
    before = layout.flatten(model)
    for row in range(len(targets)):
        layout.load(model, theta)
        model.zero_grad()
        positional, named = call_arguments(select(inputs, slice(row, row + 1)))
        loss(model(*positional, **named), targets[row : row + 1]).backward()
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in model.parameters()
        ]
        rows.append(torch.cat([part.flatten().double() for part in parts]))
    layout.load(model, before)
    model.zero_grad()
    gradients = torch.stack(rows)
    return torch.where(gradients.isfinite().all(1, keepdim=True), gradients, 0.0)


def check(model: nn.Module, inputs: Inputs, targets: Tensor, loss: Loss, *, isolate: bool) -> None:
    """Compare at parameters that are not those of the model, which must not be read."""
    own = ParameterLayout.of(model).flatten(model)
    theta = own + 0.3 * torch.randn_like(own)
    gradients = loop(model, theta, inputs, targets, loss)
    clip_norm, before = float(gradients.norm(dim=1).median()), theta.clone()
    engine = make_engine(model, loss) if isolate else FastGradients(model, loss)
    expected = clipped(gradients, clip_norm)
    for _ in range(2):
        total = engine.clipped_sum(theta, inputs, targets, clip_norm)
        assert float((total - expected).norm()) < 1e-5 * float(expected.norm())
    assert torch.equal(theta, before)
    assert torch.equal(ParameterLayout.of(model).flatten(model), own)


@pytest.mark.parametrize("isolate", [False, True], ids=["simulator", "site"])
@pytest.mark.parametrize("name", MODELS)
def test_odd_models_agree_with_the_loop(name: str, isolate: bool) -> None:
    torch.manual_seed(0)
    make, records = MODELS[name]
    model, inputs, targets = make(), records(7), torch.randint(0, CLASSES, (7,))
    check(model, inputs, targets, functional.cross_entropy, isolate=isolate)


@pytest.mark.parametrize("isolate", [False, True], ids=["simulator", "site"])
@pytest.mark.parametrize("hidden", [0, 6])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 2.0, 3.0])),
    ],
    ids=["ignored class", "class of weight 0"],
)
def test_records_that_a_loss_leaves_out_contribute_nothing(
    loss: Loss, hidden: int, isolate: bool
) -> None:
    """Their own loss is 0 / 0; the closed form of cross-entropy would count them."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, hidden), nn.Tanh()] if hidden else []
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden or 5, CLASSES))
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    check(model, numbers(6), targets, loss, isolate=isolate)


class Counting(nn.Module):
    """Its outputs depend on the number of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (-1) ** self.calls


@pytest.mark.parametrize(("make", "records"), [(Counting, numbers), (Renormalised, tokens)])
def test_what_a_model_writes_changes_no_score_of_another_record(
    make: Callable[[], nn.Module], records: Callable[[int], Tensor]
) -> None:
    torch.manual_seed(0)
    model = make()
    theta = 3 * ParameterLayout.of(model).flatten(model)
    before = theta.clone()
    inputs, targets = records(20), torch.randint(0, CLASSES, (20,))
    answers, score = Answers(model), bounded_score(TASKS["classification"])

    def total(rows: slice) -> int:
        return answers.score_sum(theta, TensorData(inputs[rows], targets[rows]), score)

    alone = [total(slice(row, row + 1)) for row in range(20)]
    assert 0 < sum(alone) == total(slice(20))
    assert torch.equal(theta, before)


def test_an_evaluation_does_not_change_the_parameters() -> None:
    torch.manual_seed(0)
    model = Renormalised()
    own = ParameterLayout.of(model).flatten(model)
    theta = 3 * own
    before = theta.clone()
    data = TensorData(tokens(20), torch.randint(0, CLASSES, (20,)))
    Evaluator(model, functional.cross_entropy, TASKS["classification"].metrics, 10)(
        theta, (data, data)
    )
    assert torch.equal(theta, before)
    assert torch.equal(ParameterLayout.of(model).flatten(model), own)


class Viewed(nn.Module):
    """Large images are convolved in a layout that `view` cannot flatten, small ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(torch.relu(self.layer(x))).view(len(x), -1))


def test_records_of_another_form_get_a_copy_of_the_model_that_runs_them() -> None:
    torch.manual_seed(0)
    model, targets = Viewed(), torch.randint(0, CLASSES, (6,))
    theta = ParameterLayout.of(model).flatten(model)
    engine = FastGradients(model, functional.cross_entropy)
    with pytest.raises(RuntimeError, match="2 channels"):
        engine.clipped_sum(theta, torch.randn(6, 2, 4, 4), targets, 1.0)
    for size in (4, 12, 12, 4):
        inputs = torch.randn(6, 3, size, size)
        gradients = loop(model, theta, inputs, targets, functional.cross_entropy)
        expected = clipped(gradients, 1.0)
        total = engine.clipped_sum(theta, inputs, targets, 1.0)
        assert float((total - expected).norm()) < 1e-5 * float(expected.norm())
        with pytest.raises(RuntimeError, match="2 channels"):
            engine.clipped_sum(theta, torch.randn(6, 2, size, size), targets, 1.0)
    assert engine.fallback_reason is None
