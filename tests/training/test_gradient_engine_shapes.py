"""The fast engine with random layer options and sizes."""

from __future__ import annotations

import itertools

import torch
from gradient_cases import CLASSES, Case, clipped, single_gradients, theta_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.engine import FastGradients
from noisewise.training.engine.patch_products import Geometry

SIZES = st.integers(1, 6)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


class Pooled(nn.Module):
    """A convolution with anything around it, then a classifier for any output size."""

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(outputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(2).mean(2))


def check(case: Case, n: int) -> None:
    model = case.build().double()
    theta = theta_of(model, torch.float64)
    inputs, targets = case.records(n, torch.float64)
    gradients = single_gradients(model, theta, inputs, targets, functional.cross_entropy)
    clip_norm = float(gradients.norm(dim=1).mean())
    engine = FastGradients(model, functional.cross_entropy)
    total = engine.clipped_sum(theta, inputs, targets, clip_norm)
    expected = clipped(gradients, clip_norm)
    assert engine.fallback_reason is None
    assert float((total - expected).norm()) <= 1e-9 * float(expected.norm())


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 5), groups=st.integers(1, 3), width=st.integers(1, 7),
    outputs=st.integers(1, 5), size=st.tuples(SIZES, SIZES), kernel=PAIRS, stride=PAIRS,
    dilation=PAIRS, padding=st.one_of(st.just("same"), st.tuples(SIZES, SIZES)),
    bias=st.booleans(),
)  # fmt: skip
def test_convolutions(
    n: int, groups: int, width: int, outputs: int, size: tuple[int, int], kernel: tuple[int, int],
    stride: tuple[int, int], dilation: tuple[int, int], padding: str | tuple[int, int], bias: bool,
) -> None:  # fmt: skip
    if padding == "same":
        stride = (1, 1)
    else:
        needed = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        if any(s + 2 * p < r for s, p, r in zip(size, padding, needed, strict=True)):
            padding = (needed[0], needed[1])

    def build() -> nn.Module:
        layer = nn.Conv2d(
            groups * width, groups * outputs, kernel, stride, padding, dilation, groups, bias
        )
        return Pooled(layer, groups * outputs)

    check(Case("convolution", build, (groups * width, *size)), n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 6),
    positions=st.lists(st.integers(1, 9), max_size=2),
    widths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    bias=st.booleans(),
)
def test_dense_layers(n: int, positions: list[int], widths: list[int], bias: bool) -> None:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for one, two in itertools.pairwise(widths):
            layers += [nn.Linear(one, two, bias=bias), nn.LayerNorm(two), nn.GELU()]
        features = widths[-1] * torch.Size(positions).numel()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))

    check(Case("dense", build, (*positions, widths[0])), n)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    length=st.integers(1, 8),
    vocabulary=st.integers(1, 5),
    padding=st.booleans(),
)
def test_embeddings(n: int, length: int, vocabulary: int, padding: bool) -> None:
    """Few tokens, so that records repeat them."""

    def build() -> nn.Module:
        table = nn.Embedding(vocabulary, 3, padding_idx=0 if padding else None)
        return nn.Sequential(table, nn.Linear(3, 4), nn.Flatten(), nn.Linear(4 * length, CLASSES))

    check(Case("embedding", build, (length,), tokens=vocabulary), n)


@given(
    size=st.tuples(SIZES, SIZES), kernel=PAIRS, stride=PAIRS, dilation=PAIRS,
    padding=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)  # fmt: skip
def test_a_cropped_kernel_gives_the_same_convolution(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int],
    dilation: tuple[int, int], padding: tuple[int, int],
) -> None:  # fmt: skip
    geometry = Geometry(size, kernel, stride, dilation, padding, 1)
    if min(geometry.out) < 1:
        return
    cropped, (rows, columns) = geometry.cropped()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *size, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, 3, *kernel, dtype=torch.float64, generator=generator)
    whole = functional.conv2d(x, weight, None, stride, padding, dilation)
    part = functional.conv2d(
        x, weight[:, :, rows, columns], None, stride, cropped.padding, dilation
    )
    assert whole.shape == part.shape == (2, 2, *geometry.out)
    assert torch.allclose(whole, part, atol=1e-12)
    assert cropped.out == geometry.out
