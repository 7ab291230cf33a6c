"""Compare our wavelet scattering with that of kymatio, in values and time.

pip install 'noisewise[bench]'; python -m pytest -s benchmarks/test_scattering_kymatio.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

# `kymatio.torch` fails with current versions of scipy; this part of it works.
from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
from torch import Tensor

from noisewise.training.scattering import Scattering

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# height, width, scales, angles, channels
SETTINGS = [
    (28, 28, 2, 8, 1),
    (32, 32, 2, 8, 3),
    (32, 32, 3, 8, 3),
    (32, 24, 2, 6, 1),
    (28, 28, 1, 4, 1),
    (31, 45, 2, 5, 1),
    (64, 64, 4, 4, 1),
    (8, 8, 1, 8, 1),
]


@pytest.mark.parametrize(("height", "width", "scales", "angles", "channels"), SETTINGS)
def test_kymatio_agrees(height: int, width: int, scales: int, angles: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(height)
    pictures = torch.rand(3, channels, height, width, generator=generator)
    theirs = ScatteringTorch2D(scales, (height, width), L=angles)
    ours = Scattering(height, width, scales=scales, angles=angles)
    expected, found = theirs(pictures).flatten(1, 2), ours(pictures)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    # With other wavelets they would not agree.
    other = Scattering(height, width, scales=scales, angles=angles)
    other.get_buffer("wavelets0").mul_(1.01)
    assert float((other(pictures) - expected).norm() / expected.norm()) > 1e-4
    own_time, their_time = _seconds(ours, pictures[:1]), _seconds(theirs, pictures[:1])
    print(
        f"\n{channels} x {height} x {width}, J = {scales}, L = {angles}: ours "
        f"{own_time * 1e3:.2f} ms for one picture, kymatio {their_time * 1e3:.2f} ms, "
        f"ratio {own_time / their_time:.2f}"
    )


def _seconds(scattering: Callable[[Tensor], Tensor], pictures: Tensor, repeats: int = 10) -> float:
    """Smallest processor time of one call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        scattering(pictures)
        times.append(time.process_time() - start)
    return min(times)
