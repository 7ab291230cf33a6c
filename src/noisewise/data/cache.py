"""The cache of decoded datasets: .npy arrays, checked by SHA-256 and replaced atomically."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from noisewise.data.catalogue import DatasetInfo
from noisewise.data.layouts import ARRAYS, Arrays
from noisewise.errors import SourceError
from noisewise.storage import cache_dir, file_lock, reserve, write_atomic

__all__ = [
    "clean",
    "dataset_folder",
    "download_folder",
    "exclusive",
    "open_arrays",
    "problems",
    "publish",
]

MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


def dataset_folder(name: str) -> Path:
    """Return the folder of the decoded arrays of a dataset."""
    return cache_dir() / "datasets" / name


def download_folder(name: str) -> Path:
    """Return the folder of unfinished downloads, from which an interrupted download resumes."""
    return cache_dir() / "downloads" / name


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Let one process at a time download a dataset; other processes wait and then use it.

    The system releases the lock when the process ends, even if it is killed. On a system without
    such locks, two processes may download the same dataset; arrays are replaced atomically anyway.

    Raises:
        SourceError: the cache folder cannot be written.
    """
    path = dataset_folder(name).with_suffix(".lock")
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(
                file_lock(
                    path,
                    lambda: log.warning("%s: waiting for another process to download it", name),
                )
            )
        except OSError as error:
            raise SourceError(
                f"cannot write to the cache folder {path.parent} ({error}); "
                "set NOISEWISE_CACHE to another folder"
            ) from error
        yield


def open_arrays(info: DatasetInfo) -> Arrays:
    """Map the cached arrays into memory, read-only.

    Raises:
        SourceError: an array is missing, cannot be read, or has another type or shape.
    """
    return {array: _open(dataset_folder(info.name), info, array) for array in ARRAYS}


def _open(folder: Path, info: DatasetInfo, array: str) -> NDArray[np.uint8]:
    path = folder / f"{array}.npy"
    try:
        opened = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise SourceError(f"{array} is missing") from None
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise SourceError(f"{array} cannot be read ({error})") from None
    shape = info.shape_of(array)
    if not isinstance(opened, np.ndarray) or opened.dtype != np.uint8 or opened.shape != shape:
        raise SourceError(f"{array} is not a uint8 array of shape {shape}")
    return opened


def problems(info: DatasetInfo) -> list[str]:
    """Hash the cached arrays and return what is wrong with them; an empty list if nothing is."""
    folder = dataset_folder(info.name)
    expected = dict(info.sha256) or _manifest_sha256(folder)
    faults = []
    for array in ARRAYS:
        try:
            actual = _sha256(_open(folder, info, array))
        except SourceError as error:
            faults.append(str(error))
            continue
        if array not in expected:
            faults.append(f"{array} has no SHA-256 to compare with")
        elif actual != expected[array]:
            faults.append(f"{array} has SHA-256 {actual[:12]}.., not {expected[array][:12]}..")
    return faults


def _sha256(array: NDArray[np.uint8]) -> str:
    """Return the SHA-256 of the values in C order, without the header of the file."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).data).hexdigest()


def _manifest_sha256(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the arrays as decoded, from the manifest; empty if it has none."""
    try:
        content: Any = json.loads((folder / MANIFEST).read_bytes())
        return {array: str(content["sha256"][array]) for array in ARRAYS}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def publish(info: DatasetInfo, fill: Callable[[Arrays], None], source: str) -> None:
    """Decode into a temporary folder, verify the arrays, and then move them into the cache.

    Args:
        info: the dataset.
        fill: function that writes all values of the four arrays.
        source: title of the source, for the manifest.

    Raises:
        SourceError: the arrays differ from the published ones. The cache does not change.
    """
    folder = dataset_folder(info.name)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        arrays: dict[str, Any] = {
            array: open_memmap(
                temporary / f"{array}.npy", "w+", dtype=np.uint8, shape=info.shape_of(array)
            )
            for array in ARRAYS
        }
        for array in ARRAYS:
            reserve(temporary / f"{array}.npy")
        fill(arrays)
        digests = {}
        for array, values in arrays.items():
            values.flush()
            digests[array] = _sha256(values)
        arrays.clear()  # unmap
        _compare(info, digests)
        for array in ARRAYS:
            _sync(temporary / f"{array}.npy")
            os.replace(temporary / f"{array}.npy", folder / f"{array}.npy")
        manifest = {"dataset": info.name, "source": source, "sha256": digests}
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def clean(name: str) -> None:
    """Remove the temporary folders of killed processes. The caller holds the lock."""
    for leftover in dataset_folder(name).glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _compare(info: DatasetInfo, digests: Mapping[str, str]) -> None:
    wrong = [a for a in ARRAYS if info.sha256 and digests[a] != info.sha256[a]]
    if wrong:
        raise SourceError(f"the decoded {', '.join(wrong)} differ from the published SHA-256")


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
