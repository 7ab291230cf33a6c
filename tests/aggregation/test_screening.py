"""Guarantee 8 of docs/privacy.md, in process: the server drops one bad update with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from noisewise.aggregation import (
    METHODS,
    Disclosure,
    Screened,
    ServerView,
    UpdateMatrix,
    make_method,
    screen_updates,
)
from noisewise.errors import UpdateError

P = 6
Screen = Callable[..., Screened]


def vector(*changes: tuple[int, float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.linspace(-1, 1, P, dtype=dtype)
    for place, value in changes:
        values[place] = value
    return values


BAD: dict[str, tuple[object, str]] = {
    "nan": (vector((2, float("nan"))), "1 NaN or infinite values"),
    "inf": (vector((0, float("inf")), (5, float("nan"))), "2 NaN or infinite values"),
    "minus inf": (vector((0, -float("inf"))), "NaN or infinite"),
    "too short": (torch.zeros(P - 1), r"shape \(5,\), expected \(6,\)"),
    "too long": (torch.zeros(P + 1), "shape"),
    "oversized": (torch.zeros(1).expand(10**12), "shape"),
    "empty": (torch.zeros(0), "shape"),
    "matrix": (torch.zeros(P, 1), "shape"),
    "scalar": (torch.tensor(1.0), "shape"),
    "float64": (vector(dtype=torch.float64), "dtype torch.float64, expected torch.float32"),
    "float16": (vector().half(), "dtype"),
    "integers": (torch.zeros(P, dtype=torch.int64), "dtype"),
    "complex": (torch.zeros(P, dtype=torch.complex64), "dtype"),
    "booleans": (torch.zeros(P, dtype=torch.bool), "dtype"),
    "none": (None, "NoneType, not a tensor"),
    "list": ([0.0] * P, "list, not a tensor"),
    "numpy": (np.zeros(P, np.float32), "ndarray, not a tensor"),
    "bytes": (b"\x00" * 4 * P, "bytes, not a tensor"),
    "sparse": (vector().to_sparse(), "dense"),
    "meta": (torch.zeros(P, device="meta"), "dense"),
}


def check_one_bad_update_is_dropped(screen: Screen, bad: object) -> str:
    """Screen a bad update between two good ones; return the reason why it was dropped."""
    received = {"b": vector(), "evil": bad, "a": 2 * vector()}
    screened = screen(received, size=P)
    assert screened.updates.ids == ("a", "b"), "the bad one stays"
    expected = torch.stack([2 * vector(), vector()], dim=1)
    assert torch.equal(screened.updates.values, expected)
    assert list(screened.dropped) == ["evil"]
    return screened.dropped["evil"]


@pytest.mark.parametrize("name", BAD)
def test_one_bad_update_is_dropped(name: str) -> None:
    bad, reason = BAD[name]
    found = check_one_bad_update_is_dropped(screen_updates, bad)
    assert re.search(reason, found), found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_dropped() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])
    assert "dense" in check_one_bad_update_is_dropped(screen_updates, nested)


def test_an_update_whose_energy_overflows_is_dropped() -> None:
    """Its values are finite, but its squared norm would be infinite."""
    good = vector(dtype=torch.float64)
    received = {"a": good, "evil": vector((0, 1e200), dtype=torch.float64)}
    screened = screen_updates(received, size=P, dtype=torch.float64)
    assert screened.updates.ids == ("a",)
    assert "too large" in screened.dropped["evil"]
    largest = torch.full((P,), torch.finfo(torch.float32).max)
    assert screen_updates({"a": vector(), "b": largest}, size=P).updates.ids == ("a", "b")


def lets_everything_in(received: Mapping[str, torch.Tensor], *, size: int) -> Screened:
    ids = sorted(received)
    return Screened(UpdateMatrix(torch.stack([received[k] for k in ids], dim=1), tuple(ids)), {})


def looks_at_shapes_only(received: Mapping[str, torch.Tensor], *, size: int) -> Screened:
    fitting = {k: v for k, v in received.items() if isinstance(v, torch.Tensor) and v.shape == (P,)}
    return lets_everything_in(fitting, size=size)


@pytest.mark.parametrize("screen", [lets_everything_in, looks_at_shapes_only])
def test_planted_screens_are_seen(screen: Screen) -> None:
    for name in ("nan", "inf", "minus inf"):
        with pytest.raises(AssertionError, match="the bad one stays"):
            check_one_bad_update_is_dropped(screen, BAD[name][0])


def test_all_bad_is_an_error_with_the_reasons() -> None:
    received = {"b": vector((0, float("nan"))), "a": torch.zeros(2), "c": None}
    with pytest.raises(UpdateError, match=r"a has shape .*; b has 1 NaN .*; c is a NoneType"):
        screen_updates(received, size=P)
    with pytest.raises(UpdateError, match="no client replied"):
        screen_updates({}, size=P)


def test_order_and_inputs() -> None:
    """The order of replies does not matter; updates are not changed and have no autograd graph."""
    one, two = {"b": vector(), "a": 2 * vector()}, {"a": 2 * vector(), "b": vector()}
    assert torch.equal(
        screen_updates(one, size=P).updates.values, screen_updates(two, size=P).updates.values
    )
    graph = nn.Parameter(vector()) * 2
    screened = screen_updates({"a": graph, "b": nn.Parameter(vector())}, size=P)
    assert not screened.updates.values.requires_grad
    screened.updates.values.zero_()
    assert torch.equal(graph.detach(), 2 * vector())


@pytest.mark.parametrize("name", METHODS)
def test_a_round_goes_on_after_screening(name: str) -> None:
    """From hostile replies to a new model: finite, with weights for the usable updates only."""
    generator = torch.Generator().manual_seed(0)
    received: dict[str, object] = {f"c{k}": torch.randn(50, generator=generator) for k in range(5)}
    received |= {"nan": torch.full((50,), float("nan")), "short": torch.zeros(3), "none": None}
    received["largest"] = torch.full((50,), torch.finfo(torch.float32).max)
    screened = screen_updates(received, size=50)  # type: ignore[arg-type]
    assert set(screened.dropped) == {"nan", "short", "none"}
    n = screened.updates.n_clients
    disclosed = {what: np.linspace(1, 2, n) for what in Disclosure}
    answer = make_method(name).aggregator.aggregate(ServerView(screened.updates, 1, disclosed), {})
    assert np.isfinite(answer.weights).all()
    assert answer.weights.sum() == pytest.approx(1.0)
    assert torch.isfinite(answer.delta).all()
