"""Records and models for the configs in this folder, one pair for each task.

Run them in this folder:

    noisewise run regression.toml --output runs/regression
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.data import Dataset, dataset_from_arrays, next_tokens


def patients() -> Dataset:
    """442 patients of scikit-learn's diabetes data; the target is a number."""
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True)
    return dataset_from_arrays(20 * inputs, targets / 100, values=True, name="diabetes")


def tumours() -> Dataset:
    """569 tumours of scikit-learn's breast cancer data; the class is 0 or 1."""
    from sklearn.datasets import load_breast_cancer

    inputs, targets = load_breast_cancer(return_X_y=True)
    scaled = (inputs - inputs.mean(0)) / inputs.std(0)  # the data are public
    return dataset_from_arrays(scaled, targets, n_classes=2, name="tumours")


def tagged() -> Dataset:
    """Synthetic records with four labels, each of which is there or not."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1200, 8))
    labels = (inputs @ rng.normal(size=(8, 4)) + 0.3 * rng.normal(size=(1200, 4))) > 0
    return dataset_from_arrays(inputs, labels, values=True, name="labels")


def squares() -> Dataset:
    """Synthetic images with a bright square; the target is a class for each pixel."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 90, (600, 1, 12, 12), dtype=np.uint8)
    masks = np.zeros((600, 12, 12), np.int64)
    for image, mask, (row, column) in zip(images, masks, rng.integers(0, 7, (600, 2)), strict=True):
        image[0, row : row + 5, column : column + 5] += 120
        mask[row : row + 5, column : column + 5] = 1
    return dataset_from_arrays(images, masks, values=True, name="squares")


def pixelwise(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """A small convolutional network with a logit for each class and pixel."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, n_classes, 3, padding=1)
    )


def text() -> Dataset:
    """This file as a text: the target of each byte is the next one."""
    content = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    inputs, targets = next_tokens(content, length=16, stride=4)
    return dataset_from_arrays(inputs, targets, values=True, name="text")


class NextByte(nn.Module):
    """An embedding of each byte and of the one before, and a layer with a logit for each byte."""

    def __init__(self, input_shape: tuple[int, ...], n_classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_classes, width)
        self.hidden = nn.Linear(2 * width, 64)
        self.last = nn.Linear(64, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, length] -> [b, length, classes]."""
        now = self.embedding(tokens)
        before = torch.cat([torch.zeros_like(now[:, :1]), now[:, :-1]], dim=1)
        outputs: Tensor = self.last(self.hidden(torch.cat([now, before], dim=-1)).relu())
        return outputs
