"""The distribution of gradient norms on public records, to choose a clipping norm c from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError
from noisewise.training.gradients import Loss
from noisewise.training.inputs import Inputs, call_arguments, count_records, output_of, select
from noisewise.training.parameters import check_model

__all__ = ["GradientNorms", "gradient_norms"]

_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class GradientNorms:
    """Norms of per-record gradients on public records.

    Attributes:
        norms: of the records whose gradient is finite, sorted.
        broken: number of records whose gradient is NaN or infinite.
    """

    norms: tuple[float, ...]
    broken: int

    @property
    def quantiles(self) -> Mapping[float, float]:
        """The norm below which a share of the records lies, for 5 %, 25 %, 50 %, 75 % and 95 %."""
        return {share: self.quantile(share) for share in _SHARES}

    def quantile(self, share: float) -> float:
        """The norm below which a share of the records lies; NaN without records."""
        return float(np.quantile(self.norms, share)) if self.norms else float("nan")

    def clipped_share(self, clip_norm: float) -> float:
        """The share of the records that a clipping norm shortens."""
        return float(np.mean(np.array(self.norms) > clip_norm)) if self.norms else float("nan")


def gradient_norms(
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor,
    loss: Loss = nn.functional.cross_entropy,
    *,
    public: bool = False,
    limit: int = 1000,
) -> GradientNorms:
    """Compute the norm of each record's gradient at the model's current parameters.

    The median is a usual choice of ``clip_norm``. Norms of private records disclose those records,
    and a clipping norm that was chosen from them is not covered by any budget.

    Args:
        model: at the parameters to look at, for example the initial ones.
        inputs: of public records: a tensor, a tuple or a mapping of tensors.
        targets: of the same records.
        loss: mean loss of a batch.
        public: True declares that the records are public; without it nothing is computed.
        limit: largest number of records; the first ones are used.

    Raises:
        InvalidValueError: the records are not declared public, or there are none.
        UnsupportedModelError: the model has trainable BatchNorm.

    Example:
        >>> model, inputs = nn.Linear(3, 2), torch.rand(50, 3)
        >>> norms = gradient_norms(model, inputs, torch.zeros(50, dtype=torch.int64), public=True)
        >>> norms.clipped_share(norms.quantile(0.5))
        0.5
    """
    if public is not True:
        raise InvalidValueError(
            "public",
            public,
            "must be True, which declares that these records are public: norms of private records "
            "disclose them and no budget would be charged",
        )
    n_records = min(count_records(inputs), positive_int("limit", limit))
    if n_records == 0:
        raise InvalidValueError("inputs", "0 records", "must hold at least one record")
    check_model(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = []
    for row in range(n_records):
        arguments, keywords = call_arguments(select(inputs, slice(row, row + 1)))
        value = loss(output_of(model(*arguments, **keywords)), targets[row : row + 1])
        gradients = torch.autograd.grad(value, trainable, allow_unused=True)
        squares = [float(g.double().square().sum()) for g in gradients if g is not None]
        norms.append(math.sqrt(sum(squares)) if math.isfinite(sum(squares)) else math.nan)
    finite = [norm for norm in norms if math.isfinite(norm)]
    return GradientNorms(tuple(sorted(finite)), len(norms) - len(finite))
