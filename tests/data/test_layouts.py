"""File formats of MNIST and CIFAR are decoded exactly; damaged and hostile files are rejected."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny_data as tiny
from tiny_data import chunk

from noisewise.data.catalogue import CATALOGUE, DatasetInfo
from noisewise.data.layouts import ARRAYS, _read_picture
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
            (lambda b: b[:-1], "599 values, not 600"),
            (lambda b: b + b"x", "601 values, not 600"),
            (lambda b: b"\x00\x00\x0d" + b[3:], "not an IDX file of 30 x 5 x 4"),  # floats
            (lambda b: b"", "not an IDX file"),
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
            (short, tiny.md5(short), "test_batch.bin does not have the 490 bytes of 10 records"),
            (lacking, tiny.md5(lacking), "does not contain test_batch.bin"),
            (lacking, "0" * 32, "does not have the published MD5"),
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
    with pytest.raises(SourceError, match="does not contain"):
        decode(tiny.tiny_cifar10(tiny.md5(content)), folder)


def test_damaged_pictures(tmp_path: Path) -> None:
    info = tiny.tiny_cifar10()
    members = tiny.png_members(tiny.tiny_arrays(info))
    for number, (name, change, words) in enumerate(
        [
            ("test_lables.json", lambda b: b[:-3], "not a list of labels"),
            ("test_lables.json", lambda b: b"[1, 2]", r"not \(10,\)"),
            ("test_lables.json", lambda b: b'{"a": 1}', "not a list of labels"),
            ("test_lables.json", lambda b: b"[" + b"300, " * 9 + b"300]", "not a list of labels"),
            (
                "test_batch.png",
                lambda b: b[:-9],
                "test_batch.png is not a PNG or is damaged",
            ),
            (
                "test_batch.png",
                lambda b: tiny.png(np.zeros((9, 16, 3), np.uint8)),
                r"test_batch.png is a PNG of 16 x 9 pixels \(RGB\): must be one image of 16 x 10 ",
            ),
        ]
    ):
        folder = tiny.write(tmp_path / str(number), spoil(members, name, change))
        with pytest.raises(SourceError, match=words):
            decode(info, folder)


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
STREAM = zlib.compress(np.insert(PIXELS.reshape(5, 12), 0, 0, axis=1).tobytes())  # filter 0
SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = chunk(b"IEND", b"")


def picture(
    *before: bytes,
    size: tuple[int, int] = (4, 5),
    kind: tuple[int, ...] = (8, 2, 0, 0, 0),
    stream: bytes = STREAM,
) -> bytes:
    """A PNG in three pieces, with chunks of one's choice before the pixels.

    Args:
        before: chunks after the header.
        size: width and height that the header states.
        kind: bits, colour type, compression, filter method and interlacing in the header.
        stream: the compressed rows.
    """
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, *kind))
    pieces = (stream[:10], stream[10:20], stream[20:])
    return b"".join([SIGNATURE, header, *before, *(chunk(b"IDAT", p) for p in pieces), END])


def frame(*size: int) -> bytes:
    """The chunk of an animation which says that the pixels cover a corner of the picture."""
    return chunk(b"fcTL", struct.pack(">5I2H2B", 0, *size, 0, 0, 1, 1, 0, 0))


def read(tmp_path: Path, content: bytes) -> np.ndarray:
    path = tmp_path / "some.png"
    path.write_bytes(content)
    return _read_picture(path, width=4, height=5)


@pytest.mark.parametrize(
    "content",
    [
        tiny.png(PIXELS),
        picture(),
        picture(chunk(b"tEXt", b"Title\0text"), chunk(b"gAMA", b"\0\0\x10\0")),
        picture(chunk(b"tRNS", bytes(6))),
        picture(chunk(b"acTL", struct.pack(">II", 1, 0)), frame(4, 5)),
        picture() + b"text after the end",
    ],
)
def test_pictures_are_read_to_the_byte(tmp_path: Path, content: bytes) -> None:
    pixels = read(tmp_path, content)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, PIXELS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a PNG file"),
        (b"GIF89a" + picture(), "not a PNG file"),
        (SIGNATURE + END, "damaged"),
        (SIGNATURE + b"".join([picture()[8:33], END]), r"4 x 5 pixels \(no samples\)"),
        (picture(kind=(16, 2, 0, 0, 0)), r"\(RGB;16B\)"),
        (picture(kind=(8, 0, 0, 0, 0)), r"\(L\)"),
        (picture(kind=(8, 3, 0, 0, 0)), r"\(P\)"),
        (picture(kind=(8, 6, 0, 0, 0)), r"\(RGBA\)"),
        (picture(kind=(8, 9, 0, 0, 0)), "damaged"),
        (picture(kind=(8, 2, 0, 1, 0)), "filter"),
        (picture(kind=(8, 2, 0, 0, 1)), "damaged"),  # stated as interlaced, but it is not
        (picture(size=(0, 5)), "damaged"),
        (picture(size=(4, 4)), "4 x 4 pixels"),
        (picture(size=(1 << 20, 1 << 20)), "1048576 x 1048576 pixels"),
        (picture(chunk(b"IHDR", struct.pack(">IIBBBBB", 1 << 20, 5, 8, 2, 0, 0, 0))), "1048576 x"),
        (picture(frame(4, 5), size=(1 << 20, 1 << 20)), "1048576 x 1048576 pixels"),
        (picture(frame(2, 2)), "must be one image of 4 x 5"),
        (picture(chunk(b"tEXt", b"bbox\0" + b"x" * 999)), "must be one image of 4 x 5"),
        (picture(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7)))), "too large"),
        (picture(chunk(b"iCCP", b"")), "damaged"),
        (picture()[:-12] + chunk(b"iCCP", b"") + END, "damaged"),
        (picture(stream=b"rubbish" * 9), "broken data stream"),
        (picture(stream=b""), "truncated"),
        (picture(stream=zlib.compress(b"\5" + bytes(64))), "damaged"),  # there is no filter 5
    ],
)  # fmt: skip
def test_a_hostile_picture_is_an_error_with_words(
    tmp_path: Path, content: bytes, words: str
) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("some.png is ")
    assert len(str(caught.value)) < 200


def test_no_damage_changes_pixels_unnoticed(tmp_path: Path) -> None:
    """Any byte changed, or the file cut anywhere: an error, or the pixels as they were."""
    good = picture(chunk(b"tEXt", b"Title\0text"))
    accepted = set()
    for position in range(len(good)):
        changed = good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
        for content in (good[:position], changed):
            try:
                pixels = read(tmp_path, content)
            except SourceError:
                continue
            np.testing.assert_array_equal(pixels, PIXELS)
            accepted.add(position)
    assert min(accepted) >= len(good) - len(END)  # only the end mark holds nothing to check


def test_a_compressed_bomb_takes_no_memory(tmp_path: Path) -> None:
    """Pillow inflates row by row and stops after the last; the same stream inflated is noticed."""
    bomb = zlib.compress(bytes(200_000_000))
    (tmp_path / "bomb.png").write_bytes(picture(stream=bomb))
    (tmp_path / "stream").write_bytes(bomb)
    code = """
import re, sys, zlib
from pathlib import Path
from PIL import PngImagePlugin
from noisewise.data.layouts import _read_picture

def peak():  # not ru_maxrss, which starts with the parent's peak
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024

folder = Path(sys.argv[1])
start = peak()
assert not _read_picture(folder / "bomb.png", width=4, height=5).any()
read = peak()
zlib.decompress((folder / "stream").read_bytes())
print(read - start, peak() - start)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    read_mb, inflated_mb = map(float, done.stdout.split())
    assert read_mb < 20 < 150 < inflated_mb


def test_datasets_with_pictures_have_published_sha256() -> None:
    """Rows that a picture's stream lacks are zero: nothing but the SHA-256 shows it."""
    pictures = [
        info
        for info in CATALOGUE.values()
        if any(name.endswith(".png") for layout in info.layouts for name in layout.files)
    ]
    assert [info.name for info in pictures] == ["cifar10"]
    assert all(set(info.sha256) == set(ARRAYS) for info in pictures)
