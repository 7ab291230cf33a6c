"""Bugs that only one rule can have, planted in it: the comparison with the loop rejects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_cases import CASES, Case
from loop_agreement import compare
from torch import Tensor

from noisewise.training.engine import (
    attention,
    fast_gradients,
    layer_rules,
    norm_rules,
    recurrent,
    shared_functions,
    shared_values,
    volume_convolution,
)
from noisewise.training.engine.network import Use
from noisewise.training.engine.pieces import Lookups, Parts, Piece, Rows

BY_NAME = {case.name: case for case in CASES}


def _last_position_dropped(self: Use, g: Tensor) -> Iterator[Piece]:
    if g.dim() > 2:
        g = g.clone()
        g.flatten(1, -2)[:, -1] = 0.0
    return self.gradients(*self.kept, g)


def _without_resets(function: Any, *arguments: Any) -> Any:
    found = function.apply(*arguments)
    return (*found[:2], torch.ones_like(found[2])) if function is recurrent._Gru else found


def _states_after(function: Any, *arguments: Any) -> Any:
    """The products of the recurrent weight with the states after each step."""
    found = list(function.apply(*arguments))
    found[2 if function is recurrent._Lstm else 1] = found[0].detach()
    return tuple(found)


def _first_gate_twice(weight: Any, a: Tensor, g: Tensor) -> Iterator[Piece]:
    width = a.shape[2]
    yield from _MATRIX(weight, a, torch.cat([g[..., :width], g[..., : g.shape[2] - width]], 2))


_MATRIX = recurrent._matrix


def _without(name: str) -> Callable[..., Iterator[Piece]]:
    def found(value: Any, rows: Callable[[], Tensor]) -> Iterator[Piece]:
        if value is not None and value.tensor.dim() == 1 and name == "bias":
            return
        if value is not None and value.index is not None:
            yield Rows(value.index, rows())

    return found


def _blocks_in_another_order(self: Any, factors: Tensor, parts: Parts) -> None:
    rows = torch.split(parts[self.indices[0]], self._sizes)
    for block, part in zip(self._blocks, reversed(rows), strict=True):
        if len(part) != block._a.shape[3] * block._g.shape[3]:
            part = parts[self.indices[0]][: block._a.shape[3] * block._g.shape[3]]
        block.add_sum(factors, [part])


def _flipped_kernel(*arguments: Any) -> Tensor:
    return _WINDOWS(*arguments).flip(3)


def _shifted_positions(*arguments: Any) -> Tensor:
    return _WINDOWS(*arguments).roll(1, 2)


_WINDOWS = volume_convolution._windows


def _sum_as_mean(self: Any, kept: Tensor, g: Tensor) -> Iterator[Piece]:
    yield Lookups(
        self._weight.index, kept, g[:, None].expand(*kept.shape, -1), len(self._weight.tensor)
    )


def _mean_over_positions(self: Any, values: Tensor) -> Tensor:
    size = values.shape[-len(self._shape) :].numel()
    return values.reshape(len(values), -1, size).mean(1)


def _not_normalised(
    self: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    return x if weight is None else _RMS(self, x, weight, bias)


_RMS = norm_rules.RmsNormRule._normalised


def _first_root_only(self: Any, gradients: Tensor) -> Iterator[Piece]:
    found = list(_ROOTS(self, gradients))
    return iter(found[:1])


_ROOTS = shared_values.Roots.pieces


def _graph_ignored(self: Any, gradients: Tensor) -> list[Tensor | None]:
    """The gradient at a function of a parameter taken for the gradient at the parameter."""
    return [
        gradients if root.tensor.shape == self.value.shape else gradient
        for root, gradient in zip(self.roots, _BACK(self, gradients), strict=True)
    ]


_BACK = shared_values.Roots._back


def _first_copy_only(*arguments: Any, **named: Any) -> Tensor:
    """A layer on several rows of a record: only the first row's gradient counts."""
    recorder, shared, dims, place = arguments
    out = _ONE(recorder, shared, dims, place)
    return out if place.factor == 1 else _OnlyFirst.apply(out, place.factor)  # type: ignore[no-any-return]


_ONE = shared_functions._one_for_each


class _OnlyFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        g = g.view(-1, ctx.factor, *g.shape[1:]).clone()
        g[:, 1:] = 0.0
        return g.flatten(0, 1), None


SINGLE: list[tuple[str, object, str, object]] = [
    *(
        (name, Use, "pieces", _last_position_dropped)
        for name in ("lstm", "gru", "rnn", "encoder", "cross-attention", "conv3d", "rms norm",
                     "transposed conv 1d", "transposed conv 2d", "transposed conv 3d", "positions",
                     "positions of batch 1", "time first", "own norm", "conv1d of hugging face")
    ),
    *(
        (name, module, "row_gradients", _without("bias"))
        for name, module in (("lstm", recurrent), ("gru", recurrent), ("rnn", recurrent),
                             ("encoder", attention), ("cross-attention", attention),
                             ("conv3d", volume_convolution), ("rms norm", norm_rules),
                             ("transposed conv 1d", volume_convolution),
                             ("conv1d of hugging face", layer_rules))
    ),
    ("gru", recurrent, "_apply", _without_resets),
    ("lstm", recurrent, "_apply", _states_after),
    ("lstm, two layers and directions", recurrent, "_apply", _states_after),
    ("gru", recurrent, "_apply", _states_after),
    ("rnn with relu", recurrent, "_apply", _states_after),
    ("lstm with given states", recurrent, "_matrix", _first_gate_twice),
    ("gru", recurrent, "_matrix", _first_gate_twice),
    ("cross-attention", attention._Stacked, "add_sum", _blocks_in_another_order),
    ("conv3d", volume_convolution, "_windows", _flipped_kernel),
    ("conv3d circular", volume_convolution, "_windows", _shifted_positions),
    ("transposed conv 1d", volume_convolution, "_windows", _flipped_kernel),
    ("transposed conv 2d", volume_convolution, "_windows", _shifted_positions),
    ("transposed conv 3d", volume_convolution, "_windows", _flipped_kernel),
    ("bag of mean", layer_rules._EmbeddingBag, "_gradients", _sum_as_mean),
    ("rms norm", norm_rules.RmsNormRule, "_over_positions", _mean_over_positions),
    ("rms norm", norm_rules.RmsNormRule, "_normalised", _not_normalised),
    ("encoder", norm_rules.LayerNormRule, "_over_positions", _mean_over_positions),
    ("conv1d of hugging face", layer_rules._InputFirstLinear, "_gradients",
     layer_rules._Linear._gradients),
    ("own parameters", fast_gradients, "combined", lambda found: found),
    ("weight norm", shared_values.Roots, "pieces", _first_root_only),
    ("own parameters", shared_values.Roots, "_back", _graph_ignored),
    ("standardised weights", shared_values.Roots, "_back", _graph_ignored),
    ("windows", shared_functions, "_one_for_each", _first_copy_only),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "flaw"),
    SINGLE,
    ids=[
        f"{name}: {attribute} {getattr(flaw, '__name__', '')}"
        for name, _, attribute, flaw in SINGLE
    ],
)
def test_a_flaw_of_one_rule_is_rejected(
    name: str, owner: object, attribute: str, flaw: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = BY_NAME[name]
    compare(case, torch.float64)
    monkeypatch.setattr(owner, attribute, flaw)
    with pytest.raises(AssertionError):
        compare(case, torch.float64)
