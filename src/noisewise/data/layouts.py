"""File layouts of datasets, and how each is decoded to arrays.

A decoder fills given arrays (memory-mapped files of the cache) batch by batch, so a dataset is
never in memory twice. No decoder reads a pickle.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from noisewise.data.progress import Progress
from noisewise.errors import SourceError

__all__ = [
    "ARRAYS",
    "Arrays",
    "Layout",
    "cifar_archive",
    "cifar_files",
    "cifar_png",
    "file_md5",
    "idx",
]

ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")
Arrays = Mapping[str, NDArray[np.uint8]]
"""The four arrays by name: inputs [N, channels, height, width] and targets [N], all uint8."""

Decode = Callable[[Mapping[str, Path], Arrays, Progress], None]


@dataclass(frozen=True)
class Layout:
    """A set of files that contains a whole dataset.

    Args:
        title: name for messages.
        files: names of the files; all are required.
        decode: function that fills the arrays from the files.
        md5: published checksums of files, verified before decoding.
        gzipped: whether ``name.gz`` is accepted instead of ``name``.
    """

    title: str
    files: tuple[str, ...]
    decode: Decode
    md5: Mapping[str, str] = field(default_factory=dict)
    gzipped: bool = False

    def find(self, folder: Path) -> dict[str, Path] | None:
        """Return the paths of the files in ``folder``, or None if one is missing."""
        paths = {}
        for name in self.files:
            options = [folder / name, *([folder / f"{name}.gz"] if self.gzipped else [])]
            existing = [path for path in options if path.is_file()]
            if not existing:
                return None
            paths[name] = existing[0]
        return paths

    def fill(self, files: Mapping[str, Path], arrays: Arrays, progress: Progress) -> None:
        """Verify the published checksums and decode the files.

        Args:
            files: path of each file by name.
            arrays: arrays to fill.
            progress: called during decoding.

        Raises:
            SourceError: a file is damaged or differs from the published one.
        """
        for name, expected in self.md5.items():
            if file_md5(files[name]) != expected:
                raise SourceError(f"{files[name].name} does not have the published MD5 {expected}")
        self.decode(files, arrays, progress)


def file_md5(path: Path) -> str:
    """Return the MD5 of a file. It detects damage, not deliberate changes."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


# IDX, the format of MNIST and Fashion-MNIST: 0 0 type rank, then the sizes, then the values.


def idx() -> Layout:
    """Return the layout of MNIST and Fashion-MNIST: four IDX files, plain or gzipped."""
    return Layout("IDX files", tuple(_IDX_FILES.values()), _decode_idx, gzipped=True)


_IDX_FILES = {
    "train_inputs": "train-images-idx3-ubyte",
    "train_targets": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_targets": "t10k-labels-idx1-ubyte",
}


def _decode_idx(files: Mapping[str, Path], arrays: Arrays, progress: Progress) -> None:
    for number, (array, name) in enumerate(_IDX_FILES.items()):
        path = files[name]
        opened: IO[bytes]
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as opened:  # type: ignore[assignment]
            _read_idx(opened, path.name, arrays[array])
        progress("decode", number + 1, len(_IDX_FILES))


def _read_idx(file: IO[bytes], name: str, target: NDArray[np.uint8]) -> None:
    shape = [size for axis, size in enumerate(target.shape) if axis != 1]  # IDX has no channel axis
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if file.read(len(header)) != header:
        raise SourceError(f"{name} is not an IDX file of {' x '.join(map(str, shape))} bytes")
    content = file.read(target.size + 1)
    if len(content) != target.size:
        raise SourceError(f"{name} has {len(content)} values, not {target.size}")
    target[...] = np.frombuffer(content, dtype=np.uint8).reshape(target.shape)


# CIFAR's binary version: records of label byte(s) and 3072 bytes (channel, row, column).


def cifar_archive(name: str, parts: Mapping[str, tuple[str, ...]], md5: str, labels: int) -> Layout:
    """Return the layout of the official ``*-binary.tar.gz``, which is read without unpacking it.

    Args:
        name: file name of the archive.
        parts: files in the archive for ``"train"`` and ``"test"``, in order.
        md5: published checksum of the archive.
        labels: number of label bytes before the pixels; the last one is the class (CIFAR-100 has
            the coarse class before the fine one).
    """
    order = {
        file: (part, number) for part, files in parts.items() for number, file in enumerate(files)
    }

    def decode(files: Mapping[str, Path], arrays: Arrays, progress: Progress) -> None:
        left = dict(order)
        with tarfile.open(files[name], "r|gz") as archive:
            for member in archive:
                file = Path(member.name).name
                opened = archive.extractfile(member) if file in left and member.isreg() else None
                if opened is None:
                    continue
                part, number = left.pop(file)
                _read_cifar(opened, file, arrays, part, number, len(parts[part]), labels)
                progress("decode", len(order) - len(left), len(order))
        if left:
            raise SourceError(f"{name} does not contain {', '.join(left)}")

    return Layout("official binary archive", (name,), decode, {name: md5})


def cifar_files(parts: Mapping[str, tuple[str, ...]], labels: int) -> Layout:
    """Return the layout of the unpacked files of the binary archive."""

    def decode(files: Mapping[str, Path], arrays: Arrays, progress: Progress) -> None:
        for part, names in parts.items():
            for number, name in enumerate(names):
                with open(files[name], "rb") as opened:
                    _read_cifar(opened, name, arrays, part, number, len(names), labels)
                progress("decode", number + 1, len(names))

    return Layout(
        "files of the binary archive", tuple(f for p in parts.values() for f in p), decode
    )


def _read_cifar(
    file: IO[bytes], name: str, arrays: Arrays, part: str, number: int, of: int, labels: int
) -> None:
    """Decode batch ``number`` of ``of`` equal batches of ``part``."""
    inputs, targets = _batch(arrays, part, number, of)
    record = labels + inputs[0].size
    expected = len(inputs) * record
    content = file.read(expected + 1)
    if len(content) != expected:
        raise SourceError(f"{name} does not have the {expected} bytes of {len(inputs)} records")
    records = np.frombuffer(content, dtype=np.uint8).reshape(len(inputs), record)
    targets[...] = records[:, labels - 1]
    inputs[...] = records[:, labels:].reshape(inputs.shape)


def _batch(
    arrays: Arrays, part: str, number: int, of: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    size = len(arrays[f"{part}_targets"]) // of
    rows = slice(number * size, (number + 1) * size)
    return arrays[f"{part}_inputs"][rows], arrays[f"{part}_targets"][rows]


# PNG: each row of a picture is an image (row, column, channel); labels are lists in JSON files.


def cifar_png(images: Mapping[str, tuple[str, ...]], labels: Mapping[str, str]) -> Layout:
    """Return the layout of PNG pictures with one image in each row, and JSON lists of labels.

    A dataset with this layout needs published SHA-256 values; see `_read_picture`.

    Args:
        images: pictures for ``"train"`` and ``"test"``, in order.
        labels: the JSON files for ``"train"`` and ``"test"``.
    """

    def decode(files: Mapping[str, Path], arrays: Arrays, progress: Progress) -> None:
        done, total = 0, sum(map(len, images.values()))
        for part, names in images.items():
            arrays[f"{part}_targets"][...] = _labels(files[labels[part]], arrays, part)
            for number, name in enumerate(names):
                inputs, _ = _batch(arrays, part, number, len(names))
                count, channels, height, width = inputs.shape
                pixels = _read_picture(files[name], width=height * width, height=count)
                inputs[...] = pixels.reshape(count, height, width, channels).transpose(0, 3, 1, 2)
                done += 1
                progress("decode", done, total)

    names = tuple(name for group in images.values() for name in group)
    return Layout("PNG pictures", (*names, *labels.values()), decode)


def _read_picture(path: Path, width: int, height: int) -> NDArray[np.uint8]:
    """Decode a PNG of the given size with 8-bit RGB samples.

    The size is checked before any pixel is decoded, so the header cannot demand more memory than
    the expected picture needs; Pillow limits the text in a PNG to 64 MB.

    Pillow does not report compressed data that end before the last row: it leaves the missing rows
    zero. The SHA-256 of the decoded dataset detects this.

    Returns:
        The pixels, [height, width, 3].

    Raises:
        SourceError: the file is not a PNG, is damaged, or has another size or sample format.
    """
    from PIL.PngImagePlugin import PngImageFile  # imported here, because no other layout needs it

    content = path.read_bytes()
    try:
        # Image.open hides why a file is invalid, and its own size limit warns instead of failing.
        with PngImageFile(io.BytesIO(content)) as picture:
            # A tile is a part to decode: codec, (left, top, right, bottom), offset, samples. An
            # animation can have a tile that is smaller than the picture.
            parts = [(extents, samples) for _, extents, _, samples in picture.tile]
            expected = ((0, 0, width, height), "RGB")
            if picture.size != (width, height) or parts != [expected]:
                formats = ", ".join(str(samples) for _, samples in parts) or "no samples"
                raise SourceError(
                    f"{path.name} is a PNG of {picture.size[0]} x {picture.size[1]} pixels "
                    f"({formats}): must be one image of {width} x {height} pixels (RGB, 8 bits)"
                )
            picture.verify()  # checksums of all chunks; afterwards Pillow needs a new file
        with PngImageFile(io.BytesIO(content)) as picture:
            return np.asarray(picture)
    except _PILLOW_ERRORS as error:
        raise SourceError(f"{path.name} is not a PNG or is damaged: {error}") from None


# What Pillow raises for damaged bytes. `_read_picture` reads the file outside its ``try`` block, so
# a disk error keeps its own type.
_PILLOW_ERRORS = (SyntaxError, OSError, ValueError, EOFError, IndexError, struct.error)


def _labels(path: Path, arrays: Arrays, part: str) -> NDArray[np.uint8]:
    count = len(arrays[f"{part}_targets"])
    try:
        values = json.loads(path.read_bytes())
        labels = np.asarray(values, dtype=np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise SourceError(f"{path.name} is not a list of labels ({error})") from None
    if labels.shape != (count,):
        raise SourceError(f"{path.name} has labels of shape {labels.shape}, not ({count},)")
    return labels
