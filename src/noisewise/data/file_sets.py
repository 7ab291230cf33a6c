"""The cache of source files: copies of a dataset's files, verified by SHA-256 on every load."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from noisewise.data.archives import unpack_named
from noisewise.data.cache import dataset_folder
from noisewise.data.federations import FederationInfo
from noisewise.errors import SourceError

__all__ = ["cached_files", "file_problems", "keep_files"]


def cached_files(info: FederationInfo) -> dict[str, Path]:
    """Return the paths of a dataset's files in the cache; they may not exist."""
    return {name: dataset_folder(info.name) / name for name in info.files}


def file_problems(info: FederationInfo) -> list[str]:
    """Return what is wrong with the cached files; all of them are hashed."""
    problems = []
    for name, path in cached_files(info).items():
        expected = info.files[name]
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (actual := _sha256(path)) != expected:
            problems.append(f"{name} has the SHA-256 {actual[:12]}.., not {expected[:12]}..")
    return problems


def keep_files(info: FederationInfo, folder: Path) -> None:
    """Verify the files in ``folder`` (or in the archive there) and copy them into the cache.

    Raises:
        SourceError: a file is missing or is not the right one; the cache stays as it is.
    """
    target = dataset_folder(info.name)
    target.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target))
    try:
        if all((folder / name).is_file() for name in info.files):
            for name in info.files:
                shutil.copyfile(folder / name, temporary / name)
        elif info.archive is not None and (folder / info.archive).is_file():
            unpack_named(folder / info.archive, tuple(info.files), temporary)
        else:
            raise SourceError("the files are missing")
        for name, expected in info.files.items():
            actual = _sha256(temporary / name)
            if actual != expected:
                raise SourceError(f"{name} has the SHA-256 {actual}, not {expected}")
        for name in info.files:
            with open(temporary / name, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary / name, target / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
