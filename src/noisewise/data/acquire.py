"""Acquire a dataset: try the user's folder, then each source, until the arrays are right."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from noisewise.data.cache import download_folder, publish
from noisewise.data.catalogue import DatasetInfo
from noisewise.data.progress import Progress
from noisewise.errors import SourceError
from noisewise.storage import NO_ROOM

__all__ = ["FOLDER_VARIABLE", "acquire"]

FOLDER_VARIABLE = "NOISEWISE_DATA"
_NO_ROOM = NO_ROOM | {errno.EROFS}
log = logging.getLogger(__name__)


def acquire(info: DatasetInfo, folder: str | Path | None, progress: Progress) -> str:
    """Put the arrays of a dataset into the cache. Only while holding its lock.

    Args:
        info: the dataset.
        folder: where files were placed by hand; else the variable ``NOISEWISE_DATA`` names it.
        progress: told about downloads and decoding.

    Returns:
        The source that had it.

    Raises:
        SourceError: none had it; the message lists what was tried and how to place a file by hand.
    """
    tried = []
    for title, get in _places(info, folder, progress):
        try:
            _decode(info, get(), title, progress)
        except (OSError, EOFError, SourceError, tarfile.TarError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                place = error.filename or download_folder(info.name)
                raise SourceError(
                    f"{info.name}: no room in the cache folder ({place}: {error.strerror}); "
                    "make room or name another one by NOISEWISE_CACHE"
                ) from error
            tried.append(f"  {title}: {error}")
            log.info("%s: %s: %s", info.name, title, error)
            continue
        shutil.rmtree(download_folder(info.name), ignore_errors=True)
        return title
    raise SourceError(_advice(info, tried))


def _places(
    info: DatasetInfo, folder: str | Path | None, progress: Progress
) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Title of each place to look in, and how to get a folder with the files."""
    named = folder or os.environ.get(FOLDER_VARIABLE)
    if named:
        root = Path(named).expanduser()
        if not root.is_dir():
            yield f"folder {root}", lambda: _missing(root)
        for inside in (info.name, *info.folders, "."):
            place = root / inside
            if place.is_dir():
                yield f"folder {place}", lambda place=place: place  # type: ignore[misc]
    for source in info.sources:
        yield (
            source.title,
            lambda source=source: source.fetch(download_folder(info.name), progress),  # type: ignore[misc]
        )


def _missing(folder: Path) -> Path:
    raise SourceError(f"{folder} is no folder")


def _decode(info: DatasetInfo, folder: Path, title: str, progress: Progress) -> None:
    """Publish the first layout in the folder that gives the right arrays."""
    failures = []
    for layout in info.layouts:
        files = layout.find(folder)
        if files is None:
            continue
        try:
            publish(info, lambda arrays: layout.fill(files, arrays, progress), title)  # noqa: B023
            return
        except (
            EOFError,
            SourceError,
            tarfile.TarError,
            zlib.error,
            gzip.BadGzipFile,
        ) as error:
            failures.append(f"{layout.title}: {error}")
    raise SourceError("; ".join(failures) or "none of the files are there")


def _advice(info: DatasetInfo, tried: list[str]) -> str:
    ways = [
        ", ".join(layout.files) + (" (or each with .gz)" if layout.gzipped else "")
        for layout in info.layouts
    ]
    return "\n".join(
        [
            f"{info.name}: no source has it. Tried:",
            *(tried or ["  nothing: it has no other source than a folder of yours"]),
            f"By hand: noisewise data get {info.name} --folder FOLDER or {FOLDER_VARIABLE}=FOLDER; "
            "the folder holds",
            *(f"  {'or ' if number else ''}{way}" for number, way in enumerate(ways)),
        ]
    )
