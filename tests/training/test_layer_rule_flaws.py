"""Typical bugs, planted in the layer rules: the comparison with the loop must reject each of them.

Every use of parameters in every model gets a general flaw. `test_single_rule_flaws` plants the bugs
that only one rule can have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_cases import CASES
from layer_cases import MODELS
from loop_agreement import Contract
from torch import Tensor

from noisewise.training.engine import (
    convolution,
    pieces,
    volume_convolution,
)
from noisewise.training.engine.network import Use
from noisewise.training.engine.pieces import Lookups, Outer, Parts, Piece, combined

BY_NAME = {case.name: case for case in CASES}


class _Changed:
    """A piece with another norm or another sum."""

    def __init__(
        self,
        piece: Piece,
        norms: Callable[[Tensor], Tensor] = lambda squares: squares,
        factor: float = 1.0,
        change: Callable[[Tensor, int], Tensor] = lambda values, index: values,
    ) -> None:
        self.indices, self._piece = piece.indices, piece
        self._norms, self._factor, self._change = norms, factor, change

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        return self._norms(self._piece.squared_norms(floor))

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        own = [torch.zeros_like(part) for part in parts]
        self._piece.add_sum(self._factor * factors, own)
        for index in self.indices:
            parts[index].add_(self._change(own[index], index))

    def split(self) -> list[Any]:
        return [
            _Changed(single, self._norms, self._factor, self._change)
            for single in self._piece.split()
        ]

    def rows(self) -> Tensor:
        [index] = self.indices
        rows = self._piece.rows()  # type: ignore[attr-defined]
        return torch.stack([self._change(row * self._factor, index) for row in rows])


Flaw = Callable[[Piece, list[torch.Size]], list[Piece]]


def missing(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    return []


def doubled(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    return [_Changed(piece, lambda squares: 4 * squares, 2.0)]


def norm_left_out(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    return [_Changed(piece, lambda squares: 0 * squares)]


def transposed(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    """The first two axes exchanged, stored in the same memory."""

    def change(values: Tensor, index: int) -> Tensor:
        shape = shapes[index]
        return values.view(shape).transpose(0, 1).flatten() if len(shape) > 1 else values

    return [_Changed(piece, change=change)]


def cross_terms_left_out(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    """Sum over positions of norms instead of the norm of the sum."""
    if isinstance(piece, Outer):
        a, g = (part.double().square().sum(3) for part in (piece._a, piece._g))
        return [_Changed(piece, lambda squares: (a * g).sum(dim=(1, 2)))]
    if isinstance(piece, Lookups):
        _, g = piece.evidence()
        return [_Changed(piece, lambda squares: g.double().square().sum(dim=(1, 2)))]
    return [piece]


def records_mixed(piece: Piece, shapes: list[torch.Size]) -> list[Piece]:
    """Each record is clipped by the norm of another one."""
    return [_Changed(piece, lambda squares: squares.roll(1))]


VISIBLE = 1e-5  # a smaller effect is none: one position has no cross terms
FLAWS = [missing, doubled, norm_left_out, transposed, cross_terms_left_out, records_mixed]


def effect(contract: Contract, right: list[list[Piece]], flawed: list[list[Piece]]) -> float:
    """How far a flaw in the pieces of the uses moves norms and sums, relative to the norms."""
    norms = contract.gradients.norm(dim=1)
    sizes = list(contract.engine.layout.sizes)
    sums = []
    for uses in (right, flawed):
        found = combined([piece for use in uses for piece in use])
        squares = sum((piece.squared_norms() for piece in found), torch.zeros_like(norms))
        parts = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        for piece in found:
            piece.add_sum(torch.ones_like(norms), parts)
        sums.append((squares, torch.cat(parts)))
    (one, before), (other, after) = sums
    moved = (one - other).abs() / norms.square()
    return max(float(moved.max()), float((before - after).norm() / norms.sum()))


def always_ghost(patch: pytest.MonkeyPatch) -> None:
    for module in (convolution, pieces, volume_convolution):
        patch.setattr(module, "prefer_ghost", lambda *sizes: True)


class Plan:
    """Which flaws a model's uses of parameters can show.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.contract = Contract(BY_NAME[name], torch.float64)
        self.shapes = list(self.contract.engine.layout.shapes)
        uses = self.contract.engine.layer_uses(self.contract.theta, *self.contract.records)
        with torch.no_grad():
            self.correct = [list(use.pieces(g)) for use, g in uses]

    @torch.no_grad()
    def is_visible(self, flaw: Flaw, number: int, which: int) -> bool:
        """Whether the flaw in piece ``which`` of use ``number`` changes norms or sums."""
        found = self.correct[number]
        flawed = [*found[:which], *flaw(found[which], self.shapes), *found[which + 1 :]]
        every = [*self.correct[:number], flawed, *self.correct[number + 1 :]]
        return effect(self.contract, self.correct, every) > VISIBLE

    def spots(self) -> list[tuple[Flaw, int, int]]:
        """For each piece one visible flaw, the next one in turn; every visible flaw at least once.

        All flaws in all pieces would take six times as long.
        """
        pieces = [(n, w) for n, found in enumerate(self.correct) for w in range(len(found))]
        chosen = []
        for turn, (number, which) in enumerate(pieces):
            for flaw in (FLAWS[(turn + step) % len(FLAWS)] for step in range(len(FLAWS))):
                if self.is_visible(flaw, number, which):
                    chosen.append((flaw, number, which))
                    break
        for flaw in {*FLAWS} - {flaw for flaw, _, _ in chosen}:
            where = next((at for at in pieces if self.is_visible(flaw, *at)), None)
            assert where is not None or flaw in (cross_terms_left_out, transposed), flaw
            chosen += [] if where is None else [(flaw, *where)]
        assert {(number, which) for _, number, which in chosen} == set(pieces)
        return chosen


@pytest.mark.parametrize("name", MODELS)
def test_a_flaw_in_any_use_of_parameters_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ghost(monkeypatch)  # only Gram matrices can lose cross terms
    plan = Plan(name)
    plan.contract.check()
    right = Use.pieces
    for flaw, number, which in plan.spots():
        calls = itertools.count()

        def planted(
            self: Use,
            g: Tensor,
            flaw: Flaw = flaw,
            at: int = number,
            which: int = which,
            calls: Iterator[int] = calls,
        ) -> Iterator[Piece]:
            found = list(right(self, g))
            if next(calls) % len(plan.correct) == at:
                found[which : which + 1] = flaw(found[which], plan.shapes)
            return iter(found)

        with monkeypatch.context() as patch:
            patch.setattr(Use, "pieces", planted)
            with pytest.raises(AssertionError):
                plan.contract.check()


def test_cross_terms_are_planted_in_every_rule_with_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above is not empty for the flaw that only some pieces can have."""
    always_ghost(monkeypatch)
    counted = set()
    for name in MODELS:
        plan = Plan(name)
        with torch.no_grad():
            flawed = [
                [changed for piece in found for changed in cross_terms_left_out(piece, [])]
                for found in plan.correct
            ]
            if effect(plan.contract, plan.correct, flawed) > VISIBLE:
                counted.add(name)
    by_torch_func = {"bag of maximum", "standardised weights", "bilinear"}
    one_position = {"own parameters", "same forward", "weight norm", "prelu"}
    one_step = {name for name in MODELS if re.search(r"\bcell\b", name)}
    assert len(one_step) == 5
    assert set(MODELS) - counted == by_torch_func | one_position | one_step
