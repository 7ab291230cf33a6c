"""Per-sample gradients of convolution weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from noisewise.training.engine.cost import prefer_ghost, records_at_once
from noisewise.training.engine.patches import (
    Geometry,
    Taps,
    column_patches,
    full_patches,
    tap_patches,
)
from noisewise.training.engine.pieces import Outer, Piece, Place, Rows

__all__ = ["weight_gradients"]

Ordered = tuple[Tensor, str]
"""Gradients [b, n] or [blocks, b, n], and the order of their axes: g(roups), m, c, i and j."""

_FEW = 16  # up to this many values (channels x kernel width) in a run, patches go tap by tap


def weight_gradients(
    index: int, shape: torch.Size, x: Tensor, g: Tensor, geometry: Geometry, taps: Taps
) -> Piece:
    """Gradients of a convolution's weight, of which ``taps`` are live.

    Args:
        index: of the weight.
        shape: [m, c / groups, KH, KW] of the weight.
        x: [b, c, h, w] the layer's input.
        g: [b, m, oh, ow] the gradient at its output.
        geometry: with the live taps only.
        taps: where they sit in the kernel.
    """
    groups, (kh, kw) = geometry.groups, geometry.kernel
    channels, outputs = x.shape[1] // groups, g.shape[1] // groups
    ghost = prefer_ghost(geometry.positions, channels * kh * kw, outputs)
    if ghost or groups > 1:
        patches = full_patches(x, geometry, torch.float64 if ghost else x.dtype)
        by_position = g.reshape(len(g), groups, outputs, -1).transpose(2, 3)
        return Outer(index, patches, by_position, _place(shape, groups, taps, "gmijc"))
    if channels * kw <= _FEW:
        rows, order = _by_taps(x, g, geometry)
    elif geometry.stride[0] == 1 and kh > 1:
        rows, order = _by_kernel_rows(x, g, geometry)
    else:
        rows, order = _by_patches(x, g, geometry)
    return Rows(index, rows, _place(shape, groups, taps, order))


def _place(shape: torch.Size, groups: int, taps: Taps, order: str) -> Place:
    """Add values whose axes are a permutation of "gmcij" (i, j: kernel) to the live taps."""

    def place(values: Tensor, part: Tensor) -> None:
        weight = part.view(groups, -1, shape[1], *shape[-2:])[..., taps[0], taps[1]]
        sizes = dict(zip("gmcij", weight.shape, strict=True))
        permuted = values.view([sizes[axis] for axis in order])
        weight.add_(permuted.permute([order.index(axis) for axis in "gmcij"]))

    return place


def _positions_first(g: Tensor) -> Tensor:
    """[b, m, oh, ow] -> [b, T, m]; no copy for channels-last."""
    return g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1])


def _in_parts(x: Tensor, values_of_one: int) -> Iterator[slice]:
    """Slices of the records such that their patches fit into the cache."""
    step = records_at_once(values_of_one * x.element_size())
    return (slice(start, start + step) for start in range(0, len(x), step))


def _by_taps(x: Tensor, g: Tensor, geometry: Geometry) -> Ordered:
    """Few channels: one image for each tap, [c kh kw, T] times [T, m]."""
    kernel, outputs = x.shape[1] * geometry.kernel[0] * geometry.kernel[1], g.shape[1]
    rows = x.new_empty(len(x), kernel, outputs)
    for part in _in_parts(x, kernel * geometry.positions):
        torch.bmm(tap_patches(x[part], geometry), _positions_first(g[part]), out=rows[part])
    return rows.flatten(1), "gcijm"


def _by_kernel_rows(x: Tensor, g: Tensor, geometry: Geometry) -> Ordered:
    """Many channels, vertical stride 1: one product for each row of the kernel."""
    kh, kw = geometry.kernel
    oh, ow = geometry.out
    run, outputs = kw * x.shape[1], g.shape[1]
    rows = x.new_empty(kh, len(x), outputs, run)
    for part in _in_parts(x, geometry.padded[0] * ow * run):
        columns = column_patches(x[part], geometry)
        gradients = _positions_first(g[part]).transpose(1, 2)
        for row in range(kh):
            first = row * geometry.dilation[0]
            seen = columns[:, first : first + oh].flatten(1, 2)
            torch.bmm(gradients, seen, out=rows[row, part])
    return rows.flatten(2), "gimjc"


def _by_patches(x: Tensor, g: Tensor, geometry: Geometry) -> Ordered:
    """Any stride: full patches, a few records at a time."""
    kernel, outputs = x.shape[1] * geometry.kernel[0] * geometry.kernel[1], g.shape[1]
    rows = x.new_empty(len(x), outputs, kernel)
    for part in _in_parts(x, kernel * geometry.positions):
        patches = full_patches(x[part], geometry, x.dtype)[:, 0]
        torch.bmm(_positions_first(g[part]).transpose(1, 2), patches, out=rows[part])
    return rows.flatten(1), "gmijc"
