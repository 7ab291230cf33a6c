"""Encoders that are random, keep state, mix records or fail: one line before any record is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.errors import InvalidValueError
from noisewise.training.features import make_features

SHAPE = (1, 8, 8)


class Applies(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Remembers(nn.Module):
    """An encoder whose output depends on the number of records before."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.flatten(1) * self.count


class Learns(nn.Module):
    """An encoder with a tensor that follows the records, too little to show in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("total").add_(x.sum())
        return x.flatten(1) + 1e-12 * self.get_buffer("total")


def batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True).flatten(1)


ENCODERS: dict[str, Any] = {
    "dropout": lambda: Applies(lambda x: functional.dropout(x.flatten(1), training=True)),
    "rare dropout": lambda: Applies(lambda x: functional.dropout(x.flatten(1), 1e-6, True)),
    "memory": Remembers,
    "learns": Learns,
    "batch norm": lambda: Applies(batch_norm),
    "no statistics": lambda: nn.Sequential(
        nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten()
    ),
    "wrong axis": lambda: nn.Sequential(nn.Flatten(), nn.Softmax(dim=0)),
    "one number": lambda: Applies(lambda x: x.sum()),
    "random": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)),
    "lazy": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)),
    "nan": lambda: Applies(lambda x: x.flatten(1) * math.nan),
    "tuple": lambda: Applies(lambda x: (x,)),
    "shape": lambda: Applies(lambda x: x @ torch.zeros(7, 2)),
    "widths": lambda: Applies(lambda x: x.flatten(1)[:, : 3 + int(10 * x.flatten()[0])]),
    "nothing": lambda: Applies(lambda x: x.flatten(1)[:, :0]),
    "complex": lambda: Applies(lambda x: x.flatten(1).to(torch.complex64)),
    "meta": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5, device="meta")),
    "other": lambda: 3,
}


def encoder(input_shape: tuple[int, ...], kind: str) -> Any:
    return ENCODERS[kind]()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dropout", "same features in every call"),
        ("rare dropout", "same features in every call"),
        ("memory", "same features in every call"),
        ("learns", "must not change its own tensors"),
        ("batch norm", "must map each record independently"),
        ("no statistics", "must map each record independently"),
        ("wrong axis", "must map each record independently"),
        ("one number", r"must map \[b, ...\] to \[b, d\], not to \[\]"),
        ("random", "must return the same module in every call"),
        ("lazy", "replace lazy layers"),
        ("nan", "finite features"),
        ("tuple", r"must take records of shape \(1, 8, 8\)"),
        ("shape", r"must take records of shape \(1, 8, 8\)"),
        ("widths", "must return vectors of one length"),
        ("nothing", "must return vectors of one length"),
        ("complex", "its output has complex numbers"),
        ("meta", "must have values in all of its parameters"),
        ("other", "must return a torch module, not int"),
    ],
)
@pytest.mark.parametrize("normalise", ["unit", "none"])
def test_a_bad_encoder_is_one_line(kind: str, words: str, normalise: Any) -> None:
    with pytest.raises(InvalidValueError, match=rf"features\.name = .*{words}") as caught:
        make_features(f"{__name__}:encoder", SHAPE, options={"kind": kind}, normalise=normalise)
    assert "\n" not in str(caught.value)


def normalised(input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)).train()


def test_an_encoder_may_have_batch_norm_in_evaluation_mode() -> None:
    """Its counter of batches is a tensor without axes."""
    features = make_features(f"{__name__}:normalised", SHAPE)
    assert features.width == 64
    assert not features.module.training


def single(input_shape: tuple[int, ...]) -> nn.Module:
    return Applies(lambda x: x.reshape(64))


def test_an_encoder_may_take_one_record_at_a_time() -> None:
    assert make_features(f"{__name__}:single", SHAPE).width == 64


def test_the_random_state_of_torch_stays_as_it_is() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_features("scattering", SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_torchscript_is_an_encoder_whose_code_counts() -> None:
    found = []
    for limit in (2.0, 3.0, 2.0):
        script = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Hardtanh(-limit, limit)))
        found.append(make_features(script, SHAPE).identity)
    assert found[0] == found[2] != found[1]
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    assert make_features(torch.jit.script(linear), SHAPE).width == 5


@pytest.mark.parametrize("shape", [{"a": (3,), "b": (2,)}, (3, 0), (2.5,), ("a",)])
def test_a_record_is_one_array_of_a_whole_shape(shape: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^input_shape = "):
        make_features("identity", shape)
