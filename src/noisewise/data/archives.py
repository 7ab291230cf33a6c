"""Unpack single files from zip and tar.gz archives, by their last name and within a size limit."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from noisewise.errors import SourceError

__all__ = ["MAX_BYTES", "read_members", "unpack_named"]

MAX_BYTES = 1 << 30  # largest size of a file
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError)
# RuntimeError: zipfile cannot read encrypted files and some ways of compression.


def read_members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """Path and content of each regular file in an archive, in the archive's order.

    Read a content before asking for the next file. Contents are not held in memory.

    Raises:
        SourceError: the archive is damaged, or a file in it exceeds `MAX_BYTES`.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as entries:
                for entry in entries.infolist():
                    if not entry.is_dir():
                        _check_size(archive, entry.filename, entry.file_size)
                        with entries.open(entry) as content:
                            yield PurePosixPath(entry.filename), content
        else:
            with tarfile.open(archive, "r|gz") as members:
                for member in members:
                    opened = members.extractfile(member) if member.isreg() else None
                    if opened is not None:
                        _check_size(archive, member.name, member.size)
                        yield PurePosixPath(member.name), opened
    except _DAMAGED as error:
        raise SourceError(f"{archive.name} is damaged: {error}") from error


def unpack_named(archive: Path, names: Sequence[str], folder: Path) -> None:
    """Copy files out of an archive by their last name; their folders are ignored.

    Args:
        archive: a zip (wheel) or tar.gz file.
        names: last names of the files wanted; the first file of a name is taken.
        folder: where to put them.

    Raises:
        SourceError: the archive is damaged or lacks a file, or a file is too large.
    """
    left = set(names)
    for path, content in read_members(archive):
        if path.name in left:
            with open(folder / path.name, "wb") as file:
                try:
                    shutil.copyfileobj(content, file)
                except _DAMAGED as error:
                    raise SourceError(f"{archive.name} is damaged: {error}") from error
            left.discard(path.name)
    if left:
        raise SourceError(f"{archive.name} does not contain {', '.join(sorted(left))}")


def _check_size(archive: Path, name: str, size: int) -> None:
    if size > MAX_BYTES:
        raise SourceError(f"{name} in {archive.name} has {size} bytes, more than {MAX_BYTES}")
