"""Write the lock files with the SHA-256 of every file that pip may install (`make lock`).

pip itself resolves the requirements of pyproject.toml (`pip install --dry-run --report`), with the
indexes of this machine's own pip configuration. Packages that a lock file pins already keep their
version, unless they are named after `--upgrade`. pip's report has the hash of the one file that
this machine would install; the indexes list those of the same version's files for other machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pip._vendor.packaging.utils import (  # the copy that every venv has
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("cp311", "cp312", "cp313")
SYSTEMS = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)|macosx_.*_(x86_64|arm64|universal2)")
HEADER = """\
# {title}
# Written by `make lock` for Python 3.11 on Linux; the hashes of the same versions for Python 3.12
# and 3.13 and for macOS are listed too. pip installs no file whose SHA-256 is not listed here.
"""
TORCH = """\
# torch: on Linux only the CPU build is listed; pip takes it if one of its indexes offers it. The
# builds for GPUs need further packages. `make install HASHES=no` accepts any build of this version.
"""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Lock:
    """One lock file: its name, what it is for, and the groups of pyproject.toml that it adds."""

    file: str
    title: str
    extras: tuple[str, ...]


LOCKS = (
    Lock("requirements.lock", "What `make install` installs.", ("dev",)),
    Lock(
        "requirements-extras.lock",
        "What `make check` installs on top of requirements.lock: Ray, TensorBoard, MLflow, Flower, "
        "pandas, pyarrow, cryptography, transformers, peft.",
        ("ray", "flower", "track", "frame", "sign", "parquet", "hf"),
    ),
    Lock(
        "requirements-docs.lock",
        "What `make docs` installs on top of requirements.lock.",
        ("docs",),
    ),
    Lock(
        "requirements-bench.lock",
        "What `make bench` installs on top of requirements.lock: libraries that we compare with.",
        ("bench",),
    ),
)


@dataclass(frozen=True)
class Pin:
    """One package of a lock file."""

    name: str
    version: str
    hashes: frozenset[str]

    def text(self) -> str:
        """The requirement as pip reads it."""
        lines = [
            f"{self.name}=={self.version}",
            *(f"--hash=sha256:{h}" for h in sorted(self.hashes)),
        ]
        return " \\\n    ".join(lines) + "\n"


def pinned(text: str) -> dict[str, str]:
    """Versions by canonical name, from the text of a lock file."""
    return {str(canonicalize_name(name)): version for name, version in _PIN.findall(text)}


def resolve(requirements: Iterable[str], pins: Mapping[str, str]) -> list[dict[str, Any]]:
    """What pip would install into an empty environment: the `install` part of its report."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, constraints = Path(folder) / "wanted.txt", Path(folder) / "constraints.txt"
        wanted.write_text("\n".join(requirements) + "\n")
        constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.items()))
        words = ["install", "--dry-run", "--ignore-installed", "--quiet"]
        words += ["--disable-pip-version-check", "--report", f"{folder}/report.json"]
        words += ["-r", str(wanted), "-c", str(constraints)]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        found: list[dict[str, Any]] = json.loads(Path(f"{folder}/report.json").read_text())[
            "install"
        ]
    return found


class Indexes:
    """The files that pip's configured indexes and folders offer.

    Only pip knows these places and how to read them, and it has no command that lists hashes. The
    parts used here are internal, but the same from pip 23 to 26, and pip-tools uses them too.
    """

    def __init__(self) -> None:
        from pip._internal.commands import create_command

        command: Any = create_command("install")
        options, _ = command.parse_args(["--quiet"])
        with command.main_context():
            session = command.get_default_session(options)
            self._collector = command._build_package_finder(options, session)._link_collector
        self._session = session

    def _page(self, address: Any) -> Iterator[Any]:
        from pip._internal.index.collector import parse_links

        page = self._collector.fetch_response(address)
        return iter(() if page is None else parse_links(page))

    def files(self, name: str) -> dict[str, str]:
        """SHA-256 by file name of everything that is offered under a package's name.

        Raises:
            ValueError: if two places offer different files under one name.
        """
        found: dict[str, str] = {}
        sources = self._collector.collect_sources(name, self._page)
        for source in (*sources.find_links, *sources.index_urls):
            for link in () if source is None else (*source.page_candidates(), *source.file_links()):
                try:
                    owner = _parts(link.filename)[0]
                except ValueError:
                    continue
                if owner != canonicalize_name(name):
                    continue
                digest = link.hash if link.hash_name == "sha256" else _digest(link)
                if digest and found.setdefault(link.filename, digest) != digest:
                    raise ValueError(f"{link.filename}: two places offer different files")
        return found


def _digest(link: Any) -> str | None:
    """The SHA-256 of a file in a folder of this machine; None for any other."""
    return hashlib.sha256(Path(link.file_path).read_bytes()).hexdigest() if link.is_file else None


def _parts(file: str) -> tuple[str, Version, frozenset[Any]]:
    """Canonical name, version and tags (none for a source distribution) of a file.

    Raises:
        ValueError: if its name is neither a wheel's nor a source distribution's.
    """
    try:
        name, version, _, tags = parse_wheel_filename(file)
        return str(name), version, tags
    except InvalidWheelFilename:
        pass
    try:
        name, version = parse_sdist_filename(file)
    except InvalidSdistFilename as error:
        raise ValueError(file) from error
    return str(name), version, frozenset()


def _fits(tag: Any) -> bool:
    """Whether a wheel with this tag can be installed on one of the supported systems."""
    since = re.fullmatch(r"cp3(\d+)", tag.interpreter) if tag.abi == "abi3" else None
    python = (
        tag.interpreter == "py3"
        or (tag.interpreter in PYTHONS and tag.abi in (tag.interpreter, "none"))
        or (since is not None and f"cp3{since[1]:0>2}" <= PYTHONS[-1])
    )
    return python and SYSTEMS.fullmatch(tag.platform) is not None


def allowed(chosen: str, offered: Mapping[str, str]) -> frozenset[str]:
    """Hashes of the files that may be installed where this machine installs ``chosen``.

    Wheels of the same version for the supported systems; the source distribution only where pip
    chose it here. If the chosen file is a build of its own (``2.13.0+cpu``), the plain builds for
    the same system are other builds, with other requirements: they are not listed.

    Args:
        chosen: name of the file that pip installs here.
        offered: SHA-256 by file name.
    """
    _, version, _ = _parts(chosen)
    found = set()
    for file, digest in offered.items():
        _, other, tags = _parts(file)
        same_build = other == version
        elsewhere = version.local is not None and str(other) == version.public
        if elsewhere and any("linux" in tag.platform for tag in tags):
            continue
        if (same_build or elsewhere) and (file == chosen or any(map(_fits, tags))):
            found.add(digest)
    return frozenset(found)


def pins(report: Sequence[Mapping[str, Any]], indexes: Indexes) -> list[Pin]:
    """What the report installs, with all allowed hashes, in order of names.

    Raises:
        ValueError: if the indexes do not list the file that pip would install.
    """
    found = []
    for item in report:
        name, version = item["metadata"]["name"], Version(item["metadata"]["version"])
        source = item["download_info"]
        chosen = source["url"].rpartition("/")[2].replace("%2B", "+")
        hashes = allowed(chosen, indexes.files(name))
        digest = source["archive_info"]["hashes"]["sha256"]
        if digest not in hashes:
            raise ValueError(f"{chosen}: no index lists its SHA-256 {digest}")
        found.append(Pin(name, version.public, hashes))
    return sorted(found, key=lambda pin: str(canonicalize_name(pin.name)))


def main() -> None:
    """Resolve all lock files, then write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--upgrade", nargs="+", default=[], metavar="NAME", help="do not keep these"
    )
    upgraded = {canonicalize_name(name) for name in parser.parse_args().upgrade}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known: dict[str, str] = {}
    for lock in LOCKS:
        known |= pinned((ROOT / lock.file).read_text())
    known = {name: version for name, version in known.items() if name not in upgraded}
    base = [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools"]
    indexes, inherited, texts = Indexes(), set[str](), {}
    for lock in LOCKS:
        groups = [project["optional-dependencies"][extra] for extra in lock.extras]
        report = resolve([*base, *(line for group in groups for line in group)], known)
        new = [
            item for item in report if canonicalize_name(item["metadata"]["name"]) not in inherited
        ]
        found = pins(new, indexes)
        known |= {str(canonicalize_name(pin.name)): pin.version for pin in found}
        if lock is LOCKS[0]:
            inherited = {canonicalize_name(pin.name) for pin in found}
        header = HEADER.format(title=lock.title)
        header += TORCH if any(pin.name == "torch" for pin in found) else ""
        texts[lock.file] = header + "".join(pin.text() for pin in found)
        print(f"{lock.file}: {len(found)} packages, {sum(len(p.hashes) for p in found)} hashes")
    for file, text in texts.items():
        (ROOT / file).write_text(text)


if __name__ == "__main__":
    main()
