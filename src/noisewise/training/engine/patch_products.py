"""Per-record gradients of a convolution's weight: patches of its input times output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from noisewise.training.engine.cost_model import records_at_once
from noisewise.training.engine.pieces import Parts, Rows, Scatter, Single, added
from noisewise.training.gradients import clip_factors

__all__ = ["Geometry", "PatchProducts", "Taps", "full_patches"]

Pair = tuple[int, int]
Taps = tuple[slice, slice]
"""Slices of the kernel, vertical and horizontal."""

_FEW = 16  # with at most this many channels x kernel width, patches are copied tap by tap


@dataclass(frozen=True)
class Geometry:
    """A 2-d convolution at one input size; each pair is (vertical, horizontal)."""

    size: Pair
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: Pair  # zeros on both sides
    groups: int

    @property
    def padded(self) -> Pair:
        """Size of the padded input."""
        return self.size[0] + 2 * self.padding[0], self.size[1] + 2 * self.padding[1]

    @property
    def out(self) -> Pair:
        """Size of the output."""
        return self._out(0), self._out(1)

    def _out(self, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (self.padded[axis] - reach) // self.stride[axis] + 1

    @property
    def positions(self) -> int:
        """Number of output positions T."""
        return self.out[0] * self.out[1]

    def cropped(self) -> tuple[Geometry, Taps]:
        """The same convolution without the outer taps that only read padding.

        Late layers on small images have many of them: 8 of 9 for a 3x3 kernel on a 1x1 image.
        """
        (top, padding_h), (left, padding_w) = self._used(0), self._used(1)
        kernel = top.stop - top.start, left.stop - left.start
        return replace(self, kernel=kernel, padding=(padding_h, padding_w)), (top, left)

    def _used(self, axis: int) -> tuple[slice, int]:
        """The taps to keep along an axis, and the padding that remains."""
        size, taps, padding = self.size[axis], self.kernel[axis], self.padding[axis]
        stride, dilation = self.stride[axis], self.dilation[axis]
        used = [
            tap
            for tap in range(taps)
            if any(
                0 <= o * stride + tap * dilation - padding < size for o in range(self._out(axis))
            )
        ]
        if used:
            before, after = used[0], taps - 1 - used[-1]
            remaining = padding - before * dilation
            if before == after and remaining >= 0:
                return slice(before, taps - after), remaining
        return slice(0, taps), padding


def _padded(x: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Images [b, c, h, w] as [b, h, w, c] with zero padding, contiguous."""
    (top, left) = geometry.padding
    if top or left:
        x = functional.pad(x, (left, left, top, top))
    return x.permute(0, 2, 3, 1).to(dtype).contiguous()


def full_patches(x: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Patches [b, groups, T, kh * kw * c / groups] of images x [b, c, h, w]."""
    p = _padded(x, geometry, dtype)
    records, _, _, channels = p.shape
    (kh, kw), (sh, sw), (dh, dw) = geometry.kernel, geometry.stride, geometry.dilation
    each = channels // geometry.groups
    n, row, column, _ = p.stride()
    view = p.as_strided(
        (records, geometry.groups, *geometry.out, kh, kw, each),
        (n, each, sh * row, sw * column, dh * row, dw * column, 1),
    )
    # contiguous(): a reshape of overlapping windows can be a view, which products would copy
    flat = view.reshape(records, geometry.groups, geometry.positions, kh * kw * each)
    return flat.contiguous()


def _column_patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Horizontal patches [b, padded h, ow, kw * c], which a row of the kernel reads.

    With a vertical stride of 1, the patches of kernel row i are the rows from i * dilation on, as a
    view. So the copy is smaller than that of `full_patches` by a factor of kh.
    """
    p = _padded(x, geometry, x.dtype)
    records, height, _, channels = p.shape
    kw, sw, dw = geometry.kernel[1], geometry.stride[1], geometry.dilation[1]
    n, row, column, _ = p.stride()
    view = p.as_strided(
        (records, height, geometry.out[1], kw, channels), (n, row, sw * column, dw * column, 1)
    )
    return view.reshape(records, height, geometry.out[1], kw * channels).contiguous()


def _tap_patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Patches [b, c * kh * kw, T]: the image that each tap reads; fast for few channels."""
    p = _padded(x, geometry, x.dtype).permute(0, 3, 1, 2).contiguous()
    records, channels, _, _ = p.shape
    (kh, kw), (sh, sw), (dh, dw) = geometry.kernel, geometry.stride, geometry.dilation
    n, plane, row, column = p.stride()
    view = p.as_strided(
        (records, channels, kh, kw, *geometry.out),
        (n, plane, dh * row, dw * column, sh * row, sw * column),
    )
    return view.reshape(records, channels * kh * kw, geometry.positions).contiguous()


class PatchProducts:
    """Gradients of the weight of a convolution without groups, a few records at a time.

    Either all gradients are stored, or they are streamed, which one such piece of a model can do:
    when the norms of all other parameters are known, the gradients of a few records are clipped and
    added at once, while they are in the processor's cache.

    Args:
        index: of the weight.
        x: [b, c, h, w] the layer's input.
        g: [b, m, oh, ow] the gradient at its output.
        geometry: of the convolution.
        make_scatter: (order of the axes "g", "m", "c", "i", "j") -> `Scatter`.
    """

    def __init__(
        self,
        index: int,
        x: Tensor,
        g: Tensor,
        geometry: Geometry,
        make_scatter: Callable[[str], Scatter],
    ) -> None:
        self.indices = (index,)
        self._x, self._g = x, g
        self._product = _product(x.shape[1], g.shape[1], geometry)
        self._scatter = make_scatter(self._product.order)
        self._stored: Rows | None = None

    @property
    def size(self) -> int:
        """See `Streamable`."""
        blocks, rows, columns = self._product.shape
        return len(self._x) * blocks * rows * columns

    def stream(self, norms: Tensor, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Streamable`; the weighted sum is [blocks, n]."""
        norms, factors = norms.clone(), torch.empty_like(norms)
        blocks, rows, columns = self._product.shape
        sums = norms.new_zeros(blocks, 1, rows * columns)
        buffer = self._buffer(self._step())
        for part in self._parts():
            gradients = buffer[:, : len(self._x[part])]
            self._fill(part, gradients)
            values = gradients.flatten(2).double()
            squares = added(torch.linalg.vector_norm(values, dim=2).square_())
            factors[part] = clip_factors(norms[part].add_(squares), clip_norm)
            sums.baddbmm_(factors[part].expand(blocks, 1, -1), values)
        return norms, factors, sums

    def add_streamed(self, sums: Tensor, parts: Parts) -> None:
        """See `Streamable`."""
        self._scatter(sums, parts[self.indices[0]])

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
        """See `Piece`; the same calls compute streamed and stored gradients."""
        return self._all().evidence()

    def _all(self) -> Rows:
        if self._stored is None:
            stored = self._buffer(len(self._x))
            for part in self._parts():
                self._fill(part, stored[:, part])
            self._stored = Rows(self.indices[0], stored.flatten(2), self._scatter)
        return self._stored

    def _buffer(self, records: int) -> Tensor:
        blocks, *product = self._product.shape
        return self._x.new_empty(blocks, records, *product)

    def _step(self) -> int:
        return records_at_once(self._product.patch_values * self._x.element_size())

    def _parts(self) -> Iterator[slice]:
        step = self._step()
        return (slice(start, start + step) for start in range(0, len(self._x), step))

    def _fill(self, part: slice, out: Tensor) -> None:
        by_position = self._g[part].permute(0, 2, 3, 1).flatten(1, 2)  # a view if channels-last
        self._product.fill(self._x[part], by_position, out)


@dataclass(frozen=True)
class _Product:
    """One method to multiply patches and output gradients.

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


def _product(channels: int, outputs: int, geometry: Geometry) -> _Product:
    if channels * geometry.kernel[1] <= _FEW:
        return _by_taps(channels, outputs, geometry)
    if geometry.stride[0] == 1 and geometry.kernel[0] > 1:
        return _by_kernel_rows(channels, outputs, geometry)
    return _by_patches(channels, outputs, geometry)


def _by_taps(channels: int, outputs: int, geometry: Geometry) -> _Product:
    """Few channels: one image for each tap, [c kh kw, T] times [T, m]."""
    kernel = channels * geometry.kernel[0] * geometry.kernel[1]

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        torch.bmm(_tap_patches(x, geometry), g, out=out[0])

    return _Product((1, kernel, outputs), "gcijm", kernel * geometry.positions, fill)


def _by_kernel_rows(channels: int, outputs: int, geometry: Geometry) -> _Product:
    """Many channels, vertical stride 1: one product for each row of the kernel."""
    (kh, kw), (oh, ow) = geometry.kernel, geometry.out
    run = kw * channels

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        columns, g = _column_patches(x, geometry), g.transpose(1, 2)
        for row in range(kh):
            first = row * geometry.dilation[0]
            torch.bmm(g, columns[:, first : first + oh].flatten(1, 2), out=out[row])

    return _Product((kh, outputs, run), "gimjc", geometry.padded[0] * ow * run, fill)


def _by_patches(channels: int, outputs: int, geometry: Geometry) -> _Product:
    """Any stride: full patches."""
    kernel = channels * geometry.kernel[0] * geometry.kernel[1]

    def fill(x: Tensor, g: Tensor, out: Tensor) -> None:
        patches = full_patches(x, geometry, x.dtype)[:, 0]
        torch.bmm(g.transpose(1, 2), patches, out=out[0])

    return _Product((1, outputs, kernel), "gmijc", kernel * geometry.positions, fill)
