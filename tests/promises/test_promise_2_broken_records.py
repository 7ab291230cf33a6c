"""Guarantee 2 of docs/privacy.md: a broken record does not change the bits of any other record."""

from __future__ import annotations

import hostile_models
import layer_cases
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noisewise.training import FunctionalGradients, IsolatedGradients, ParameterLayout
from noisewise.training.engine import (
    FastGradients,
    cleared_rows,
    fast_gradients,
    network,
    shared_values,
)
from noisewise.training.synthetic_records import random_parameters

CLIP = 1.0
NAMES = [
    *(f"hostile: {name}" for name in hostile_models.MODELS),
    *(f"layer: {name}" for name in layer_cases.MODELS),
]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss_of_good_records(outputs: Tensor, targets: Tensor) -> Tensor:
    """NaN for a negative target."""
    share = torch.where(targets < 0, torch.nan, 1.0)
    return (cross_entropy(outputs, targets.abs(), reduction="none") * share).mean()


def made(name: str) -> tuple[nn.Module, Tensor]:
    """A model and 3 inputs."""
    generator = torch.Generator().manual_seed(7)
    kind, _, key = name.partition(": ")
    if kind == "hostile":
        model, form = hostile_models.made(key)
        shape, vocabulary = (
            form.inputs[0].shape,
            0 if form.inputs[0].dtype.is_floating_point else 50,
        )
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            build, shape, vocabulary = layer_cases.MODELS[key]
            model = build()
    if vocabulary:
        return model, torch.randint(vocabulary, (3, *shape), generator=generator)
    return model, torch.randn(3, *shape, generator=generator)


def check_among_broken(model: nn.Module, inputs: Tensor) -> None:
    """A record among broken ones gives the bits that it gives alone."""
    engine = IsolatedGradients(model, loss_of_good_records)
    theta = random_parameters(ParameterLayout.of(model), torch.zeros(1), 3)
    targets = torch.tensor([3, 0, 2])
    for record in range(3):
        rows = slice(record, record + 1)
        alone = engine.clipped_sum(theta, inputs[rows], targets[rows], CLIP)
        assert bool(torch.isfinite(alone).all())
        assert bool(alone.any())
        for place in (0, 2):
            broken, wrong = inputs[rows].expand_as(inputs).clone(), torch.full((3,), -1)
            if inputs.is_floating_point():
                broken[:] = torch.nan
            broken[place], wrong[place] = inputs[record], targets[record]
            total = engine.clipped_sum(theta, broken, wrong, CLIP)
            assert torch.equal(total, alone), f"record {record} at place {place}"


@pytest.mark.parametrize("name", NAMES)
def test_broken_records_do_not_change_the_bits_of_another(name: str) -> None:
    check_among_broken(*made(name))


def test_the_test_sees_another_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted flaw: zeros in a copy whose strides may differ."""

    def copied(values: Tensor, rows: Tensor) -> Tensor:
        return values.index_fill(0, rows, 0)

    monkeypatch.setattr(network, "without_rows", copied)
    monkeypatch.setattr(fast_gradients, "without_rows", copied)
    for name in ("own lstm cell", "own gru cell"):
        with pytest.raises(AssertionError, match="record"):
            check_among_broken(*made(f"hostile: {name}"))


LAYOUTS = {
    "contiguous": torch.rand(4, 3),
    "columns of a wider tensor": torch.rand(4, 9)[:, 3:6],
    "transposed": torch.rand(3, 4).t(),
    "channels last": torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": torch.rand(4, 1, 3).expand(4, 5, 3),
    "whole numbers": torch.randint(1, 9, (4, 6))[:, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_zeroed_in_the_same_layout(name: str) -> None:
    values = LAYOUTS[name]
    before = values.clone()
    result = cleared_rows.without_rows(values, torch.tensor([1, 3]))
    assert result.stride() == values.stride()
    assert result.storage_offset() == values.storage_offset()
    assert torch.equal(result, before.index_fill(0, torch.tensor([1, 3]), 0))
    assert torch.equal(values, before)


def test_rows_of_one_value_for_all_records() -> None:
    same = torch.rand(1, 3).expand(4, 3)
    assert cleared_rows.without_rows(same, torch.tensor([1])) is same
    infinite = torch.full((1, 3), torch.inf).expand(4, 3)
    rows = torch.arange(4)
    assert not bool(cleared_rows.without_rows(infinite, rows).any())


class LogitScale(nn.Module):
    """Scores times the exponential of a parameter, as in CLIP."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(5, 4), nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale.exp()


class ScaledTable(nn.Module):
    """A layer on an input without records, then a value that overflows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(4, 5), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale.exp() + self.fc(self.table(torch.arange(4)).exp()).mean(0)


ENGINES = (FastGradients, FunctionalGradients, IsolatedGradients)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [LogitScale, ScaledTable])
def test_records_of_a_shared_value_that_overflows_count_as_0(
    kind: type[nn.Module], engine: type
) -> None:
    model = kind(89.0)
    theta = ParameterLayout.of(model).flatten(model)
    records = torch.rand(6, 5), torch.arange(6) % 4
    total = engine(model, cross_entropy).clipped_sum(theta, *records, CLIP)
    assert torch.equal(total, torch.zeros_like(total))


def test_the_test_sees_zeros_times_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted flaw: the gradients at the parameters of broken records are not cleared."""
    monkeypatch.setattr(shared_values, "without_cleared", lambda values: values)
    with pytest.raises(AssertionError):
        test_records_of_a_shared_value_that_overflows_count_as_0(LogitScale, FastGradients)
