"""Files that a vault runs code from: no other account owns or can write any of them.

Owners and modes are read (`lstat`), no content. A folder that others cannot change may hold a file
that they can.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import noisewise
from noisewise.site.path_checks import Finding, fault_of, members, only_ours_to_write

__all__ = ["software_findings"]

_WRITE_BY_OTHERS = 0o022
Fault = tuple[str, str]


def software_findings() -> list[Finding]:
    """Check the paths that this process runs code from, and all files below them."""
    return _findings(tuple(_code_paths()), tuple(_folders()), os.geteuid())


def _code_paths() -> list[Path]:
    """Paths that decide which code runs, existing or not: others may not create them either."""
    paths = [Path(sys.executable), Path(sys.prefix), Path(noisewise.__file__).parent]
    paths += [Path(sys.prefix, "pyvenv.cfg"), *(Path(one).absolute() for one in sys.path)]
    return sorted({path.resolve() for path in paths})


def _folders() -> list[Path]:
    """Folders whose files are code."""
    paths = [path for path in map(Path, sys.path) if path.absolute() != Path("/")]
    paths.append(Path(noisewise.__file__).parent)
    if sys.prefix not in ("/usr", "/"):  # a system's own folder has programs of many accounts
        paths.append(Path(sys.prefix, "bin"))
    folders = {path.resolve() for path in paths if path.is_dir()}
    return sorted(folder for folder in folders if not folders & set(folder.parents))


@functools.cache  # once in a process: a large environment has 100,000 files
def _findings(paths: tuple[Path, ...], folders: tuple[Path, ...], own: int) -> list[Finding]:
    findings = [only_ours_to_write(path, "software") for path in paths]
    walk = _Walk()
    for folder in folders:
        faults = list(walk.faults(folder))
        subject = f"software: files in {folder}"
        if faults:
            fault, remedy = faults[0]
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            findings.append(Finding(subject, fault + more, remedy))
        else:
            findings.append(Finding(subject))
    return findings + [one for one in walk.link_findings() if one.fault]


class _Walk:
    """Visits every file once, also if folders contain each other or links form a circle."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._links: set[str] = set()
        self._members: Callable[[int], list[str]] = functools.cache(members)

    def faults(self, folder: Path) -> Iterator[Fault]:
        """Faults of the files below a folder. Links are noted, not followed."""
        waiting = [str(folder)]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    listed = list(entries)
            except PermissionError:
                continue  # this account cannot run code from it either
            for entry in listed:
                status = entry.stat(follow_symlinks=False)
                is_link, is_folder = stat.S_ISLNK(status.st_mode), stat.S_ISDIR(status.st_mode)
                if is_link:
                    self._links.add(os.path.realpath(entry.path))
                elif is_folder and (key := (status.st_dev, status.st_ino)) not in self._seen:
                    self._seen.add(key)
                    waiting.append(entry.path)
                writable = status.st_mode & _WRITE_BY_OTHERS and not is_link
                if writable or status.st_uid not in (0, os.geteuid()):
                    mode = stat.S_IMODE(status.st_mode) & (0 if is_link else ~0)
                    path = Path(entry.path)
                    fault = fault_of(path, status.st_uid, mode, status.st_gid, self._members)
                    if fault is not None:
                        yield fault

    def link_findings(self) -> Iterator[Finding]:
        """Check what the links lead to, and further links there."""
        done: set[str] = set()
        while waiting := self._links - done:
            done |= waiting
            for target in sorted(waiting):
                yield only_ours_to_write(Path(target), "software")
                if os.path.isdir(target):
                    for fault, remedy in self.faults(Path(target)):
                        yield Finding(f"software: files in {target}", fault, remedy)
