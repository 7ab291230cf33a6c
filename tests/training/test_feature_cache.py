"""Features on disk: computed once, resumed, verified chunk by chunk."""

from __future__ import annotations

import errno
import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor, nn

from noisewise.errors import DiskFullError, InvalidValueError, NoisewiseError
from noisewise.training import feature_cache
from noisewise.training.feature_cache import cached_features
from noisewise.training.features import Features, make_features

RECORDS = np.random.default_rng(0).random((300, 1, 8, 8), dtype=np.float32)
SHAPE = (1, 8, 8)


def compute(
    features: Features, records: NDArray[np.float32], folder: Path, **options: Any
) -> NDArray[np.float32]:
    digest = hashlib.sha256(records.tobytes()).hexdigest()
    return cached_features(
        features, len(records), lambda a, b: records[a:b], digest, folder, **options
    )


def computed_chunks(features: Features, folder: Path) -> tuple[NDArray[np.float32], int]:
    """The features, and how many chunks were computed for them."""
    seen: list[int] = []
    values = compute(features, RECORDS, folder, on_progress=lambda done, _: seen.append(done))
    return np.array(values), len(seen)


def test_a_second_call_computes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = make_features("identity", SHAPE)
    first = np.array(compute(features, RECORDS, tmp_path))
    monkeypatch.setattr(Features, "of_record", lambda *_: pytest.fail("computed again"))
    again = compute(features, RECORDS, tmp_path)
    assert np.array_equal(again, first)
    assert not again.flags.writeable


def test_no_records_have_no_features(tmp_path: Path) -> None:
    assert compute(make_features("identity", SHAPE), RECORDS[:0], tmp_path).shape == (0, 64)


@pytest.mark.parametrize("suffix", ["npy", "checks"])
def test_damage_anywhere_is_found_and_only_its_chunk_is_computed_again(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = make_features("identity", SHAPE)
    first, chunks = computed_chunks(features, tmp_path)
    assert chunks == 3
    [file] = tmp_path.glob(f"*.{suffix}")
    whole = file.read_bytes()
    start = 128 if suffix == "npy" else 0  # the header of the .npy file
    rng = np.random.default_rng(5)
    for place in [start, len(whole) - 1, *rng.integers(start, len(whole), 20)]:
        content = bytearray(whole)
        content[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        caplog.clear()
        values, chunks = computed_chunks(features, tmp_path)
        assert np.array_equal(values, first)
        assert chunks == 1
        assert "1 damaged parts are computed again" in caplog.text
        assert file.read_bytes() == whole


@pytest.mark.parametrize("suffix", ["npy", "checks"])
@pytest.mark.parametrize("damage", ["header", "truncate", "append", "empty", "lost", "zeros"])
def test_a_broken_file_is_made_again(suffix: str, damage: str, tmp_path: Path) -> None:
    features = make_features("identity", SHAPE)
    first, _ = computed_chunks(features, tmp_path)
    [file] = tmp_path.glob(f"*.{suffix}")
    whole = file.read_bytes()
    changed = {
        "header": whole.replace(b"64)", b"32)").replace(b"<f4", b">f4"),
        "truncate": whole[:-100], "append": whole + b"x", "empty": b"", "zeros": bytes(len(whole)),
    }  # fmt: skip
    file.unlink() if damage == "lost" else file.write_bytes(changed[damage])
    values, _ = computed_chunks(features, tmp_path)
    assert np.array_equal(values, first)
    assert computed_chunks(features, tmp_path)[1] == 0


def shifted(input_shape: tuple[int, ...], seconds: float = 0.0, by: float = 1.0) -> nn.Module:
    return Shifted(seconds, by)


class Shifted(nn.Module):
    def __init__(self, seconds: float, by: float) -> None:
        super().__init__()
        self.seconds, self.by = seconds, by

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x.flatten(1) + self.by


def encoder(**options: float) -> Features:
    return make_features(f"{__name__}:shifted", SHAPE, options=options, normalise="none")


def test_files_of_another_encoder_are_not_used_even_under_the_right_name(tmp_path: Path) -> None:
    one, other = encoder(by=1.0), encoder(by=2.0)
    compute(one, RECORDS, tmp_path / "one")
    second, _ = computed_chunks(other, tmp_path / "other")
    for suffix in ("npy", "checks"):
        [source] = (tmp_path / "one").glob(f"*.{suffix}")
        [target] = (tmp_path / "other").glob(f"*.{suffix}")
        shutil.copy(source, target)
    values, chunks = computed_chunks(other, tmp_path / "other")
    assert np.array_equal(values, second)
    assert chunks == 3


def kill_in_the_middle(features: Features, folder: Path) -> None:
    """End a process with kill -9 after its first chunk."""
    process = multiprocessing.get_context("fork").Process(
        target=compute, args=(features, RECORDS, folder)
    )
    process.start()
    while not any(np.fromfile(f, np.uint8).any() for f in folder.glob("*.checks")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_computation_is_resumed(damaged: bool, tmp_path: Path) -> None:
    features = encoder(seconds=0.004)
    kill_in_the_middle(features, tmp_path)
    if damaged:  # a byte of the finished chunk changes before the next call
        [file] = tmp_path.glob("*.npy")
        content = bytearray(file.read_bytes())
        content[128 + 77] ^= 4
        file.write_bytes(content)
    values, chunks = computed_chunks(features, tmp_path)
    assert chunks == 3 if damaged else chunks < 3
    assert np.array_equal(values, RECORDS.reshape(300, -1) + 1)


def test_of_two_processes_one_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features = encoder(seconds=0.002)
    process = multiprocessing.get_context("fork").Process(
        target=compute, args=(features, RECORDS, tmp_path)
    )
    process.start()
    while not list(tmp_path.glob("*.checks")):
        time.sleep(0.005)
    values, chunks = computed_chunks(features, tmp_path)
    process.join()
    assert process.exitcode == 0
    assert chunks == 0
    assert "another process computes these features" in caplog.text
    assert np.array_equal(values, RECORDS.reshape(300, -1) + 1)


def test_a_full_disk_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    features = make_features("identity", SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "reserve", full)
        with pytest.raises(DiskFullError, match="free disk space") as caught:
            compute(features, RECORDS, tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
    assert computed_chunks(features, tmp_path)[1] == 3


BAD = {"nan": 3.25, "error": 4.25, "wide": 5.25}


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, flat = float(x.flatten()[0]), x.flatten(1)
        if first == BAD["error"]:
            raise RuntimeError("two\nlines")
        return {BAD["nan"]: flat * math.nan, BAD["wide"]: flat.repeat(1, 2)}.get(first, flat)


class Drifts(nn.Module):
    """Changes after 200 records."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.flatten(1) + (self.count > 200)


def breaking(input_shape: tuple[int, ...]) -> nn.Module:
    return Breaks()


def drifting(input_shape: tuple[int, ...]) -> nn.Module:
    return Drifts()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nan", r"must be finite \(record 137\)"),
        ("error", r"must map every record \(record 137: RuntimeError: two lines\)"),
        ("wide", r"must be 64 \(record 137\)"),
    ],
)
def test_a_record_without_features_is_named_and_the_others_are_kept(
    kind: str, words: str, workers: int, tmp_path: Path
) -> None:
    records = RECORDS.copy()
    records[137, 0, 0, 0] = BAD[kind]
    features = make_features(f"{__name__}:breaking", SHAPE)
    with pytest.raises(InvalidValueError, match=words) as caught:
        compute(features, records, tmp_path, workers=workers)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidValueError, match=words):
        compute(features, records, tmp_path, workers=workers)


def test_an_encoder_that_changes_while_records_are_mapped_is_refused(tmp_path: Path) -> None:
    features = make_features(f"{__name__}:drifting", SHAPE)
    for _ in range(2):  # its features are not stored either
        with pytest.raises(InvalidValueError, match="must not change while records are mapped"):
            compute(features, RECORDS, tmp_path)
    [checks] = tmp_path.glob("*.checks")
    assert np.fromfile(checks, np.uint8).reshape(-1, 32).any(axis=1).tolist()[1:] == [False, False]


def test_any_byte_of_the_header_may_be_damaged(tmp_path: Path) -> None:
    features = make_features("identity", SHAPE)
    first = np.array(compute(features, RECORDS[:9], tmp_path))
    [file] = tmp_path.glob("*.npy")
    whole = file.read_bytes()
    for place in range(128):
        for byte in b"\x00({'\n9\xff":
            file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            assert np.array_equal(compute(features, RECORDS[:9], tmp_path), first)
    file.write_bytes(b"PK\x03\x04" + whole)  # numpy takes it for an npz file
    assert np.array_equal(compute(features, RECORDS[:9], tmp_path), first)


def test_features_of_two_threads_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread begins while the first one starts its workers."""
    one, other = encoder(by=1.0), encoder(by=2.0)
    real, values = feature_cache.ProcessPoolExecutor, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(feature_cache, "ProcessPoolExecutor", real)
        values.append(compute(other, RECORDS, tmp_path, workers=2))
        return real(*arguments, **options)

    monkeypatch.setattr(feature_cache, "ProcessPoolExecutor", interrupted)
    values.insert(0, compute(one, RECORDS, tmp_path, workers=2))
    for by, found in zip((1, 2), values, strict=True):
        assert np.array_equal(found, RECORDS.reshape(300, -1) + np.float32(by))


class Dies(nn.Module):
    """Ends the worker at one record, as a machine without memory does."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.flatten()[0]) == BAD["error"] and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.flatten(1)


def test_a_worker_that_dies_is_one_line_and_the_rest_is_kept(tmp_path: Path) -> None:
    records = RECORDS.copy()
    records[290, 0, 0, 0] = BAD["error"]
    features = make_features(Dies(), SHAPE, normalise="none")
    with pytest.raises(NoisewiseError, match=r"a worker .* died.* again to resume") as caught:
        compute(features, records, tmp_path, workers=2)
    assert "\n" not in str(caught.value)
    values = compute(features, records, tmp_path)
    assert np.array_equal(values, records.reshape(300, -1))


def test_no_memory_is_not_a_fault_of_a_record(tmp_path: Path) -> None:
    features = encoder(by=1.0)
    real, calls = Features.of_record, 0

    def once(self: Features, record: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal calls
        calls += 1
        if calls == 138:
            raise MemoryError
        return real(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Features, "of_record", once)
        with pytest.raises(NoisewiseError, match=r"no memory .* record 137.* again to resume"):
            compute(features, RECORDS, tmp_path)
    values, chunks = computed_chunks(features, tmp_path)
    assert chunks == 2
    assert np.array_equal(values, RECORDS.reshape(300, -1) + 1)
