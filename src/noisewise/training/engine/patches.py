"""What each output position of a convolution sees: its geometry, and patches in several orders."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Geometry", "Taps", "column_patches", "full_patches", "tap_patches"]

Pair = tuple[int, int]
Taps = tuple[slice, slice]
"""Which part of a kernel."""


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
        """The same convolution without the outer taps that only ever see padding.

        Late layers on small images have many: of a 3x3 kernel on a 1x1 image, 8 of 9.
        """
        (top, padding_h), (left, padding_w) = self._live(0), self._live(1)
        kernel = top.stop - top.start, left.stop - left.start
        return replace(self, kernel=kernel, padding=(padding_h, padding_w)), (top, left)

    def _live(self, axis: int) -> tuple[slice, int]:
        """The taps to keep along an axis, and the padding that is then left."""
        size, taps, padding = self.size[axis], self.kernel[axis], self.padding[axis]
        stride, dilation = self.stride[axis], self.dilation[axis]
        live = [
            tap
            for tap in range(taps)
            if any(
                0 <= o * stride + tap * dilation - padding < size for o in range(self._out(axis))
            )
        ]
        if live:
            first, behind = live[0], taps - 1 - live[-1]
            left_over = padding - first * dilation
            if first == behind and left_over >= 0:
                return slice(first, taps - behind), left_over
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
    # contiguous(): a reshape of overlapping windows can be a view, which products then copy
    flat = view.reshape(records, geometry.groups, geometry.positions, kh * kw * each)
    return flat.contiguous()


def column_patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Horizontal patches [b, padded h, ow, kw * c]; rows of them are what a row of taps sees.

    With a vertical stride of 1, the patches of kernel row i are rows i * dilation and following:
    a view, so that the copy is smaller than that of `full_patches` by a factor of kh.
    """
    p = _padded(x, geometry, x.dtype)
    records, height, _, channels = p.shape
    kw, sw, dw = geometry.kernel[1], geometry.stride[1], geometry.dilation[1]
    n, row, column, _ = p.stride()
    view = p.as_strided(
        (records, height, geometry.out[1], kw, channels), (n, row, sw * column, dw * column, 1)
    )
    return view.reshape(records, height, geometry.out[1], kw * channels).contiguous()


def tap_patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Patches [b, c * kh * kw, T]: for each tap the image it sees; quick for few channels."""
    p = _padded(x, geometry, x.dtype).permute(0, 3, 1, 2).contiguous()
    records, channels, _, _ = p.shape
    (kh, kw), (sh, sw), (dh, dw) = geometry.kernel, geometry.stride, geometry.dilation
    n, plane, row, column = p.stride()
    view = p.as_strided(
        (records, channels, kh, kw, *geometry.out),
        (n, plane, dh * row, dw * column, sh * row, sw * column),
    )
    return view.reshape(records, channels * kh * kw, geometry.positions).contiguous()
