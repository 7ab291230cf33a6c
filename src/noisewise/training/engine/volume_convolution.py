"""The rules of `nn.Conv3d` and of transposed convolutions, from patches of all axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine.cost_model import prefer_ghost
from noisewise.training.engine.layer_interface import (
    LayerOptions,
    LayerRule,
    NotCoveredError,
    Run,
    Values,
    row_gradients,
    tensor_of,
)
from noisewise.training.engine.pieces import Outer, Piece, Rows

__all__ = ["Conv3d", "TransposedConvolution"]

_CHUNK_VALUES = 1 << 22  # patches at a time: 16 MB


def _windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """All patches of x [b, c, ...]: [b, groups, positions, c / groups * kernel size].

    Positions are next to each other in memory, because then long runs of values are copied.
    """
    sizes = [
        (size - step * (taps - 1) - 1) // hop + 1
        for size, taps, hop, step in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    strides = x.stride()[2:]
    view = x.as_strided(
        (*x.shape[:2], *kernel, *sizes),
        (
            *x.stride()[:2],
            *(a * step for a, step in zip(strides, dilation, strict=True)),
            *(a * hop for a, hop in zip(strides, stride, strict=True)),
        ),
    )
    rows = view.reshape(len(x), groups, -1, torch.Size(sizes).numel())
    return rows.transpose(2, 3)


def _products(index: int, wide: Tensor, narrow: Tensor, windows: _Windows) -> Piece:
    """sum_t narrow_t (x) patch_t of ``wide``, as vectors or as their two factors."""
    b, groups, outputs = narrow.shape[0], windows.groups, narrow.shape[1] // windows.groups
    by_position = narrow.reshape(b, groups, outputs, -1).transpose(2, 3)
    positions = by_position.shape[2]
    inputs = wide.shape[1] // groups * torch.Size(windows.kernel).numel()
    if prefer_ghost(b, positions, inputs, outputs):
        return Outer(index, windows.of(wide), by_position)
    rows = wide.new_empty(b, groups, outputs, inputs)
    step = max(1, _CHUNK_VALUES // max(1, groups * positions * inputs))
    for start in range(0, b, step):
        part = slice(start, start + step)
        torch.matmul(by_position[part].transpose(2, 3), windows.of(wide[part]), out=rows[part])
    return Rows(index, rows.flatten(1))


class _Windows:
    def __init__(self, module: nn.modules.conv._ConvNd) -> None:
        self.kernel, self.stride = module.kernel_size, module.stride
        self.dilation, self.groups = module.dilation, module.groups

    def of(self, x: Tensor) -> Tensor:
        return _windows(x, self.kernel, self.stride, self.dilation, self.groups)


class Conv3d(LayerRule):
    """Convolutions of volumes [b, channels, depth, height, width]."""

    def __init__(self, module: nn.Conv3d, values: Values, options: LayerOptions) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._windows, self._mode = _Windows(module), module.padding_mode
        self._pad = list(module._reversed_padding_repeated_twice)

    def run(self, x: Tensor) -> Run:
        """See `LayerRule`."""
        if x.dim() != 5:
            raise NotCoveredError("Conv3d receives an input without a batch dimension")
        if any(self._pad):
            mode = "constant" if self._mode == "zeros" else self._mode
            x = functional.pad(x, self._pad, mode=mode)
        out = functional.conv3d(
            x,
            self._weight.tensor,
            tensor_of(self._bias),
            self._windows.stride,
            0,
            self._windows.dilation,
            self._windows.groups,
        )
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        if self._weight.index is not None:
            yield _products(self._weight.index, kept, g, self._windows)
        yield from row_gradients(self._bias, lambda: g.flatten(2).sum(2))


class TransposedConvolution(LayerRule):
    """ConvTranspose1d, 2d and 3d: like a convolution with input and gradient exchanged."""

    _FUNCTIONS: ClassVar = {
        1: functional.conv_transpose1d,
        2: functional.conv_transpose2d,
        3: functional.conv_transpose3d,
    }

    def __init__(
        self, module: nn.modules.conv._ConvTransposeNd, values: Values, options: LayerOptions
    ) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._windows = _Windows(module)
        self._padding = tuple(int(pad) for pad in module.padding)
        self._extra = tuple(int(extra) for extra in module.output_padding)

    def run(self, x: Tensor) -> Run:
        """See `LayerRule`."""
        axes = len(self._windows.kernel)
        if x.dim() != axes + 2:
            raise NotCoveredError("ConvTranspose receives an input without a batch dimension")
        out = self._FUNCTIONS[axes](
            x,
            self._weight.tensor,
            tensor_of(self._bias),
            self._windows.stride,
            self._padding,
            self._extra,
            self._windows.groups,
            self._windows.dilation,
        )
        return Run(x, out, self._gradients)

    def _gradients(self, kept: Tensor, g: Tensor) -> Iterator[Piece]:
        if self._weight.index is not None:
            pairs = zip(reversed(self._padding), reversed(self._extra), strict=True)
            sides = [side for pad, extra in pairs for side in (pad, pad - extra)]
            yield _products(self._weight.index, functional.pad(g, sides), kept, self._windows)
        yield from row_gradients(self._bias, lambda: g.flatten(2).sum(2))
