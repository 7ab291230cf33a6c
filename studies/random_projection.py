"""Random projections of pixels, for heads with few parameters; see `utility.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Projection(nn.Module):
    """Pixels minus 1/2, times a fixed random matrix.

    Args:
        pixels: number of numbers in a record.
        width: number of features.
    """

    def __init__(self, pixels: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("matrix", torch.randn(pixels, width, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [b, width] of images [b, ...]."""
        # Products of single rows: the bits of a record do not depend on the others.
        return ((images.flatten(1) - 0.5).unsqueeze(2) * self.matrix).sum(1)


def project(input_shape: Sequence[int], width: int) -> nn.Module:
    """The map of a config with ``features.name = "random_projection:project"``."""
    return Projection(torch.Size(input_shape).numel(), width)
