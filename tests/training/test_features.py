"""Feature maps: fixed, public, record by record, computed once and cached."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from noisewise.data import load_dataset
from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import load_config
from noisewise.experiments.feature_records import map_dataset
from noisewise.experiments.prepare import prepare
from noisewise.training.feature_cache import cached_features
from noisewise.training.feature_checks import feature_vector
from noisewise.training.features import Features, make_features
from noisewise.training.scattering import Scattering

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
RECORDS = np.random.default_rng(0).random((300, 1, 8, 8), dtype=np.float32)


class Reference(nn.Module):
    """Scattering by brute force: circular convolutions with the filters, pixel by pixel."""

    def __init__(self, scattering: Scattering) -> None:
        super().__init__()
        self.inner = scattering

    def forward(self, pictures: Tensor) -> Tensor:
        padded = self.inner._padded(pictures.double())
        scales, angles = self.inner.scales, self.inner.angles
        spectra = [self.inner.get_buffer(f"wavelets{s}").double() for s in range(scales)]
        first = {
            (s, a): _convolved(padded, spectra[s][a]) for s in range(scales) for a in range(angles)
        }
        paths = [padded, *first.values()]
        for s in range(scales):
            for a in range(angles):
                for t in range(s + 1, scales):
                    paths += [_convolved(first[s, a], spectra[t][b]) for b in range(angles)]
        rows = self.inner.get_buffer("rows0").double()
        columns = self.inner.get_buffer("columns0").double()
        return torch.stack([rows @ path @ columns.T for path in paths], dim=2).flatten(1, 2)


def _convolved(signal: Tensor, spectrum: Tensor) -> Tensor:
    return torch.fft.ifft2(torch.fft.fft2(signal) * spectrum).abs()


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_scattering_agrees_with_convolutions_at_full_resolution(scales: int) -> None:
    """Subsampling between the layers loses a little: the filters are not quite band-limited."""
    scattering = Scattering(32, 28, scales=scales, angles=4)
    pictures = torch.rand(2, 3, 32, 28, generator=torch.Generator().manual_seed(1))
    found, expected = scattering(pictures), Reference(scattering)(pictures)
    assert found.shape == (2, 3 * scattering.channels, 32 // 2**scales, 28 // 2**scales)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 0.02
    scattering.wavelets0.mul_(1.2)  # a planted flaw shows
    assert float((scattering(pictures) - expected).norm() / expected.norm()) > 0.05


def test_scattering_ignores_small_shifts_more_than_pixels_do() -> None:
    picture = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(2))
    moved = torch.roll(picture, 1, dims=3)
    scattering = Scattering(32, 32)
    changes = [
        float((f(moved) - f(picture)).norm() / f(picture).norm())
        for f in (scattering, nn.Flatten())
    ]
    assert changes[0] < 0.5 * changes[1]


@pytest.mark.parametrize("name", ["identity", "scattering"])
def test_features_have_unit_norm_and_depend_on_the_record_alone(name: str, tmp_path: Path) -> None:
    features = make_features(name, (1, 8, 8))
    whole = compute(features, RECORDS, tmp_path / "whole")
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)
    order = np.random.default_rng(1).permutation(300)[:171]
    others = compute(features, RECORDS[order], tmp_path / "others", workers=2)
    assert np.array_equal(whole[order], others)


def compute(
    features: Features, records: NDArray[np.float32], folder: Path, **options: Any
) -> NDArray[np.float32]:
    digest = hashlib.sha256(records.tobytes()).hexdigest()
    return cached_features(
        features, len(records), lambda a, b: records[a:b], digest, folder, **options
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "wavelets"}, "must be one of identity, scattering"),
        ({"name": "scattering", "options": {"depth": 2}}, "must fit scattering"),
        ({"name": "scattering", "input_shape": (64,)}, "channels, height, width"),
        ({"name": "scattering", "options": {"groups": 7}}, "must divide the 81 channels"),
        ({"name": "scattering", "input_shape": (1, 2, 8)}, "at least 2"),
        ({"name": "identity", "normalise": "batch"}, "must be one of unit, none.*cost budget"),
        ({"name": "identity", "mean": [0.0] * 3}, "features.mean = '3 numbers'.*of the 64 feat"),
        ({"name": "identity", "mean": [float("nan")]}, "features.mean = .*must be finite"),
        ({"name": "identity", "std": [0.0]}, "features.std = .*must be positive"),
        ({"name": nn.Flatten(), "weights": "x.pt"}, "features.weights = 'x.pt': must not be given"),
        ({"name": nn.Flatten(), "options": {"a": 1}}, "features.options = .*must not be given"),
        ({"name": "identity", "weights": "x.pt"}, "takes no weights"),
    ],
)
def test_bad_values_are_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make_features(**{"input_shape": (1, 8, 8)} | arguments)


def encoder(input_shape: tuple[int, ...], weights: dict[str, Tensor]) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    module.load_state_dict(weights)
    return module


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_are_pinned_by_their_hash(suffix: str, tmp_path: Path) -> None:
    state = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).state_dict()
    path = tmp_path / f"encoder{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"{__name__}:encoder"
    features = make_features(name, (1, 8, 8), weights=path, sha256=digest)
    assert features.width == 5
    with pytest.raises(InvalidValueError, match=r"features.sha256 = None: must be the SHA-256"):
        make_features(name, (1, 8, 8), weights=path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"features\.sha256 = .*must be that of"):
        make_features(name, (1, 8, 8), weights=path, sha256=digest)


def normalised(input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64))


def test_an_encoder_may_have_batch_norm_in_evaluation_mode() -> None:
    """Its counter of batches is a tensor without axes."""
    features = make_features(f"{__name__}:normalised", (1, 8, 8))
    assert features.width == 64
    assert not features.module.training


def test_a_hash_without_a_file_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"features.sha256 = 'ab': needs features.weights"):
        make_features("identity", (1, 8, 8), sha256="ab")


def test_the_place_in_memory_changes_no_bit() -> None:
    """A product rounds by the alignment of its factors; a copy has always the same."""
    linear = nn.Linear(1000, 10).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    linear.weight.copy_(torch.randn(10, 1000, generator=generator))
    record = torch.randn(1, 1000, generator=generator)
    views = [torch.zeros(1100)[start : start + 1000].reshape(1, 1000) for start in range(64)]
    for view in views:
        view.copy_(record)
    found = {feature_vector(linear, view, True).numpy().tobytes() for view in views}
    assert len(found) == 1


def test_the_declared_hash_is_that_of_the_declaration() -> None:
    """Unlike the identity, no number that a processor rounds is in it."""
    digest = make_features("scattering", (1, 8, 8), options={"angles": 4}).declared_sha256
    text = (
        '{"input_shape": [1, 8, 8], "name": "scattering", "normalise": "unit", '
        '"options": {"angles": 4}, "sha256": null}'
    )
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_torch_module_is_copied_and_used_as_it_is() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 5))
    features = make_features(module, (1, 8, 8))
    assert module.training
    assert module[2].weight.requires_grad
    module.eval()
    with torch.no_grad():
        vector = module(torch.from_numpy(RECORDS[:1]))[0]
        assert np.allclose(features.of_record(RECORDS[0]), vector / vector.norm(), atol=1e-6)
        assert make_features(module, (1, 8, 8)).declared_sha256 == features.declared_sha256
        module[2].bias += 1e-3  # another encoder
    other = make_features(module, (1, 8, 8))
    assert other.declared_sha256 != features.declared_sha256
    assert other.identity != features.identity
    assert features.name == other.name == "Sequential"


def test_declared_constants_scale_the_features() -> None:
    mean, std = list(np.linspace(0, 1, 64)), [2.0]
    features = make_features("identity", (1, 8, 8), mean=mean, std=std, normalise="none")
    expected = (RECORDS[0].ravel() - np.array(mean, np.float32)) / 2
    assert np.allclose(features.of_record(RECORDS[0]), expected, atol=1e-7)
    unit = make_features("identity", (1, 8, 8), mean=mean, std=std).of_record(RECORDS[0])
    assert np.allclose(unit, expected / np.linalg.norm(expected), atol=1e-6)
    plain = make_features("identity", (1, 8, 8), normalise="none")
    other = make_features("identity", (1, 8, 8), mean=[0.5], normalise="none")
    assert len({f.declared_sha256 for f in (features, plain, other)}) == 3
    assert len({f.identity for f in (features, plain, other)}) == 3


def test_a_config_has_constants_too() -> None:
    fields = {"features.name": "identity", "features.normalise": "none"}
    plain = prepare(load_config(DEMO, fields), "NoiseWise", 0)
    config = load_config(DEMO, fields | {"features.mean": [0.5], "features.std": [0.25]})
    scaled = prepare(config, "NoiseWise", 0)
    for one, other in zip(plain.clients, scaled.clients, strict=True):
        expected = (one.data.train.inputs - 0.5) / 0.25
        assert np.allclose(other.data.train.inputs, expected, atol=1e-6)


def test_several_records_are_mapped_one_by_one() -> None:
    features = make_features("scattering", (1, 8, 8))
    rows = features.of_records(RECORDS[:5])
    assert np.array_equal(rows, np.stack([features.of_record(record) for record in RECORDS[:5]]))


def test_other_options_are_another_identity() -> None:
    kinds = [
        make_features("identity", (1, 8, 8)),
        make_features("identity", (1, 8, 8), normalise="none"),
        make_features("identity", (1, 4, 16)),
        make_features("scattering", (1, 8, 8)),
        make_features("scattering", (1, 8, 8), options={"angles": 4}),
    ]
    assert len({features.identity for features in kinds}) == len(kinds)
    assert make_features("identity", (1, 8, 8)).identity == kinds[0].identity


def test_a_config_with_features_trains_the_head_only() -> None:
    config = load_config(DEMO, {"features.name": "scattering", "features.options": {"angles": 4}})
    prepared = prepare(config, "NoiseWise", 0)
    width = make_features("scattering", (1, 8, 8), options={"angles": 4}).width
    assert len(prepared.initial_parameters) == 10 * (width + 1)
    assert prepared.clients[0].data.train.inputs.shape[1:] == (width,)


def test_a_mapped_dataset_keeps_targets_and_order(tmp_path: Path) -> None:
    digits = load_dataset("digits")
    mapped = map_dataset(digits, make_features("identity", (1, 8, 8)), folder=tmp_path)
    assert np.array_equal(mapped.train.targets, digits.train.targets)
    flat = digits.train.arrays()[0].reshape(len(digits.train), -1)
    assert np.allclose(
        mapped.train.inputs, flat / np.linalg.norm(flat, axis=1, keepdims=True), atol=1e-6
    )


class FrozenParts(nn.Module):
    """Keeps its normalisation fixed by an own `train`, which often returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def train(self, mode: bool = True) -> FrozenParts:
        super().train(mode)
        self.norm.eval()
        return None  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1))  # type: ignore[no-any-return]


def frozen_parts(input_shape: tuple[int, ...]) -> nn.Module:
    return FrozenParts()


@pytest.mark.parametrize("kind", [f"{__name__}:frozen_parts", FrozenParts()])
def test_an_own_train_may_return_nothing(kind: Any) -> None:
    assert make_features(kind, (1, 8, 8)).width == 64


class Packed(nn.Module):
    """Its state has a tuple with a type, as that of a quantised layer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.packed = (torch.full((64,), factor), torch.qint8, 3)

    def get_extra_state(self) -> Any:
        return self.packed

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.packed[0]


def test_the_state_of_an_encoder_may_have_more_than_tensors() -> None:
    one, same, other = (make_features(Packed(factor), (1, 8, 8)) for factor in (1.0, 1.0, 2.0))
    assert one.declared_sha256 == same.declared_sha256 != other.declared_sha256


class Clamped(nn.Module):
    """Differs only for values that no synthetic record has."""

    def __init__(self, limit: float, names: frozenset[str] = frozenset("abcdef")) -> None:
        super().__init__()
        self.limit, self.names, self.unknown = limit, names, object()

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).clamp(-self.limit, self.limit)


def clamped(input_shape: tuple[int, ...], limit: float) -> nn.Module:
    return Clamped(limit)


def closure(input_shape: tuple[int, ...], limit: float) -> nn.Module:
    return Closure(lambda x: x.flatten(1).clamp(-limit, limit))


class Closure(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["clamped", "closure", "module"])
def test_encoders_that_differ_beyond_the_synthetic_records_share_no_cache(
    kind: str, tmp_path: Path
) -> None:
    records = 10 * RECORDS

    def features_of(limit: float) -> Features:
        if kind == "module":
            return make_features(Clamped(limit), (1, 8, 8), normalise="none")
        options = {"limit": limit}
        return make_features(f"{__name__}:{kind}", (1, 8, 8), options=options, normalise="none")

    for limit in (2.0, 3.0):
        values = compute(features_of(limit), records, tmp_path)
        assert np.array_equal(values, records.reshape(300, -1).clip(-limit, limit))
    assert features_of(2.0).identity == features_of(2.0).identity


def test_changed_code_is_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from torch import nn\nclass Base(nn.Module):\n    def forward(self, x):\n"
        "        return x.flatten(1).clamp(-{0}, {0})\nclass Encoder(Base):\n    pass\n"
        "def encoder(input_shape):\n    return Encoder()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for limit in (2, 3, 2):
        (tmp_path / "changed_encoder.py").write_text(code.format(limit))
        monkeypatch.delitem(sys.modules, "changed_encoder", raising=False)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        found.append(make_features("changed_encoder:encoder", (1, 8, 8)).identity)
    assert found[0] == found[2] != found[1]


def test_the_identity_is_the_same_in_every_process() -> None:
    """Python orders a set, and places an object, in another way in each process."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_features import Clamped, make_features\n"
        "print(make_features(Clamped(2.0), (1, 8, 8)).identity)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


class Bytes(nn.Module):
    input_range = (0.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def test_records_of_another_type_with_the_same_bytes_share_no_cache(tmp_path: Path) -> None:
    features = make_features(Bytes(), (4,), normalise="none")
    numbers = np.array([[0, 1, 1, 0], [1, 0, 0, 0]], np.uint8)
    for inputs, expected in ((numbers, numbers / np.float32(255)), (numbers.astype(bool), numbers)):
        dataset = Dataset("own", Examples(inputs, np.array([0, 1])), None, 2)
        mapped = map_dataset(dataset, features, folder=tmp_path)
        assert np.array_equal(mapped.train.inputs, expected)


def two_arrays() -> Dataset:
    inputs = {"a": np.zeros((9, 3), np.float32), "b": np.zeros((9, 2), np.float32)}
    return Dataset("own", Examples(inputs, np.arange(9) % 3), None, 3)


def test_records_of_several_arrays_are_refused_in_one_line() -> None:
    config = load_config(DEMO, {"data.name": f"{__name__}:two_arrays", "features.name": "identity"})
    with pytest.raises(InvalidValueError, match=r"inputs = .*must be one array"):
        prepare(config, "NoiseWise", 0)
