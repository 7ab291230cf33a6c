"""`serve_site`: start a vault after its checks, and answer until the process receives SIGTERM."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import pwd
import resource
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

from noisewise.errors import InvalidValueError, VaultError
from noisewise.site.loaded_site import keep_loaded
from noisewise.site.log_limit import LogLimit
from noisewise.site.site_file import Site, load_site
from noisewise.site.vault import Door, Vault
from noisewise.site.vault_checks import Finding, code_findings, group_of, vault_findings
from noisewise.site.vault_config import VaultPart
from noisewise.site.vault_socket import Listener
from noisewise.storage import sole_lock

__all__ = ["load_vault_site", "open_doors", "serve_site"]

_log = logging.getLogger("noisewise.site")


def load_vault_site(file: Path) -> tuple[Site, VaultPart]:
    """The site of a file that has ``[vault]``.

    Raises:
        VaultError: another account can change the file, the software or its cache.
        InvalidValueError: the file is invalid or has no ``[vault]``.
    """
    _refuse_faults(code_findings(file), file)  # before code that the file names is run
    site = load_site(file)
    if site.config.vault is None:
        allowed = "must be given, with a [[vault.federations]] for each federation (docs/vault.md)"
        raise InvalidValueError(f"{file}: vault", None, allowed)
    return site, site.config.vault


def _refuse_faults(findings: list[Finding], file: Path) -> None:
    faults = [one for one in findings if one.fault]
    if faults:
        first = f"{faults[0].subject}: {faults[0].fault}; {faults[0].remedy}"
        more = f" (faults: {len(faults)}; `noisewise site doctor {file}` lists all checks)"
        raise VaultError(f"the vault does not start: {first}{more}")


def open_doors(part: VaultPart) -> list[Door]:
    """Listen at the socket of every federation.

    Raises:
        InvalidValueError: an account or group does not exist, or a path is occupied.
    """
    doors = []
    for one in part.federations:
        group = group_of(one)
        if group is None:
            raise InvalidValueError("vault.federations.account", one.account, "must exist")
        listener = Listener(Path(one.socket), group, one.mode)
        doors.append(Door(one.name, listener, pwd.getpwnam(one.account).pw_uid))
    return doors


def serve_site(file: Path) -> None:
    """Run a vault until SIGTERM or SIGINT.

    Records, engine and model are loaded once; a changed file takes effect after a restart.

    Args:
        file: the site's file.

    Raises:
        VaultError: a check failed, or another vault serves this ledger.
        NoisewiseError: a file of the site is missing or damaged.
    """
    site, part = load_vault_site(file)
    findings = vault_findings(site, file)
    _refuse_faults(findings, file)
    for one in findings:
        if one.warning:
            _log.warning("WARNING: %s: %s; remedy: %s", one.subject, one.warning, one.remedy)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold records
    _log.addFilter(LogLimit())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as locks:
        _lock(site, part, locks)
        with site.open_ledger():  # a damaged ledger ends the start, not a round
            loaded = keep_loaded(site)
        doors = open_doors(part)
        for door in doors:
            path, uid = door.listener.path, door.peer_uid
            _log.info("%s: %s answers user id %d", door.federation, path, uid)
        Vault(loaded, part, doors).run(stop)


def _lock(site: Site, part: VaultPart, locks: ExitStack) -> None:
    """One vault for a ledger, a file of records and a dataset: two would promise the budget twice.

    Vaults with the same dataset find each other if they have a folder of sockets in common.

    Raises:
        VaultError: another process has one of the locks.
    """
    ledger = site.ledger_file
    held = f"{ledger}: another vault serves this dataset; end it first"
    try:
        locks.enter_context(sole_lock(ledger.with_name(f"{ledger.name}-vault")))
        if site.config.data.file:
            held = f"{site.config.data.file}: another vault uses these records with another ledger"
            records = os.open(site.folder / site.config.data.file, os.O_RDONLY | os.O_CLOEXEC)
            locks.callback(os.close, records)
            fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dataset = site.config.ledger.dataset
        name = f".dataset-{hashlib.sha256(dataset.encode()).hexdigest()[:32]}"
        for folder in sorted({Path(one.socket).parent for one in part.federations}):
            held = f"dataset {dataset!r}: another vault with sockets in {folder} has it"
            locks.enter_context(sole_lock(folder / name))
    except BlockingIOError:
        raise VaultError(held) from None
