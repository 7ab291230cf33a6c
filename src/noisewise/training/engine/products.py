"""Materialised per-sample gradients of a convolution's weight: patches times output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.training.engine.cost import records_at_once
from noisewise.training.engine.patches import (
    Geometry,
    column_patches,
    full_patches,
    tap_patches,
)
from noisewise.training.engine.pieces import Parts, Place, Rows, Single, added
from noisewise.training.gradients import clip_factors

__all__ = ["Products"]

_FEW = 16  # up to this many values (channels x kernel width) in a run, patches go tap by tap


class Products:
    """Gradients of the weight of a convolution without groups, made a few records at a time.

    Either all of them are stored, or one such piece of a model is streamed: when every other norm
    is known, the gradients of a few records can be clipped and summed as soon as they are made,
    and never leave the cache.

    Args:
        index: of the weight.
        x: [b, c, h, w] the layer's input.
        g: [b, m, oh, ow] the gradient at its output.
        geometry: of the convolution.
        make_place: from an order of axes ("g", "m", "c", "i", "j") to how it is written.
    """

    def __init__(
        self,
        index: int,
        x: Tensor,
        g: Tensor,
        geometry: Geometry,
        make_place: Callable[[str], Place],
    ) -> None:
        self.indices = (index,)
        self._x, self._g = x, g
        self._way = _way(x.shape[1], g.shape[1], geometry)
        self._place = make_place(self._way.order)
        self._stored: Rows | None = None

    @property
    def size(self) -> int:
        """Number of values of all gradients together."""
        blocks, rows, columns = self._way.shape
        return len(self._x) * blocks * rows * columns

    def stream(self, norms: Tensor, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Norms over all parameters [b], clipping factors [b], and the weighted sum [blocks, n].

        Args:
            norms: [b] squared norms over all other parameters.
            clip_norm: c.
        """
        norms, factors = norms.clone(), torch.empty_like(norms)
        blocks, rows, columns = self._way.shape
        sums = norms.new_zeros(blocks, 1, rows * columns)
        buffer = self._buffer(self._step())
        for part in self._parts():
            made = buffer[:, : len(self._x[part])]
            self._fill(part, made)
            values = made.flatten(2).double()
            squares = added(torch.linalg.vector_norm(values, dim=2).square_())
            factors[part] = clip_factors(norms[part].add_(squares), clip_norm)
            sums.baddbmm_(factors[part].expand(blocks, 1, -1), values)
        return norms, factors, sums

    def add_streamed(self, sums: Tensor, parts: Parts) -> None:
        """Add the weighted sum that `stream` gave."""
        self._place(sums, parts[self.indices[0]])

    def squared_norms(self, floor: float = 0.0) -> Tensor:
        """See `Piece`."""
        return self._all().squared_norms(floor)

    def add_sum(self, factors: Tensor, parts: Parts) -> None:
        """See `Piece`."""
        self._all().add_sum(factors, parts)

    def split(self) -> list[Single]:
        """See `Piece`."""
        return [self._all()]

    def evidence(self) -> list[Tensor]:
        """See `Piece`; streamed gradients are made by the same calls as stored ones."""
        return self._all().evidence()

    def _all(self) -> Rows:
        if self._stored is None:
            stored = self._buffer(len(self._x))
            for part in self._parts():
                self._fill(part, stored[:, part])
            self._stored = Rows(self.indices[0], stored.flatten(2), self._place)
        return self._stored

    def _buffer(self, records: int) -> Tensor:
        blocks, *product = self._way.shape
        return self._x.new_empty(blocks, records, *product)

    def _step(self) -> int:
        return records_at_once(self._way.patch_values * self._x.element_size())

    def _parts(self) -> Iterator[slice]:
        step = self._step()
        return (slice(start, start + step) for start in range(0, len(self._x), step))

    def _fill(self, part: slice, out: Tensor) -> None:
        by_position = self._g[part].permute(0, 2, 3, 1).flatten(1, 2)  # a view if channels-last
        self._way.fill(self._x[part], by_position, out)


@dataclass(frozen=True)
class _Way:
    """One way to multiply patches and output gradients.

    Attributes:
        shape: (blocks, rows, columns) of one record's gradient.
        order: of its axes.
        patch_values: number of values of one record's patches.
        fill: (x [n, c, h, w], g [n, T, m], out [blocks, n, rows, columns]) -> None.
    """

    shape: tuple[int, int, int]
    order: str
    patch_values: int
    fill: Callable[[Tensor, Tensor, Tensor], None]


def _way(channels: int, outputs: int, geometry: Geometry) -> _Way:
    if channels * geometry.kernel[1] <= _FEW:
        return _by_taps(channels, outputs, geometry)
    if geometry.stride[0] == 1 and geometry.kernel[0] > 1:
        return _by_kernel_rows(channels, outputs, geometry)
    return _by_patches(channels, outputs, geometry)


def _by_taps(channels: int, outputs: int, geometry: Geometry) -> _Way:
    """Few channels: one image for each tap, [c kh kw, T] times [T, m]."""
    kernel = channels * geometry.kernel[0] * geometry.kernel[1]

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        torch.bmm(tap_patches(x, geometry), g, out=out[0])

    return _Way((1, kernel, outputs), "gcijm", kernel * geometry.positions, fill)


def _by_kernel_rows(channels: int, outputs: int, geometry: Geometry) -> _Way:
    """Many channels, vertical stride 1: one product for each row of the kernel."""
    (kh, kw), (oh, ow) = geometry.kernel, geometry.out
    run = kw * channels

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        columns, g = column_patches(x, geometry), g.transpose(1, 2)
        for row in range(kh):
            first = row * geometry.dilation[0]
            torch.bmm(g, columns[:, first : first + oh].flatten(1, 2), out=out[row])

    return _Way((kh, outputs, run), "gimjc", geometry.padded[0] * ow * run, fill)


def _by_patches(channels: int, outputs: int, geometry: Geometry) -> _Way:
    """Any stride: full patches."""
    kernel = channels * geometry.kernel[0] * geometry.kernel[1]

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        patches = full_patches(x, geometry, x.dtype)[:, 0]
        torch.bmm(g.transpose(1, 2), patches, out=out[0])

    return _Way((1, outputs, kernel), "gmijc", kernel * geometry.positions, fill)
