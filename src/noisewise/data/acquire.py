"""Get a dataset: try the user's folder, then each source, until the arrays are correct."""

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
from typing import Protocol

from noisewise.data.cache import download_folder, publish
from noisewise.data.catalogue import DatasetInfo
from noisewise.data.progress import Progress
from noisewise.data.sources import Source
from noisewise.errors import SourceError
from noisewise.storage import DISK_FULL_CODES

__all__ = ["FOLDER_VARIABLE", "acquire", "decode_layouts"]

FOLDER_VARIABLE = "NOISEWISE_DATA"
_CANNOT_WRITE = DISK_FULL_CODES | {errno.EROFS}
log = logging.getLogger(__name__)


class Acquirable(Protocol):
    """What `acquire` must know about a dataset."""

    @property
    def name(self) -> str:
        """Name for `load_dataset`."""
        ...

    @property
    def folders(self) -> tuple[str, ...]:
        """Subfolders of the user's folder to search, besides the name."""
        ...

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of the files, in the order in which they are tried."""
        ...

    @property
    def file_choices(self) -> tuple[str, ...]:
        """File lists; the user's folder must contain one of them."""
        ...


Store = Callable[[Path, str], None]
"""(folder with the files, title of the source): verifies the files and puts them into the cache."""


def acquire(info: Acquirable, folder: str | Path | None, progress: Progress, store: Store) -> str:
    """Put a dataset into the cache. The caller holds the dataset's lock.

    Args:
        info: the dataset.
        folder: folder with files that the user downloaded; None uses the environment variable
            ``NOISEWISE_DATA``, if it is set.
        progress: called during downloads.
        store: checks the files of a folder and puts them into the cache.

    Returns:
        The title of the source of the arrays.

    Raises:
        SourceError: no source has the dataset, or the cache folder cannot be written. The message
            lists what was tried and which files the user can provide.
    """
    tried = []
    for title, get in _candidates(info, folder, progress):
        try:
            store(get(), title)
        except (OSError, EOFError, SourceError, tarfile.TarError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
                path = error.filename or download_folder(info.name)
                raise SourceError(
                    f"{info.name}: cannot write to the cache folder ({path}: {error.strerror}); "
                    "free disk space, or set NOISEWISE_CACHE to another folder"
                ) from error
            tried.append(f"  {title}: {error}")
            log.info("%s: %s: %s", info.name, title, error)
            continue
        shutil.rmtree(download_folder(info.name), ignore_errors=True)
        return title
    raise SourceError(_advice(info, tried))


def _candidates(
    info: Acquirable, folder: str | Path | None, progress: Progress
) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Yield the title of each folder and source to try, and a function that gets its files."""
    named = folder or os.environ.get(FOLDER_VARIABLE)
    if named:
        root = Path(named).expanduser()
        if not root.is_dir():
            yield f"folder {root}", lambda: _missing(root)
        for inside in (info.name, *info.folders, "."):
            path = root / inside
            if path.is_dir():
                yield f"folder {path}", lambda path=path: path  # type: ignore[misc]
    for source in info.sources:
        yield (
            source.title,
            lambda source=source: source.fetch(download_folder(info.name), progress),  # type: ignore[misc]
        )


def _missing(folder: Path) -> Path:
    raise SourceError(f"{folder} is not a folder")


def decode_layouts(info: DatasetInfo, folder: Path, title: str, progress: Progress) -> None:
    """Write the arrays of the first layout in the folder that gives correct ones.

    Raises:
        SourceError: the folder has no layout of the dataset, or none gives correct arrays.
    """
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
    raise SourceError("; ".join(failures) or "the files are missing")


def _advice(info: Acquirable, tried: list[str]) -> str:
    return "\n".join(
        [
            f"{info.name}: no source has this dataset. Tried:",
            *(tried or ["  nothing: this dataset can only be read from your own folder"]),
            f"To use your own copy: noisewise data get {info.name} --folder FOLDER, or set "
            f"{FOLDER_VARIABLE}=FOLDER. The folder must contain",
            *(f"  {'or ' if n else ''}{names}" for n, names in enumerate(info.file_choices)),
        ]
    )
