"""Materialised per-sample gradients of a convolution's weight: patches times output gradients."""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["materialised"]


def materialised(
    x: Tensor, g: Tensor, geometry: Geometry, *, tap_by_tap: bool
) -> tuple[Tensor, Tensor, str]:
    """Gradients of a convolution without groups, a few records at a time to stay in the cache.

    Args:
        x: [b, c, h, w] the layer's input.
        g: [b, m, oh, ow] the gradient at its output.
        geometry: of the convolution.
        tap_by_tap: whether channels are so few that patches are better made by taps.

    Returns:
        Gradients of the weight [blocks, b, n], those of the bias [b, m], and the order of the
        former's axes: "g" (groups), "m", "c", and "i" and "j" of the kernel.
    """
    channels, outputs = x.shape[1], g.shape[1]
    if tap_by_tap:
        way = _by_taps(channels, outputs, geometry)
    elif geometry.stride[0] == 1 and geometry.kernel[0] > 1:
        way = _by_kernel_rows(channels, outputs, geometry)
    else:
        way = _by_patches(channels, outputs, geometry)
    blocks, *product = way.shape
    rows = x.new_empty(blocks, len(x), *product)
    sums = x.new_empty(len(x), outputs)
    step = records_at_once(way.patch_values * x.element_size())
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        by_position = g[part].permute(0, 2, 3, 1).flatten(1, 2)  # a view if channels-last
        way.fill(x[part], by_position, rows[:, part])
        torch.sum(by_position, 1, out=sums[part])
    return rows.flatten(2), sums, way.order


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
