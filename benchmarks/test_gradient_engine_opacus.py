"""Compare our clipped sums with those of Opacus.

pip install 'noisewise[bench]'; python -m pytest benchmarks/test_gradient_engine_opacus.py
"""

from __future__ import annotations

import copy

import opacus
import pytest
import torch
from gradient_cases import CASES, Case, theta_of
from torch import nn
from torch.nn import functional

from noisewise.training.engine import FastGradients
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout

pytestmark = pytest.mark.filterwarnings("ignore")

# No case with a padding row: Opacus computes a gradient for it, torch does not.
NAMES = ["mlp", "linear on short sequences", "conv 3x3", "conv stride", "conv groups",
         "conv dilation", "conv1d", "group norm", "layer norm", "instance norm 2d",
         "embedding of one token"]  # fmt: skip


def opacus_sum(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, clip: float):
    """The clipped sum to which Opacus' DPOptimizer adds noise."""
    wrapped = opacus.GradSampleModule(copy.deepcopy(model))
    optimiser = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=len(inputs),
    )
    functional.cross_entropy(wrapped(inputs), targets).backward()
    optimiser.clip_and_accumulate()
    names = ParameterLayout.of(model).names
    sums = {name: p.summed_grad for name, p in wrapped._module.named_parameters()}
    return torch.cat([sums[name].double().flatten() for name in names])


def check(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, clip: float) -> None:
    engine = FastGradients(model, functional.cross_entropy)
    theta = theta_of(model, torch.float32)
    total = engine.clipped_sum(theta, inputs, targets, clip)
    expected = opacus_sum(model, inputs, targets, clip)
    assert engine.fallback_reason is None
    # The tolerance allows for Opacus dividing by the norm plus 1e-6.
    assert float((total - expected).norm()) < 2e-5 * float(expected.norm())


@pytest.mark.parametrize("clip", [0.5, 100.0])
@pytest.mark.parametrize("name", NAMES)
def test_opacus_agrees(name: str, clip: float) -> None:
    case: Case = next(case for case in CASES if case.name == name)
    check(case.build(), *case.records(6, torch.float32), clip)


def test_opacus_agrees_on_the_papers_cnn() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 1, 28, 28), torch.randint(0, 10, (20,))
    check(make_model("cnn", (1, 28, 28), 10, seed=0), inputs, targets, 1.0)
