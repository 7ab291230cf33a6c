"""`padded_linear`: a linear layer on memory that is padded to whole cache lines.

MKL multiplies narrow matrices (13 features, for example) in groups of rows, so the rounding of a
row depends on its position in the group. Padding with zeros to multiples of 16 values avoids this
and changes no product.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["padded_linear"]

_UNIT = 16


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` of x [..., k] and weight [m, k], computed on padded copies."""
    m, k = weight.shape
    right, below = -k % _UNIT, -m % _UNIT
    return functional.linear(
        functional.pad(x, (0, right)),
        functional.pad(weight, (0, right, 0, below)),
        None if bias is None else functional.pad(bias, (0, below)),
    )[..., :m]
