"""The contract of the fast engine: it agrees with one ordinary backward pass for each record."""

from __future__ import annotations

import torch
from gradient_cases import Case, clipped, single_gradients, theta_of
from torch import Tensor
from torch.nn import functional

from noisewise.training.engine import FastGradients
from noisewise.training.gradients import Loss

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def disagreement(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


class Contract:
    """A model, records and their expected gradients.

    Args:
        case: gives model and records.
        dtype: of the model.
        n: number of records.
        loss: of a batch.
    """

    def __init__(
        self, case: Case, dtype: torch.dtype, n: int = 5, loss: Loss = functional.cross_entropy
    ) -> None:
        self.model = case.build().to(dtype)
        self.theta = theta_of(self.model, dtype)
        self.records = case.records(n, dtype)
        self.gradients = single_gradients(self.model, self.theta, *self.records, loss)
        self.engine = FastGradients(self.model, loss)

    def check(self) -> None:
        """Compare sums without clipping, with some records clipped, and with all of them."""
        norms = self.gradients.norm(dim=1)
        for clip_norm in (None, 1e6, float(norms.median()), 0.01 * float(norms.mean())):
            total = self.engine.clipped_sum(self.theta, *self.records, clip_norm)
            assert total.dtype == torch.float64
            assert total.shape == self.theta.shape
            expected = clipped(self.gradients, clip_norm)
            assert disagreement(total, expected) < TOLERANCE[self.theta.dtype], clip_norm
        assert self.engine.fallback_reason is None


def compare(
    case: Case, dtype: torch.dtype, n: int = 5, loss: Loss = functional.cross_entropy
) -> None:
    Contract(case, dtype, n, loss).check()
