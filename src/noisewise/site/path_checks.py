"""Who can change a path: the findings of a vault's checks about owners and modes."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding", "chmod", "fault_of", "members", "only_ours_to_write", "user_name"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: what was checked.
        fault: what is wrong; empty if nothing is.
        remedy: what to do about it, or about the warning.
        warning: a weakness with which the vault still starts, or what cannot be checked.
    """

    subject: str
    fault: str = ""
    remedy: str = ""
    warning: str = ""


def user_name(uid: int) -> str:
    """Name of an account; its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def only_ours_to_write(path: Path, name: str) -> Finding:
    """Only root and this account can change the path, or any folder above it."""
    subject = f"{name}: who can change {path}"
    real = path.resolve()
    if path.absolute() != real:
        return Finding(subject, "a part of it is a symbolic link, or ..", f"use {real} instead")
    missing = False
    for part in (real, *real.parents):
        try:
            status = os.lstat(part)
        except (FileNotFoundError, NotADirectoryError):
            missing = True
            continue
        except OSError as error:
            return Finding(subject, f"{part}: {error.strerror}", "correct the path")
        mode = stat.S_IMODE(status.st_mode)
        if missing and mode & stat.S_ISVTX and mode & 0o022:
            reason = f"is missing, and other accounts can create it in {part}"
            return Finding(subject, reason, f"install -d -m 0700 {real}, or remove its name")
        is_shared = part != real and mode & stat.S_ISVTX and status.st_uid == 0
        # as /tmp: others cannot rename or remove what is not theirs
        fault = None if is_shared else fault_of(part, status.st_uid, mode, status.st_gid)
        if fault is not None:
            return Finding(subject, *fault)
        missing = False
    return Finding(subject)


def fault_of(
    path: Path,
    owner: int,
    mode: int,
    group: int,
    members_of: Callable[[int], list[str]] | None = None,
) -> tuple[str, str] | None:
    """Fault and remedy of one file or folder, from its owner, mode and group."""
    if owner not in (0, os.geteuid()):
        return f"{path} belongs to {user_name(owner)}", f"chown root {path}"
    if mode & stat.S_IWOTH:
        return f"{path} is writable by all accounts", chmod(mode & ~0o022, path)
    if mode & stat.S_IWGRP and "system.posix_acl_access" in os.listxattr(path):
        return f"{path} has an access list that lets others write", f"setfacl --remove-all {path}"
    if mode & stat.S_IWGRP and (others := (members_of or members)(group)):
        return f"{path} is writable by {', '.join(others[:3])}", chmod(mode & ~0o022, path)
    return None


def members(gid: int) -> list[str]:
    """Accounts in a group, except root and this account."""
    names = {one.pw_name for one in pwd.getpwall() if one.pw_gid == gid}
    with contextlib.suppress(KeyError):
        names |= set(grp.getgrgid(gid).gr_mem)
    return sorted(names - {"root", user_name(os.geteuid())})


def chmod(mode: int, path: Path) -> str:
    """A remedy."""
    return f"chmod {mode:04o} {path}"
