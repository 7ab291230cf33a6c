from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_data as tiny

from noisewise.data.catalogue import CATALOGUE, DatasetInfo
from noisewise.data.layouts import ARRAYS
from noisewise.errors import SourceError


def decode(info: DatasetInfo, folder: Path) -> dict[str, np.ndarray]:
    arrays = {name: np.full(info.shape_of(name), 7, np.uint8) for name in ARRAYS}
    for layout in info.layouts:
        files = layout.find(folder)
        if files is not None:
            layout.fill(files, arrays, lambda what, done, total: None)
            return arrays
    raise AssertionError("no layout fits")


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("gz", [True, False])
def test_idx(tmp_path: Path, gz: bool) -> None:
    info = tiny.tiny_mnist()
    arrays = tiny.tiny_arrays(info)
    same(decode(info, tiny.write(tmp_path, tiny.idx_members(arrays, gz))), arrays)


def test_cifar10_archive_files_and_pictures_agree(tmp_path: Path) -> None:
    arrays = tiny.tiny_arrays(tiny.tiny_cifar10())
    members = tiny.cifar10_members(arrays)
    archive = tiny.tar(members, "cifar-10-batches-bin")
    info = tiny.tiny_cifar10(tiny.md5(archive))
    same(decode(info, tiny.write(tmp_path / "a", {tiny.ARCHIVE: archive})), arrays)
    same(decode(info, tiny.write(tmp_path / "b", members)), arrays)
    same(decode(info, tiny.write(tmp_path / "c", tiny.png_members(arrays))), arrays)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    arrays = tiny.tiny_arrays(tiny.tiny_cifar100(""))
    archive = tiny.tar(tiny.cifar100_members(arrays), "cifar-100-binary")
    info = tiny.tiny_cifar100(tiny.md5(archive))
    found = decode(info, tiny.write(tmp_path, {"cifar-100-binary.tar.gz": archive}))
    same(found, arrays)
    assert found["train_targets"].max() > 19  # coarse labels end there


def test_the_real_record_sizes() -> None:
    """10,000 records of 3,073 bytes are the published 30,730,000 of a CIFAR-10 batch."""
    for name, labels, batches, size in [
        ("cifar10", 1, 5, 30_730_000),
        ("cifar100", 2, 1, 153_700_000),
    ]:
        info = CATALOGUE[name]
        assert info.n_train // batches * (labels + int(np.prod(info.shape))) == size


def spoil(members: dict[str, bytes], name: str, change) -> dict[str, bytes]:
    return {**members, name: change(members[name])}


def test_damaged_idx(tmp_path: Path) -> None:
    info = tiny.tiny_mnist()
    members = tiny.idx_members(tiny.tiny_arrays(info), gz=False)
    images = "train-images-idx3-ubyte"
    for number, (change, words) in enumerate(
        [
            (lambda b: b[:-1], "599 values where 600"),
            (lambda b: b + b"x", "601 values where 600"),
            (lambda b: b"\x00\x00\x0d" + b[3:], "no IDX file of 30 x 5 x 4"),  # floats
            (lambda b: b"", "no IDX file"),
        ]
    ):
        folder = tiny.write(tmp_path / str(number), spoil(members, images, change))
        with pytest.raises(SourceError, match=words):
            decode(info, folder)


def test_damaged_cifar(tmp_path: Path) -> None:
    arrays = tiny.tiny_arrays(tiny.tiny_cifar10())
    members = tiny.cifar10_members(arrays)
    short = tiny.tar(spoil(members, "test_batch.bin", lambda b: b[:-1]), "x")
    lacking = tiny.tar({k: v for k, v in members.items() if k != "test_batch.bin"}, "x")
    for number, (archive, checksum, words) in enumerate(
        [
            (short, tiny.md5(short), "test_batch.bin has not the 490 bytes of 10 records"),
            (lacking, tiny.md5(lacking), "lacks test_batch.bin"),
            (lacking, "0" * 32, "not the published MD5"),
        ]
    ):
        folder = tiny.write(tmp_path / str(number), {tiny.ARCHIVE: archive})
        with pytest.raises(SourceError, match=words):
            decode(tiny.tiny_cifar10(checksum), folder)


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(entry)
    content = buffer.getvalue()
    folder = tiny.write(tmp_path, {tiny.ARCHIVE: content})
    with pytest.raises(SourceError, match="lacks"):
        decode(tiny.tiny_cifar10(tiny.md5(content)), folder)


def test_damaged_pictures(tmp_path: Path) -> None:
    info = tiny.tiny_cifar10()
    members = tiny.png_members(tiny.tiny_arrays(info))
    for number, (name, change, words) in enumerate(
        [
            ("test_lables.json", lambda b: b[:-3], "no list of labels"),
            ("test_lables.json", lambda b: b"[1, 2]", "not 10"),
            ("test_lables.json", lambda b: b'{"a": 1}', "no list of labels"),
            ("test_lables.json", lambda b: b"[" + b"300, " * 9 + b"300]", "no list of labels"),
            ("test_batch.png", lambda b: members["data_batch_1.png"][:-9], "damaged PNG"),
            (
                "test_batch.png",
                lambda b: tiny.encode(np.zeros((9, 16, 3), np.uint8), [0] * 9),
                "images",
            ),
        ]
    ):
        folder = tiny.write(tmp_path / str(number), spoil(members, name, change))
        with pytest.raises(SourceError, match=words):
            decode(info, folder)
