"""Norms of public records only, and as one backward pass for each record gives them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import noisewise as nw
from noisewise.errors import InvalidValueError


def test_nothing_is_computed_without_the_declaration() -> None:
    class Touched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the model was called")

    for declared in (False, None, "yes", 1):
        with pytest.raises(InvalidValueError, match="public"):
            nw.gradient_norms(
                Touched(2, 2),
                torch.ones(3, 2),
                torch.zeros(3).long(),
                public=declared,  # type: ignore
            )


def test_norms_are_those_of_the_closed_form() -> None:
    """For one output and the squared error: 2 |r| ||(x, 1)||."""
    model, inputs, targets = nn.Linear(3, 1), torch.randn(20, 3), torch.randn(20, 1)
    inputs[4] = math.nan
    norms = nw.gradient_norms(model, inputs, targets, nn.functional.mse_loss, public=True)
    residual = (model(inputs) - targets).detach()[:, 0].abs()
    expected = 2 * residual * torch.cat([inputs, torch.ones(20, 1)], 1).norm(dim=1)
    keep = torch.arange(20) != 4
    torch.testing.assert_close(torch.tensor(norms.norms), expected[keep].sort().values)
    assert norms.broken == 1
    assert norms.clipped_share(norms.quantile(0.75)) == pytest.approx(0.25, abs=0.05)
    assert list(norms.quantiles.values()) == sorted(norms.quantiles.values())
    few = nw.gradient_norms(model, inputs, targets, nn.functional.mse_loss, public=True, limit=3)
    assert len(few.norms) == 3


def test_no_records_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="inputs"):
        nw.gradient_norms(nn.Linear(2, 2), torch.ones(0, 2), torch.zeros(0).long(), public=True)
