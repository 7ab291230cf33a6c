"""What would void the separation of a vault from its relays: each check with its remedy.

`noisewise site serve` refuses to start if a check fails; `noisewise site doctor` prints them all.
The checks read modes and owners only, never a record.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from noisewise.site.path_checks import Finding, chmod, only_ours_to_write, user_name
from noisewise.site.site_file import Site
from noisewise.site.software_files import software_findings
from noisewise.site.vault_config import FederationPart, VaultPart
from noisewise.site.vault_socket import LONGEST_PATH
from noisewise.storage import cache_dir

__all__ = ["Finding", "code_findings", "group_of", "proc_options", "vault_findings"]

_GROUP_OTHERS = 0o077
_READ_WRITE_BY_OTHERS = 0o066
_OVERFLOW_UID = 65534


def vault_findings(site: Site, file: Path) -> list[Finding]:
    """Check accounts, files, folders, sockets and software, for the account that runs this process.

    Args:
        site: loaded from the file.
        file: the site's file, which has ``[vault]``.
    """
    findings = code_findings(file)
    findings += [_relay_account(one, os.geteuid()) for one in _federations(site)]
    findings += _shared_user_ids(_federations(site))
    for path in _record_files(site):
        findings += _private_file(path, "records")
        findings += [only_ours_to_write(path.parent, "folder of the records")]
    ledger = site.ledger_file
    findings += _private_folder(ledger.parent, "folder of the ledger", _GROUP_OTHERS)
    for path in sorted({ledger, *ledger.parent.glob(f"{ledger.name}*")}):
        findings += _private_file(path, "ledger") if not path.is_dir() else []
    for one in _federations(site):
        findings += _socket(one)
    return [*findings, *_process_view(site.config.vault), *_own_function(site)]


def code_findings(file: Path) -> list[Finding]:
    """Check what decides which code runs: account, site's file, software and its cache.

    They are checked before the site's file is read, because it names functions. The cache holds
    noise multipliers and the batch sizes in which records are isolated.
    """
    findings = [_own_account(), only_ours_to_write(file.absolute(), "site's file")]
    findings += software_findings()
    return [*findings, only_ours_to_write(cache_dir().absolute(), "cache")]


def _federations(site: Site) -> list[FederationPart]:
    return [] if site.config.vault is None else site.config.vault.federations


def _record_files(site: Site) -> list[Path]:
    part = site.config.data
    return [site.folder / name for name in (part.file, part.held_out) if name]


# ---------------------------------------------------------------- accounts


def _own_account() -> Finding:
    if os.geteuid() == 0:
        remedy = "run it as an account of its own: sudo -u noisewise-vault noisewise site ..."
        return Finding("account", "this process runs as root, which can read everything", remedy)
    return Finding(f"account: {user_name(os.geteuid())}")


def _relay_account(one: FederationPart, own: int) -> Finding:
    subject = f"relay of {one.name}: account {one.account}"
    try:
        account = pwd.getpwnam(one.account)
    except KeyError:
        return Finding(subject, "does not exist", f"useradd --system {one.account}")
    if account.pw_uid in (own, 0):
        remedy = "give the relay an account of its own, and name it in [[vault.federations]]"
        fault = "is root" if account.pw_uid == 0 else "is the account of the vault"
        return Finding(subject, fault, remedy)
    if account.pw_uid in _overflow_ids():
        fault = f"has user id {account.pw_uid}, as all accounts that another namespace does not map"
        return Finding(subject, fault, f"useradd --system {one.name}-relay, and name it instead")
    group = group_of(one)
    if group is None:
        return Finding(subject, f"group {one.group!r} does not exist", "correct `group`")
    if own != 0 and group not in {os.getegid(), *os.getgroups()}:
        name = _group(group)
        remedy = f"usermod --append --groups {name} {user_name(own)}, and restart the vault"
        return Finding(subject, f"the vault is not in its group {name}", remedy)
    return Finding(subject)


def _overflow_ids() -> set[int]:
    """Ids that the kernel shows for every account without a number in this user namespace."""
    try:
        return {_OVERFLOW_UID, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return {_OVERFLOW_UID}


def _shared_user_ids(federations: list[FederationPart]) -> list[Finding]:
    """Two names of one user id: the kernel sees the id only, so each could use both sockets."""
    first: dict[int, FederationPart] = {}
    findings = []
    for one in federations:
        try:
            uid = pwd.getpwnam(one.account).pw_uid
        except KeyError:
            continue
        other = first.setdefault(uid, one)
        if other is not one:
            subject = f"relay of {one.name}: account {one.account}"
            fault = f"has the user id {uid} of {other.account}, the relay of {other.name}"
            findings.append(Finding(subject, fault, "give every relay a user id of its own"))
    return findings


def group_of(one: FederationPart) -> int | None:
    """Id of the socket's group; None if there is no such group."""
    try:
        if one.group is None:
            return pwd.getpwnam(one.account).pw_gid
        return grp.getgrnam(one.group).gr_gid
    except KeyError:
        return None


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# ---------------------------------------------------------------- warnings


def proc_options(mountinfo: str) -> dict[str, str]:
    """Options of the file system that is mounted last at ``/proc``."""
    lines = [line.split() for line in mountinfo.splitlines()]
    mounts = [words for words in lines if len(words) > 6 and words[4] == "/proc"]
    pairs = mounts[-1][-1].split(",") if mounts else []
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _process_view(part: VaultPart | None) -> list[Finding]:
    """Whether relays can read CPU time and memory of the vault, which depend on its records.

    Under systemd this process may have a ``/proc`` of its own, which says nothing about that of the
    relays.
    """
    if part is None:
        return []
    if part.relays_see_no_processes:
        return [Finding("processes: the site declares that its relays see none of others")]
    options = proc_options(Path("/proc/self/mountinfo").read_text())
    hidden = options.get("hidepid", "off")
    if hidden not in ("0", "off") and "INVOCATION_ID" not in os.environ:
        exempt = int(options.get("gid", "0"))
        if not any(exempt in _groups(one.account) for one in part.federations):
            return [Finding(f"processes: /proc is mounted with hidepid={hidden}")]
    return [
        Finding(
            "processes: /proc",
            warning="a relay can read CPU time and memory of the vault in /proc/PID/stat, and they "
            "depend on the number of records",
            remedy="mount -o remount,hidepid=invisible /proc; or, if the relays run with "
            "ProtectProc=invisible, set relays_see_no_processes = true in [vault]",
        )
    ]


def _groups(account: str) -> list[int]:
    try:
        return os.getgrouplist(account, pwd.getpwnam(account).pw_gid)
    except KeyError:
        return []


def _own_function(site: Site) -> list[Finding]:
    name = site.config.data.function
    if not name:
        return []
    warning = "the files that it reads cannot be checked"
    remedy = f"give them to {user_name(os.geteuid())} alone: mode 0600, in a folder with mode 0700"
    return [Finding(f"records: data.function = {name!r}", warning=warning, remedy=remedy)]


# ---------------------------------------------------------------- files


def _private_file(path: Path, name: str) -> list[Finding]:
    """A regular file of this account that no other account can open."""
    subject = f"{name}: {path}"
    status = _status(path)
    if status is None:
        return [Finding(subject, "is missing", "correct the path, or create the file")]
    if not stat.S_ISREG(status.st_mode):
        return [Finding(subject, "is not a regular file", "name the file itself, without a link")]
    return [_owned(path, subject, status, _GROUP_OTHERS), only_ours_to_write(path.parent, name)]


def _private_folder(path: Path, name: str, forbidden: int) -> list[Finding]:
    subject = f"{name}: {path}"
    status = _status(path)
    if status is None:
        return [Finding(subject, "is missing", f"install -d -m 0700 {path}")]
    if not stat.S_ISDIR(status.st_mode):
        return [
            Finding(subject, "is not a folder, or is a symbolic link", "name the folder itself")
        ]
    return [_owned(path, subject, status, forbidden), only_ours_to_write(path, name)]


def _owned(path: Path, subject: str, status: os.stat_result, forbidden: int) -> Finding:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        fault = f"belongs to {user_name(status.st_uid)}, who can open it"
        return Finding(subject, fault, f"chown {user_name(os.geteuid())} {path}")
    if mode & forbidden:
        allowed = mode & ~forbidden
        return Finding(subject, f"has mode {mode:04o}: others can open it", chmod(allowed, path))
    return Finding(f"{subject}, mode {mode:04o}")


def _socket(one: FederationPart) -> list[Finding]:
    path = Path(one.socket)
    subject = f"socket of {one.name}: {path}"
    findings = _private_folder(
        path.parent, f"folder of the socket of {one.name}", _READ_WRITE_BY_OTHERS
    )
    if len(os.fsencode(path)) > LONGEST_PATH:
        remedy = f"use a path of at most {LONGEST_PATH} bytes"
        return [*findings, Finding(subject, "is too long", remedy)]
    status = _status(path)
    if status is not None and not stat.S_ISSOCK(status.st_mode):
        return [*findings, Finding(subject, "exists and is not a socket", f"remove {path}")]
    if status is not None and status.st_mode & 0o007:
        return [*findings, Finding(subject, "is open to all accounts", f"chmod 0660 {path}")]
    return [*findings, Finding(subject)]


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
