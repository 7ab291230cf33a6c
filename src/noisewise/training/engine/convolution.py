"""The layer rule of convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
from noisewise.training.engine.patch_products import (
    Geometry,
    PatchProducts,
    Taps,
    full_patches,
)
from noisewise.training.engine.pieces import Outer, Piece, Scatter

__all__ = ["Convolution"]

_LARGE = 50  # with at least this many output positions, channels-last is faster


class Convolution(LayerRule):
    """Conv1d (as an image of height 1) and Conv2d."""

    def __init__(
        self, module: nn.Conv1d | nn.Conv2d, values: Values, options: LayerOptions
    ) -> None:
        self._weight, self._bias = values["weight"], values.get("bias")
        self._kind = type(module).__name__
        self._line = isinstance(module, nn.Conv1d)
        self._channels_last = options.channels_last and not self._line
        self._groups, self._mode = module.groups, module.padding_mode
        self._stride, self._dilation = self._pair(module.stride), self._pair(module.dilation)
        self._kernel = self._pair(module.kernel_size)
        left, right, *rest = module._reversed_padding_repeated_twice
        top, bottom = rest or (0, 0)
        # The convolution itself pads zeros of equal width on both sides; other padding comes first.
        native = self._mode == "zeros" and left == right and top == bottom
        self._pad = [] if native else [left, right, *rest]
        self._padding = (top, left) if native else (0, 0)
        self._geometries: dict[torch.Size, tuple[Geometry, Taps]] = {}

    def _pair(self, values: tuple[int, ...]) -> tuple[int, int]:
        return (1, values[0]) if self._line else (values[0], values[1])

    def _geometry(self, image: Tensor) -> tuple[Geometry, Taps]:
        """The geometry without unused taps of the kernel, and the slices of the used taps."""
        size = image.shape[2:]
        if size not in self._geometries:
            self._geometries[size] = Geometry(
                (size[0], size[1]), self._kernel, self._stride, self._dilation, self._padding,
                self._groups,
            ).cropped()  # fmt: skip
        return self._geometries[size]

    def run(self, x: Tensor) -> Run:
        """See `LayerRule`."""
        if x.dim() != (3 if self._line else 4):
            raise NotCoveredError(f"{self._kind} receives an input without a batch dimension")
        if self._pad:
            mode = "constant" if self._mode == "zeros" else self._mode
            x = functional.pad(x, self._pad, mode=mode)
        weight = self._weight.tensor
        if self._line:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        geometry, taps = self._geometry(x)
        if geometry.kernel != self._kernel:
            weight = weight[:, :, taps[0], taps[1]]
        if self._channels_last:
            large = geometry.positions >= _LARGE
            x = x.to(memory_format=torch.channels_last) if large else x.contiguous()
        bias, rule = tensor_of(self._bias), partial(self._gradients, geometry, taps)
        stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
        if self._line:  # not a squeezed conv2d: its output would be a view
            out = functional.conv1d(
                x[:, :, 0], weight[:, :, 0], bias, stride[1], padding[1], dilation[1], self._groups
            )
        else:
            out = functional.conv2d(x, weight, bias, stride, padding, dilation, self._groups)
        return Run(x, out, rule)

    def _gradients(
        self, geometry: Geometry, taps: Taps, kept: Tensor, g: Tensor
    ) -> Iterator[Piece]:
        groups, size = geometry.groups, geometry.kernel[0] * geometry.kernel[1]
        channels, outputs = kept.shape[1] // groups, self._weight.tensor.shape[0] // groups
        g = g.unsqueeze(2) if self._line else g
        weight, bias = self._weight.index, self._bias
        ghost = prefer_ghost(len(g), geometry.positions, channels * size, outputs)
        if weight is None or ghost or groups > 1:
            if weight is not None:
                patches = full_patches(kept, geometry, torch.float64 if ghost else kept.dtype)
                by_position = g.reshape(len(g), groups, outputs, -1).transpose(2, 3)
                yield Outer(weight, patches, by_position, self._scatter(taps, "gmijc"))
        else:
            yield PatchProducts(weight, kept, g, geometry, partial(self._scatter, taps))
        yield from row_gradients(bias, lambda: g.sum(dim=(2, 3)))

    def _scatter(self, taps: Taps, order: str) -> Scatter:
        """Adds values, whose axes are a permutation of "gmcij" (i, j: kernel), to the used taps."""
        m, c = self._weight.tensor.shape[:2]
        shape = (self._groups, m // self._groups, c, *self._kernel)
        kernel = taps[0].stop - taps[0].start, taps[1].stop - taps[1].start
        sizes = dict(zip("gmcij", (*shape[:3], *kernel), strict=True))
        as_computed = [sizes[axis] for axis in order]
        to_parameter = [order.index(axis) for axis in "gmcij"]

        def scatter(values: Tensor, part: Tensor) -> None:
            weight = part.view(shape)
            if kernel != self._kernel:
                weight = weight[..., taps[0], taps[1]]
            weight.add_(values.view(as_computed).permute(to_parameter))

        return scatter
