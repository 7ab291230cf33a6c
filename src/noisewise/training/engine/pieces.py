"""Per-record gradients of a parameter in the cheapest form, their norms and their weighted sum.

Promise 2 (leaving out one record changes the sum by at most c (1 + 1e-6)) holds although a model
computes in float32: each record's contribution is a fixed vector that depends only on this record's
float32 activations and output gradients. Its norm and its part of the sum are both computed in
float64 from the same float32 numbers, so the norm that clips is the norm of what is added:

* `Rows` stores the vectors; norm and sum are float64 operations on them.
* `Affine` and `Outer` never compute the vectors sum_t g_t (x) a_t. They compute the norm from
  lengths or Gram matrices and the sum as one matrix product, both in float64, where the product of
  two float32 numbers is exact. A bound on the rounding error of the Gram form is added to the norm,
  so cancellation between positions can make a norm too large (by far less than 1e-6 unless nearly
  everything cancels), never too small.
* `Lookups` adds the rows of an embedding table that a record used, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from noisewise.training.engine.cost_model import is_near, prefer_ghost, values_at_once

__all__ = [
    "Affine",
    "Joinable",
    "Lookups",
    "Outer",
    "Parts",
    "Piece",
    "Rows",
    "Scatter",
    "Single",
    "Streamable",
    "added",
    "can_stream",
    "combined",
]

Parts = Sequence[Tensor]
"""The flat float64 sum as one vector for each parameter."""

Scatter = Callable[[Tensor, Tensor], None]
"""(values, part): add values, in the order of axes of their computation, to a parameter's part."""

_ROUNDING = 2.0**-52


class Piece(Protocol):
    """The gradients of one or two parameters for each of b records."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Numbers of the parameters."""
        ...

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """Squared norms of the records' gradients: [b] float64.

        Args:
            floor: where a gradient is a sum over positions that is never computed itself, this
                share of (the sum of its terms' norms)^2 is added. Otherwise the rounding errors of
                a sum in which nearly everything cancels would be scaled up.
        """
        ...

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """Add sum_i factors_i gradient_i, for factors [b] float64, to its parameters' parts."""
        ...

    def split(self) -> list[Single]:
        """The same gradients as pieces of one parameter each."""
        ...

    def evidence(self) -> list[Tensor]:
        """The tensors that norms and sums are computed from in float64: [b, ...] each.

        If row i holds the same bits in two batches, so does record i's gradient; see
        `noisewise.training.batch_size_check`.
        """
        ...


class Single(Piece, Protocol):
    """The gradients of one parameter."""

    def rows(self) -> Tensor:
        """The gradients: [b, n] float64, in the parameter's order."""
        ...


@runtime_checkable
class Joinable(Single, Protocol):
    """Gradients of one use of a parameter that can be added to those of other uses at less cost."""

    def joined(self, others: Sequence[Single]) -> Piece | None:
        """The sum over all uses, or None if it has to be computed from `Single.rows`.

        Args:
            others: the gradients of the parameter's other uses.
        """
        ...


class Streamable(Piece, Protocol):
    """Gradients that can be clipped and added a few records at a time, without storing them all."""

    @property
    def size(self) -> int:
        """Number of values of all records' gradients together."""
        ...

    def stream(self, norms: Tensor, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Clip and add the gradients.

        Args:
            norms: [b] squared norms over all other parameters.
            clip_norm: c.

        Returns:
            Squared norms over all parameters [b], clipping factors [b], and the weighted sum, for
            `add_streamed`.
        """
        ...

    def add_streamed(self, sums: Tensor, parts: Parts) -> None:
        """Add the weighted sum that `stream` returned to the parameters' parts."""
        ...


def can_stream(piece: Piece) -> TypeGuard[Streamable]:
    """Whether a piece is `Streamable`; one member decides, because every batch asks."""
    return hasattr(piece, "stream")


def _squared_lengths(values: Tensor) -> Tensor:
    """Squared Euclidean lengths over the last dimension of float64 values."""
    lengths: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return lengths.square_()


def added(squares: Tensor) -> Tensor:
    """The sum over blocks [blocks, b] -> [b], in the same order for each of the b records.

    `torch.sum` over the first axis would add the blocks of the last few records in another order.
    """
    return functools.reduce(torch.add, squares.unbind(0))


class Rows:
    """Materialised gradients.

    Args:
        index: of the parameter.
        values: [b, n], or [blocks, b, n] if each gradient has several blocks (with ``scatter``).
        scatter: adds a sum [blocks, n] to the parameter's part; None if it has the same order.
    """

    def __init__(self, index: int, values: Tensor, scatter: Scatter | None = None) -> None:
        self.indices = (index,)
        self._blocks = values if values.dim() == 3 else values.unsqueeze(0)
        self._scatter = scatter
        if is_near(self._blocks.numel()):
            self._blocks = self._blocks.double()  # larger ones are converted in parts

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`."""
        blocks, records, size = self._blocks.shape
        if self._blocks.dtype == torch.float64:
            squares = _squared_lengths(self._blocks)
        else:
            step = values_at_once(blocks * size)
            squares = torch.cat(
                [
                    _squared_lengths(self._blocks[:, start : start + step].double())
                    for start in range(0, records, step)
                ],
                dim=1,
            )
        return added(squares)

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        blocks, records, size = self._blocks.shape
        part = parts[self.indices[0]]
        if self._blocks.dtype == torch.float64:
            if self._scatter is None:
                part.addmv_(self._blocks[0].t(), factors)
            else:
                self._scatter(torch.matmul(factors, self._blocks), part)
            return
        if self._scatter is None:
            sums = part.view(blocks, size)
        else:
            sums = torch.zeros(blocks, size, dtype=part.dtype, device=part.device)
        step = values_at_once(records)
        for block, total in zip(self._blocks, sums, strict=True):
            for start in range(0, size, step):
                columns = slice(start, start + step)
                total[columns].addmv_(block[:, columns].double().t(), factors)
        if self._scatter is not None:
            self._scatter(sums, part)

    def split(self) -> list[Single]:
        """See `Piece`."""
        return [self]

    def evidence(self) -> list[Tensor]:
        """See `Piece`."""
        return [self._blocks.transpose(0, 1)]

    def rows(self) -> Tensor:
        """See `Single`."""
        if self._scatter is None:
            return self._blocks[0].double()
        blocks, records, size = self._blocks.shape
        in_order = torch.zeros(
            records, blocks * size, dtype=torch.float64, device=self._blocks.device
        )
        for number, row in enumerate(in_order):
            self._scatter(self._blocks[:, number].double(), row)
        return in_order


class Affine:
    """Gradients of a matrix that is used at one position, and of its bias: g (x) a and g.

    Args:
        weight: index of the matrix.
        bias: index of the bias, or None.
        a: [b, k] the layer's input.
        g: [b, m] the gradient at its output.
    """

    def __init__(self, weight: int, bias: int | None, a: Tensor, g: Tensor) -> None:
        self.indices = (weight,) if bias is None else (weight, bias)
        self._a, self._g = a.double(), g.double()

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`; |g (x) a| = |g| |a|."""
        a, g = _squared_lengths(self._a), _squared_lengths(self._g)
        return a.mul_(g) if len(self.indices) == 1 else torch.addcmul(g, g, a)

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        g = self._g.t()
        parts[self.indices[0]].view(g.shape[0], -1).addmm_(g * factors, self._a)
        if len(self.indices) == 2:
            parts[self.indices[1]].addmv_(g, factors)

    def split(self) -> list[Single]:
        """See `Piece`."""
        weight = Outer(self.indices[0], self._a[:, None, None], self._g[:, None, None])
        return [weight, *(Rows(bias, self._g) for bias in self.indices[1:])]

    def evidence(self) -> list[Tensor]:
        """See `Piece`."""
        return [self._a, self._g]


class Outer:
    """Gradients of a matrix that is used at T positions: sum_t g_t (x) a_t.

    Args:
        index: of the matrix.
        a: [b, groups, T, k] the input at each position.
        g: [b, groups, T, m] the gradient at each position.
        scatter: adds a sum [groups, m, k] to the parameter's part; None if it has the same order.
    """

    def __init__(self, index: int, a: Tensor, g: Tensor, scatter: Scatter | None = None) -> None:
        self.indices = (index,)
        self._a, self._g, self._scatter = a, g, scatter
        self._ghost = prefer_ghost(a.shape[0], a.shape[2], a.shape[3], g.shape[3])
        self._rows: Rows | None = None

    def joined(self, others: Sequence[Single]) -> Outer | None:
        """See `Joinable`; the same as one use at the positions of all uses."""
        uses = [self, *(other for other in others if isinstance(other, Outer))]
        if len(uses) <= len(others) or any(use._scatter is not None for use in uses):
            return None
        double = any(torch.float64 in (use._a.dtype, use._g.dtype) for use in uses)
        dtype = torch.float64 if double else self._a.dtype
        a, g = [use._a.to(dtype) for use in uses], [use._g.to(dtype) for use in uses]
        return Outer(self.indices[0], torch.cat(a, dim=2), torch.cat(g, dim=2))

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`."""
        if not self._ghost:
            return self._materialised().squared_norms(floor)
        self._a, self._g = self._a.double(), self._g.double()
        if self._a.shape[2] == 1:
            return (_squared_lengths(self._a) * _squared_lengths(self._g)).flatten(1).sum(1)
        return _gram_norms(self._a, self._g, floor)

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        if not self._ghost:
            self._materialised().add_sum(factors, parts)
            return
        a, g = self._a.double(), self._g.double() * factors[:, None, None, None]
        groups, m, k = a.shape[1], g.shape[3], a.shape[3]
        left = g.permute(1, 3, 0, 2).reshape(groups, m, -1)
        right = a.transpose(0, 1).reshape(groups, -1, k)
        part = parts[self.indices[0]]
        if self._scatter is None and groups == 1:
            part.view(m, k).addmm_(left[0], right[0])
        elif self._scatter is None:
            part.view(groups, m, k).add_(torch.bmm(left, right))
        else:
            self._scatter(torch.bmm(left, right), part)

    def split(self) -> list[Single]:
        """See `Piece`."""
        return [self]

    def evidence(self) -> list[Tensor]:
        """See `Piece`."""
        return [self._a, self._g] if self._ghost else self._materialised().evidence()

    def rows(self) -> Tensor:
        """See `Single`."""
        return self._materialised().rows()

    def _materialised(self) -> Rows:
        if self._rows is None:
            a, g = self._a.flatten(0, 1), self._g.flatten(0, 1).to(self._a.dtype)
            values = torch.bmm(g.transpose(1, 2), a).view(len(self._a), -1)
            self._rows = Rows(self.indices[0], values, self._scatter)
        return self._rows


def _gram_norms(a: Tensor, g: Tensor, floor: float) -> Tensor:
    """Squared norms of sum_t g_t (x) a_t as sum_st <a_s, a_t> <g_s, g_t>, rounded up: [b].

    Source: Goodfellow 2015 for T = 1; Li et al. 2022 ("ghost clipping") for sequences.
    """
    records, _, positions, _ = a.shape
    a, g = a.flatten(0, 1), g.flatten(0, 1)
    gram_a, gram_g = torch.bmm(a, a.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2))
    # |rounding| <= (k + m + 2T) u (sum_t |a_t| |g_t|)^2: products of k and m terms, then T by T
    lengths = (gram_a.diagonal(dim1=1, dim2=2) * gram_g.diagonal(dim1=1, dim2=2)).sqrt_()
    share = max(floor, (a.shape[2] + g.shape[2] + 2 * positions) * _ROUNDING)
    squares = gram_a.mul_(gram_g).sum(2).sum(1).clamp_(min=0.0)
    squares.add_(lengths.sum(1).square_(), alpha=share)
    return squares.view(records, -1).sum(1)


class Lookups:
    """Gradients of an embedding table, of which each record uses a few rows.

    Args:
        index: of the table.
        tokens: [b, T] the row that each position uses.
        g: [b, T, d] the gradient at each position, 0 for padding.
        size: number of rows of the table.
    """

    def __init__(self, index: int, tokens: Tensor, g: Tensor, size: int) -> None:
        self.indices = (index,)
        self._shape = (len(tokens), size, g.shape[2])
        self._evidence = [tokens, g]
        records = torch.arange(len(tokens), device=tokens.device)[:, None]
        used, position = torch.unique(records * size + tokens, return_inverse=True)
        self._record, self._token = used // size, used % size
        self._values = torch.zeros(
            len(used), g.shape[2], dtype=torch.float64, device=g.device
        ).index_add_(0, position.flatten(), g.double().flatten(0, 1))

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`."""
        squares = _squared_lengths(self._values)
        return squares.new_zeros(self._shape[0]).index_add_(0, self._record, squares)

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        table = parts[self.indices[0]].view(self._shape[1:])
        table.index_add_(0, self._token, self._values * factors[self._record, None])

    def split(self) -> list[Single]:
        """See `Piece`."""
        return [self]

    def evidence(self) -> list[Tensor]:
        """See `Piece`."""
        return self._evidence

    def rows(self) -> Tensor:
        """See `Single`."""
        dense = self._values.new_zeros(self._shape)
        dense[self._record, self._token] = self._values
        return dense.flatten(1)


def combined(pieces: list[Piece]) -> list[Piece]:
    """The same gradients with one piece for each parameter, however often it is used.

    A parameter's gradient is the sum over its uses, and the norm of a sum cannot be computed from
    the norms of its parts.
    """
    indices = [index for piece in pieces for index in piece.indices]
    if len(set(indices)) == len(indices):
        return pieces
    by_parameter: dict[int, list[Single]] = {}
    for piece in pieces:
        for single in piece.split():
            by_parameter.setdefault(single.indices[0], []).append(single)
    return [_sum(index, several) for index, several in by_parameter.items()]


def _sum(index: int, pieces: list[Single]) -> Piece:
    first, *others = pieces
    if not others:
        return first
    joined = first.joined(others) if isinstance(first, Joinable) else None
    if joined is not None:
        return joined
    total = first.rows().clone()
    for piece in others:
        total += piece.rows()
    return Rows(index, total)
