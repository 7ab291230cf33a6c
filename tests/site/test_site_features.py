"""`[features]` in a site's file: pinned by the site, computed once, one record at a time."""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from site_cases import METRICS, make_site
from torch import Tensor, nn

from noisewise.errors import InvalidValueError
from noisewise.experiments.config import FeaturesConfig
from noisewise.privacy.ledger import Ledger
from noisewise.site.check_site import check_site
from noisewise.site.feature_rows import cached_rows
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_features import FeaturesPart
from noisewise.site.site_file import load_site
from noisewise.training.feature_checks import probe_records
from noisewise.training.features import Features, make_features
from noisewise.training.models import make_model

SHAPE, WIDTH = (1, 8, 8), 7
RECORDS = np.random.default_rng(5).random((150, *SHAPE), dtype=np.float32)
NAN, ERROR, WIDE, BAD = 3.25, 4.25, 5.25, (3.25, 4.25, 5.25)
"""A record with such a first value: its features are NaN, an error, or too many."""


class Encoder(nn.Module):
    """A linear encoder that some records break, and that counts calls with records in a file."""

    def __init__(self, calls: str = "", seconds: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(SHAPE), WIDTH)
        self.calls, self.seconds = calls, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.calls and not any(torch.equal(x[0], record) for record in probe_records(SHAPE)):
            with open(self.calls, "ab") as file:
                file.write(b".")
        time.sleep(self.seconds)
        first = float(x.flatten()[0])
        if first == ERROR:
            raise RuntimeError(f"the secret {first}")
        vector = self.linear(x.flatten(1))
        x.fill_(first)  # an encoder that overwrites its input
        vector = vector * math.nan if first == NAN else vector
        return vector.repeat(1, 2) if first == WIDE else vector


def encoder(input_shape: tuple[int, ...], weights: dict[str, Tensor], **options: Any) -> nn.Module:
    module = Encoder(**options)
    module.load_state_dict(weights)
    return module


def write_weights(path: Path, seed: int = 0) -> str:
    """Write weights of `Encoder`; returns their SHA-256."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        "linear.weight": torch.randn(WIDTH, math.prod(SHAPE), generator=generator),
        "linear.bias": torch.randn(WIDTH, generator=generator),
    }
    save_file(state, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def site_with(
    folder: Path, *, records: int = 60, options: str = "{}", changes: dict[str, str] | None = None
) -> Path:
    """A site whose map is `encoder`, with weights beside its file."""
    site = make_site(folder, records=records, rounds=6)
    digest = write_weights(folder / "encoder.safetensors")
    text = site.read_text().replace("[1, 8, 8]", f"[{WIDTH}]")
    text += (
        f'\n[features]\nname = "{__name__}:encoder"\ninput_shape = [1, 8, 8]\noptions = {options}\n'
        f'weights = "encoder.safetensors"\nsha256 = "{digest}"\n'
    )
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    site.write_text(text)
    return site


def counted(folder: Path, **more: Any) -> tuple[Path, Callable[[], int]]:
    """A site, and the number of records that its encoder mapped since the last question."""
    log = folder / "calls"
    site = site_with(folder, options=f'{{calls = "{log}"}}', **more)

    def calls() -> int:
        number = log.stat().st_size if log.exists() else 0
        log.unlink(missing_ok=True)
        return number

    return site, calls


def head(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    model = make_model("softmax", (WIDTH,), 10, seed=seed)
    return {name: part.detach().numpy() for name, part in model.named_parameters()}


def instruct(site: Path, number: int = 1) -> dict[str, NDArray[np.float32]] | None:
    asked = Instruction(number, 0.2, head())
    return answer_instruction(lambda: site, lambda: asked, number)


def charges(site: Path) -> list[tuple[str, str, float, float, int]]:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        entries = ledger.statement().entries
    return [(e.purpose, e.state, e.sample_rate, e.noise_multiplier, e.steps) for e in entries]


def change_records(
    site: Path, change: Callable[[NDArray[np.float32], NDArray[np.int64]], Any]
) -> None:
    with np.load(site.parent / "records.npz") as file:
        inputs, targets = change(file["inputs"], file["targets"])
    np.savez(site.parent / "records.npz", inputs=inputs, targets=targets)


def rows_file(site: Path) -> Path:
    [path] = (site.parent / "site.ledger-features").glob("*.rows")
    return path


# ------------------------------------------------------------------- the site trains the head only


def test_a_site_trains_the_head_on_features(tmp_path: Path) -> None:
    site = site_with(tmp_path)
    data = load_site(site).data()
    assert data.inputs.shape == (60, WIDTH)
    assert torch.allclose(data.inputs.norm(dim=1), torch.ones(60), atol=1e-6)
    update = instruct(site)
    assert update is not None
    assert {name: part.shape for name, part in update.items()} == {
        "1.weight": (10, WIDTH),
        "1.bias": (10,),
    }
    assert len(charges(site)) == 1


@pytest.mark.parametrize("name", ["identity", "scattering"])
def test_built_in_maps_need_no_weights(name: str, tmp_path: Path) -> None:
    width = make_features(name, SHAPE).width
    site = make_site(tmp_path, records=60)
    text = site.read_text().replace("[1, 8, 8]", f"[{width}]")
    site.write_text(f'{text}\n[features]\nname = "{name}"\ninput_shape = [1, 8, 8]\n')
    assert load_site(site).data().inputs.shape == (60, width)


def test_the_noised_accuracy_uses_features_too(tmp_path: Path) -> None:
    site = site_with(tmp_path, changes={"[model]": 'held_out = "records.npz"\n\n[model]'})
    site.write_text(site.read_text() + METRICS.format(noise=5.0, records=60, releases=2))
    assert load_site(site).held_out().inputs.shape == (60, WIDTH)
    assert answer_question(lambda: site, lambda: Question(1, head())) is not None


def test_columns_come_before_features(tmp_path: Path) -> None:
    site = make_site(tmp_path, records=60)
    text = site.read_text().replace("records.npz", "records.csv").replace("[1, 8, 8]", "[2]")
    text += '\n[columns.age]\ntype = "number"\nrange = [0, 100]\nmissing = 50\n'
    text += '\n[columns.mass]\ntype = "number"\nrange = [0, 200]\n'
    site.write_text(f'{text}\n[features]\nname = "identity"\ninput_shape = [2]\n')
    (tmp_path / "records.csv").write_text("age,mass,target\n75,200,1\n100,x,1\n?,50,2\n")
    data = load_site(site).data()
    assert data.inputs.shape == (2, 2)
    site.write_text(site.read_text().replace("[2]", "[3]"))
    with pytest.raises(InvalidValueError, match=r"features.input_shape = \[3\]: must be \[2\]"):
        load_site(site)


def test_the_file_of_the_deployment_page_works(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "features_at_a_site.md"
    part = page.read_text()
    block = textwrap.dedent(re.findall(r"^ *```toml\n(.*?)^ *```", part, re.DOTALL | re.M)[0])
    site = make_site(tmp_path, records=60)
    site.write_text(site.read_text().replace("[1, 8, 8]", "[3969]") + block)
    images = np.zeros((3, 1, 28, 28), np.uint8)
    site.write_text(site.read_text().replace("[data]", "[data]\nimages = true"))
    np.savez(tmp_path / "records.npz", inputs=images, targets=np.arange(3))
    assert load_site(site).data().inputs.shape == (3, 3969)


# ------------------------------------------------------------------- a server cannot choose the map


def test_no_request_has_a_field_for_the_map() -> None:
    assert {field.name for field in fields(Instruction)} == {"round", "learning_rate", "parameters"}
    assert {field.name for field in fields(Question)} == {"round", "parameters"}


def test_parameters_of_another_width_are_refused_at_no_cost(tmp_path: Path) -> None:
    """A server that expects another map sends another head."""
    site = site_with(tmp_path)
    model = make_model("softmax", (WIDTH + 1,), 10, seed=0)
    sent = {name: part.detach().numpy() for name, part in model.named_parameters()}
    assert answer_instruction(lambda: site, lambda: Instruction(1, 0.2, sent), 1) is None
    assert charges(site) == []


def test_the_keys_are_those_of_a_config() -> None:
    keys = set(FeaturesPart.model_fields)
    assert keys == {*FeaturesConfig.model_fields, "input_shape"}


def test_check_shows_hashes_to_compare(tmp_path: Path) -> None:
    site = load_site(site_with(tmp_path))
    assert site.features is not None
    text = check_site(site)
    assert f"{__name__}:encoder, [1, 8, 8] -> {WIDTH}" in text
    assert f"Features as declared: {site.features.declared_sha256};" in text
    assert f"Features as computed: {site.features.identity};" in text
    assert str(tmp_path / "site.ledger-features") in text


# --------------------------------------------------------------------------- faults of the encoder


def hostile(input_shape: tuple[int, ...], kind: str) -> Any:
    linear = nn.Linear(math.prod(input_shape), WIDTH)
    linear.load_state_dict({"weight": torch.ones(WIDTH, 64), "bias": torch.zeros(WIDTH)})
    flat = nn.Sequential(nn.Flatten(), linear)
    if kind == "raises":
        raise RuntimeError("no such\nmodel")
    if kind == "dropout":
        return nn.Sequential(flat, Always(nn.Dropout(0.5)))
    if kind == "batch norm":
        return nn.Sequential(flat, Always(nn.BatchNorm1d(WIDTH)))
    return {"none": None, "nan": nn.Sequential(flat, Times(math.nan))}[kind]


class Always(nn.Module):
    """Keeps its part in training mode."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def train(self, mode: bool = True) -> Always:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.repeat(2, 1))[:1]  # type: ignore[no-any-return]


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def own(kind: str) -> dict[str, str]:
    return {
        ":encoder": ":hostile", "options = {}": f'options = {{kind = "{kind}"}}',
        'weights = "encoder.safetensors"': "", "sha256 =": "# sha256 =",
    }  # fmt: skip


FAULTS: list[tuple[dict[str, str], str]] = [
    ({'weights = "encoder': 'weights = "lost'}, r"features.weights = .*lost.* cannot be read"),
    ({'sha256 = "': 'sha256 = "0'}, r"features.sha256 = .*must be that of"),
    ({"sha256 =": "# sha256 ="}, r"features.sha256 = None: must be the SHA-256"),
    ({'weights = "encoder.safetensors"': ""}, r"features.sha256 = .*needs features.weights"),
    ({f"[{WIDTH}]": "[8]"}, rf"model.input_shape = \[8\]: must be \[{WIDTH}\], the number of feat"),
    (
        {"input_shape = [1, 8, 8]": "input_shape = [8, 8, 8]"},
        r"features.name = .*must take records of shape",
    ),
    ({"input_shape = [1, 8, 8]\n": ""}, r"features.input_shape = None: is missing"),
    ({":encoder": ":nothing"}, r"features.name = .*can be imported"),
    ({"options = {}": "options = {depth = 3}"}, r"features.name = .*must return a torch module"),
    ({"options = {}": 'options = {}\nnormalise = "batch"'}, r"features.normalise = 'batch'"),
    (own("raises"), r"features.name = .*RuntimeError: no such model"),
    (own("none"), r"features.name = .*not NoneType"),
    (own("nan"), r"features.name = .*finite"),
    (own("dropout"), r"features.name = .*evaluation mode"),
    (own("batch norm"), r"features.name = .*evaluation mode"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_fault_of_the_encoder_is_one_line_before_anything_is_charged(
    changes: dict[str, str], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = site_with(tmp_path, changes=changes)
    with pytest.raises(InvalidValueError, match=rf"site.toml: {words}") as caught:
        load_site(site)
    assert "\n" not in str(caught.value)
    assert instruct(site) is None
    assert answer_declaration(lambda: site) is None
    assert "not taking part: " in caplog.text
    assert charges(site) == []
    assert not (tmp_path / "site.ledger-features").exists()


def test_a_byte_of_the_weights_changes_between_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The site refuses at no cost; with the right file again, nothing is computed again."""
    site, calls = counted(tmp_path)
    assert instruct(site, 1) is not None
    assert calls() == 60
    weights = tmp_path / "encoder.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert instruct(site, 2) is None
    assert "features.sha256" in caplog.text
    assert len(charges(site)) == 1
    weights.write_bytes(content)
    assert instruct(site, 2) is not None
    assert len(charges(site)) == 2


class Drifts(nn.Module):
    """Changes after 50 calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.flatten(1)[:, :WIDTH] + (self.count > 50)


def test_an_encoder_that_changes_while_records_are_mapped_is_refused_at_no_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "hostile", lambda shape, kind: Drifts())
    site = site_with(tmp_path, changes=own("drifts"))
    for number in (1, 2):  # its features are not stored either
        caplog.clear()
        assert instruct(site, number) is None
        assert "must not change while records are mapped" in caplog.text
    assert charges(site) == []
    assert rows_file(site).stat().st_size == 0


def test_declared_constants_scale_the_features_of_a_site(tmp_path: Path) -> None:
    site = site_with(tmp_path, changes={"options = {}": "options = {}\nmean = [0.5]\nstd = [2]"})
    features = load_site(site).features
    assert features is not None
    weights = load_file(tmp_path / "encoder.safetensors")
    with np.load(tmp_path / "records.npz") as file:
        flat = torch.from_numpy(file["inputs"]).flatten(1)
    vectors = (flat @ weights["linear.weight"].T + weights["linear.bias"] - 0.5) / 2
    expected = vectors / vectors.norm(dim=1, keepdim=True)
    assert torch.allclose(load_site(site).data().inputs, expected, atol=1e-5)


# ---------------------------------------------------------------------------- faults of one record


@pytest.mark.parametrize("value", BAD)
def test_a_bad_record_is_left_out_alone(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_site(site_with(tmp_path / "whole")).data()
    site = site_with(tmp_path / "bad")

    def spoil(inputs: Any, targets: Any) -> Any:
        worse = np.insert(inputs, 9, inputs[9], axis=0)
        worse[9, 0, 0, 0] = value
        return worse, np.insert(targets, 9, 3)

    change_records(site, spoil)
    for _ in range(2):  # computed, then from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            data = load_site(site).data()
        assert torch.equal(data.inputs, whole.inputs)
        assert torch.equal(data.targets, whole.targets)
        assert "1 of 61 records are left out" in caplog.text
        assert str(value) not in caplog.text
        assert "secret" not in caplog.text


def test_records_of_another_shape_in_a_list_are_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "listed", lambda: (listed_inputs, [0] * 5), False)
    listed_inputs = [RECORDS[0], RECORDS[1][:, :7], None, RECORDS[2], "x"]
    changes = {'file = "records.npz"': f'function = "{__name__}:listed"'}
    data = load_site(site_with(tmp_path, changes=changes)).data()
    features = load_site(tmp_path / "site.toml").features
    assert features is not None
    assert np.array_equal(data.inputs.numpy(), features.of_records(RECORDS[[0, 2]]))


def test_whether_and_how_a_site_answers_does_not_depend_on_bad_records(tmp_path: Path) -> None:
    seen = []
    for name, bad in (("none", 0), ("some", 3), ("all", 60)):
        site = site_with(tmp_path / name)

        def spoil(inputs: Any, targets: Any, bad: int = bad) -> Any:
            inputs[:bad, 0, 0, 0] = np.resize(BAD, bad)
            return inputs, targets

        change_records(site, spoil)
        update = instruct(site)
        assert update is not None
        assert all(np.isfinite(part).all() for part in update.values())
        seen.append(([(key, part.shape, part.dtype) for key, part in update.items()],
                     charges(site)))  # fmt: skip
    assert seen[0] == seen[1] == seen[2]


def changed_bits(features: Features, folder: Path) -> int:
    """Records whose features change with other records, fewer records or another order."""
    whole = cached_rows(features, RECORDS, folder / "whole", "data")
    rng, changed = np.random.default_rng(1), 0
    for trial in range(8):
        chosen = rng.permutation(150)[: rng.integers(1, 150)]
        inputs = RECORDS[chosen].copy()
        others = rng.random(len(chosen)) < 0.5
        inputs[others] *= rng.choice([-1, 1e-30, 1e30, 3], (others.sum(), 1, 1, 1))
        rows = cached_rows(features, inputs, folder / str(trial), "data")
        kept = rows[~others].view(np.uint32) == whole[chosen[~others]].view(np.uint32)
        changed += int((~kept.all(axis=1)).sum())
    return changed


def test_no_other_record_changes_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = make_features(f"{__name__}:wide", SHAPE)
    assert changed_bits(features, tmp_path) == 0
    real, before = Features.of_record, np.zeros(features.width, np.float32)

    def flawed(self: Features, record: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal before
        before, last = real(self, record), before  # planted: the last record shows a little
        return before + np.float32(1e-6) * last

    monkeypatch.setattr(Features, "of_record", flawed)
    (tmp_path / "flawed").mkdir()
    assert changed_bits(features, tmp_path / "flawed") > 0


def wide(input_shape: tuple[int, ...]) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Linear(64, 333), nn.Tanh(), nn.Linear(333, 129)]
    for layer in layers[::2]:
        layer.weight.data.normal_(0, 1, generator=generator)  # type: ignore[operator, union-attr]
        layer.bias.data.zero_()  # type: ignore[operator, union-attr]
    return nn.Sequential(nn.Flatten(), *layers)


# ------------------------------------------------------------------------------------- the cache


def test_later_rounds_and_processes_compute_nothing(tmp_path: Path) -> None:
    site, calls = counted(tmp_path)
    assert instruct(site, 1) is not None
    assert calls() == 60
    assert instruct(site, 2) is not None
    assert calls() == 0
    process = multiprocessing.get_context("fork").Process(target=read_data, args=(site,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert calls() == 0


def test_a_changed_record_set_computes_new_records_only_and_forgets_old_ones(
    tmp_path: Path,
) -> None:
    site, calls = counted(tmp_path)
    load_site(site).data()
    assert calls() == 60
    size = rows_file(site).stat().st_size
    change_records(site, lambda x, y: (x[10:], y[10:]))
    before = rows_file(site).read_bytes()
    assert load_site(site).data().inputs.shape == (50, WIDTH)
    assert calls() == 0
    after = rows_file(site).read_bytes()
    assert len(after) == size * 50 // 60
    assert before[: size // 60] not in after  # a record that was removed leaves nothing
    change_records(site, lambda x, y: (np.concatenate([x, 1 - x[:3], x[:1]]), np.append(y, y[:4])))
    assert load_site(site).data().inputs.shape == (54, WIDTH)
    assert calls() == 3  # three new ones; the fourth is a copy


@pytest.mark.parametrize("damage", ["flip", "record", "check", "truncate", "append", "zeros"])
def test_damage_is_computed_again(damage: str, tmp_path: Path) -> None:
    site, calls = counted(tmp_path)
    first = load_site(site).data()
    calls()
    path = rows_file(site)
    content = bytearray(path.read_bytes())
    size = len(content) // 60
    place = {"flip": 20 * size + size - 1, "record": 20 * size, "check": 20 * size + 40}
    if damage in place:
        content[place[damage]] ^= 1
    expected = {"truncate": 1, "append": 0, "zeros": 60}.get(damage, 1)
    changed = {"truncate": content[:-5], "append": content + b"x" * 5, "zeros": bytes(len(content))}
    path.write_bytes(changed.get(damage, content))
    again = load_site(site).data()
    assert calls() == expected
    assert torch.equal(again.inputs, first.inputs)
    assert len(path.read_bytes()) == 60 * size
    load_site(site).data()
    assert calls() == 0


def test_features_of_another_encoder_are_never_used(tmp_path: Path) -> None:
    """Even under the name of the file that the new encoder reads."""
    site, calls = counted(tmp_path)
    first = load_site(site).data()
    old = rows_file(site)
    digest = write_weights(tmp_path / "encoder.safetensors", seed=1)
    text = site.read_text()
    start = text.index('sha256 = "') + len('sha256 = "')
    site.write_text(text[:start] + digest + text[start + 64 :])
    calls()
    second = load_site(site).data()
    assert calls() == 60
    assert not torch.equal(first.inputs, second.inputs)
    [new] = set(old.parent.glob("*.rows")) - {old}
    new.write_bytes(old.read_bytes())
    assert torch.equal(load_site(site).data().inputs, second.inputs)
    assert calls() == 60


def slow_site(folder: Path) -> tuple[Path, Path]:
    log = folder / "calls"
    site = site_with(folder, records=300, options=f'{{calls = "{log}", seconds = 0.003}}')
    return site, log


def read_data(site: Path) -> None:
    load_site(site).data()


def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    site, log = slow_site(tmp_path)
    folder = tmp_path / "site.ledger-features"
    process = multiprocessing.get_context("fork").Process(target=read_data, args=(site,))
    process.start()
    while not any(path.stat().st_size for path in folder.glob("*.rows")):
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    log.unlink()
    data = load_site(site).data()
    assert 0 < log.stat().st_size < 300 - 50
    features = load_site(site).features
    assert features is not None
    with np.load(tmp_path / "records.npz") as file:
        assert np.array_equal(data.inputs.numpy(), features.of_records(file["inputs"]))


def test_of_two_processes_one_computes(tmp_path: Path) -> None:
    site, log = slow_site(tmp_path)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read_data, args=(site,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.stat().st_size == 300


def limited(site: Path, limit: int) -> None:
    """No file may grow beyond the limit, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    handler = logging.FileHandler(os.devnull)
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("noisewise.site").addHandler(handler)
    data = load_site(site).data()
    [line] = [line for line in lines if "features are not stored" in line]
    assert "\n" not in line
    assert data.inputs.shape == (300, WIDTH)
    assert bool(data.inputs.isfinite().all())


def test_a_full_disk_is_one_line_and_the_site_still_answers(tmp_path: Path) -> None:
    """Otherwise one record more could decide whether the site answers."""
    site, log = slow_site(tmp_path)
    row = 48 + 4 * WIDTH
    process = multiprocessing.get_context("fork").Process(target=limited, args=(site, 100 * row))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert rows_file(site).stat().st_size == 64 * row  # the first block is whole, the second gone
    log.unlink()
    load_site(site).data()
    assert log.stat().st_size == 300 - 64


# -------------------------------------------------------------------------- the folder is private


def test_folder_and_files_are_for_the_own_account(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        site = site_with(tmp_path)
        load_site(site).data()
    finally:
        os.umask(before)
    folder = tmp_path / "site.ledger-features"
    assert folder.stat().st_mode & 0o777 == 0o700
    files = list(folder.iterdir())
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize("case", ["group", "others", "link", "file", "account"])
def test_a_folder_that_others_can_open_is_refused_at_no_cost(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site, folder = site_with(tmp_path), tmp_path / "site.ledger-features"
    if case == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif case == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod({"group": 0o750, "others": 0o701}.get(case, 0o700))
    if case == "account":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    words = {
        "group": "chmod 700", "others": "chmod 700", "link": "not a link", "account": "belong",
    }.get(case, "must be a folder")  # fmt: skip
    assert instruct(site) is None
    assert words in caplog.text
    assert charges(site) == []
    with pytest.raises(InvalidValueError, match=words) as caught:
        check_site(load_site(site))
    assert "\n" not in str(caught.value)


def test_links_inside_of_the_folder_are_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = site_with(tmp_path)
    load_site(site).data()
    path, target = rows_file(site), tmp_path / "elsewhere"
    path.unlink()
    path.symlink_to(target)
    assert load_site(site).data().inputs.shape == (60, WIDTH)
    assert not target.exists()
    assert "features are not stored" in caplog.text


def test_an_error_that_may_pass_is_not_stored(tmp_path: Path) -> None:
    features = make_features(f"{__name__}:wide", SHAPE)
    real, calls = Features.of_record, 0

    def once(self: Features, record: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError
        return real(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Features, "of_record", once)
        rows = cached_rows(features, RECORDS, tmp_path / "cache", "data")
    assert np.flatnonzero(np.isnan(rows).any(axis=1)).tolist() == [4]
    rows = cached_rows(features, RECORDS, tmp_path / "cache", "data")
    assert np.isfinite(rows).all()
