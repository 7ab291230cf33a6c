"""The vault under an account of its own, hostile programs under the relay's. Needs root.

Each attack is first shown to succeed with the separation removed: the same account, or lax modes.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vault_accounts import (
    ENVIRONMENT,
    ROOT,
    Account,
    VaultSite,
    another_account,
    two_accounts,
    vault_site,
)

pytestmark = [pytest.mark.accounts]


@pytest.fixture(scope="module")
def accounts() -> Iterator[tuple[Account, Account]]:
    with two_accounts() as made:
        yield made


@pytest.fixture(scope="module")
def site(accounts: tuple[Account, Account]) -> Iterator[VaultSite]:
    """A running vault; the tests of this file share it and may not harm it."""
    with vault_site(*accounts) as made:
        yield made


# Opens everything that it can of a vault: its files, and its process.
THIEF = """
import ctypes, json, os, sys
folder, pid = sys.argv[1], sys.argv[2]
got = []
def attempt(name, action):
    try:
        if action():
            got.append(name)
    except OSError:
        pass
def content(path):
    return lambda: len(open(path, "rb").read(64)) > 0
def memory():
    for line in open(f"/proc/{pid}/maps"):
        if " rw-p " in line and "[heap]" in line:
            start = int(line.split("-")[0], 16)
            with open(f"/proc/{pid}/mem", "rb", 0) as file:
                file.seek(start)
                return len(file.read(4096)) == 4096
def attach():
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.ptrace(16, int(pid), None, None)  # PTRACE_ATTACH
    if not failed:
        os.waitpid(int(pid), 0)
        libc.ptrace(17, int(pid), None, None)
    return not failed
def read_memory():
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(16)
    start = next(int(line.split("-")[0], 16) for line in open(f"/proc/{pid}/maps"))
    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    own, other = Piece(ctypes.addressof(buffer), 16), Piece(start, 16)
    return libc.process_vm_readv(int(pid), ctypes.byref(own), 1, ctypes.byref(other), 1, 0) == 16
attempt("list", lambda: os.listdir(folder))
attempt("records", content(f"{folder}/records.npz"))
attempt("ledger", content(f"{folder}/site.ledger"))
attempt("witness", content(f"{folder}/site.ledger-witness"))
attempt("site file", content(f"{folder}/site.toml"))
attempt("write ledger", lambda: os.close(os.open(f"{folder}/site.ledger", os.O_WRONLY)) is None)
attempt("unlink ledger", lambda: os.rename(f"{folder}/site.ledger", f"{folder}/x") is None
        and os.rename(f"{folder}/x", f"{folder}/site.ledger") is None)
attempt("environ", content(f"/proc/{pid}/environ"))
attempt("maps", content(f"/proc/{pid}/maps"))
attempt("mem", memory)
attempt("fd", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("root", lambda: os.listdir(f"/proc/{pid}/root/"))
attempt("records by root", content(f"/proc/{pid}/root{folder}/records.npz"))
attempt("cwd", lambda: os.listdir(f"/proc/{pid}/cwd/"))
attempt("ptrace", attach)
attempt("process_vm_readv", read_memory)
attempt("signal", lambda: os.kill(int(pid), 0) is None)
print(json.dumps(got))
"""
EVERYTHING = {
    "list", "records", "ledger", "witness", "site file", "write ledger", "unlink ledger", "environ",
    "maps", "mem", "fd", "root", "records by root", "cwd", "ptrace", "process_vm_readv", "signal",
}  # fmt: skip


def test_the_thief_gets_everything_under_one_account_and_nothing_under_another(
    site: VaultSite,
) -> None:
    folder, pid = str(site.file.parent), str(site.pid)
    assert set(site.vault.python(THIEF, folder, pid)) == EVERYTHING  # without separation
    assert site.relay.python(THIEF, folder, pid) == []
    site.still_works(1)


PROCESS_VIEW = """
import json, sys
found = []
for name in ("stat", "statm", "schedstat"):
    try:
        if open(f"/proc/{sys.argv[1]}/{name}").read():
            found.append(name)
    except OSError:
        pass
print(json.dumps(found))
"""

# A mount namespace in which /proc hides the processes of other accounts.
HIDDEN = [
    "unshare", "--mount", "sh", "-c",
    'mount --make-rprivate / && mount -t proc -o hidepid=invisible proc /proc && exec "$@"', "x",
]  # fmt: skip

VIEW_FINDING = """
import json, sys
from pathlib import Path
from noisewise.site.serve_site import load_vault_site
from noisewise.site.vault_checks import vault_findings
file = Path(sys.argv[1])
found = vault_findings(load_vault_site(file)[0], file)
print(json.dumps([[one.subject, one.warning] for one in found if one.subject[:9] == "processes"]))
"""


def test_cpu_time_and_memory_of_the_vault_need_a_proc_with_hidepid(site: VaultSite) -> None:
    """They depend on the number of records."""
    pid, file = str(site.pid), str(site.file)
    assert site.relay.python(PROCESS_VIEW, pid) == ["stat", "statm", "schedstat"]  # the attack
    assert site.relay.python(PROCESS_VIEW, pid, under=HIDDEN) == []
    assert site.vault.python(PROCESS_VIEW, pid, under=HIDDEN)  # power: /proc itself works
    [[subject, warning]] = site.vault.python(VIEW_FINDING, file)
    assert subject == "processes: /proc"
    assert "depend on the number of records" in warning
    [[subject, warning]] = site.vault.python(VIEW_FINDING, file, under=HIDDEN)
    assert (subject, warning) == ("processes: /proc is mounted with hidepid=invisible", "")
    assert "WARNING: processes: /proc: a relay can read CPU time" in site.log()


def test_the_round_of_a_relay_needs_no_torch_and_is_charged_once(site: VaultSite) -> None:
    before = len(site.statement().entries)
    first = site.round(2)
    assert first is not None
    assert site.round(2) == first
    entries = site.statement().entries
    assert len(entries) == before + 1
    assert (entries[-1].federation, entries[-1].state) == ("ward", "sealed")


STATUS = """
import json, sys
from pathlib import Path
from noisewise.errors import VaultError
from noisewise.flower.relay import vault_status
try:
    print(json.dumps(vault_status(Path(sys.argv[1]))))
except VaultError as error:
    print(json.dumps(str(error)))
"""


def test_only_the_relay_is_answered(site: VaultSite) -> None:
    assert site.relay.python(STATUS, str(site.socket))["federation"] == "ward"
    mode = site.socket.stat().st_mode
    assert mode & 0o777 == 0o660
    assert "may not connect" in Account("nobody").python(STATUS, str(site.socket))
    os.chmod(site.socket, 0o666)  # without the socket's mode, the kernel's word about the peer
    try:
        assert "no reply" in Account("nobody").python(STATUS, str(site.socket))
        assert site.relay.python(STATUS, str(site.socket))["federation"] == "ward"
    finally:
        os.chmod(site.socket, 0o660)
    site.still_works(3)


# Replaces the socket by a link to a file of the victim, again and again.
RACER = """
import json, os, sys, time
path, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
ends, done = time.monotonic() + seconds, 0
while time.monotonic() < ends:
    try:
        os.unlink(path)
    except OSError:
        pass
    try:
        os.symlink(target, path)
        done += 1
    except OSError:
        pass
print(json.dumps(done))
"""

BIND = """
import json, os, sys
from pathlib import Path
from noisewise.site.vault_socket import Listener
for _ in range(3000):
    try:
        Listener(Path(sys.argv[1]), os.getgid(), 0o660).close()
    except Exception:
        pass
print(json.dumps(oct(os.stat(sys.argv[2]).st_mode & 0o777)))
"""


def race(site: VaultSite, folder: Path, seconds: float = 4.0) -> tuple[int, str]:
    """The relay's links and the victim's mode afterwards, with a vault that binds all the time."""
    victim = site.file.parent / "victim"
    victim.touch()
    site.own(victim, site.vault, 0o600)
    path = folder / "raced.sock"
    links: list[int] = []

    def attack() -> None:
        links.append(site.relay.python(RACER, str(path), str(victim), str(seconds)))

    thread = threading.Thread(target=attack)
    thread.start()
    mode = site.vault.python(BIND, str(path), str(victim))
    thread.join()
    victim.unlink()
    return links[0], str(mode)


def test_a_symlink_race_needs_a_folder_that_others_can_write(
    site: VaultSite, accounts: tuple[Account, Account]
) -> None:
    lax = site.base / "lax"
    lax.mkdir()
    site.own(lax, site.vault, 0o777)
    links, mode = race(site, lax)
    assert links > 0  # the relay can put a link at the path: the vault may not listen there
    assert mode == "0o600"  # even then, no other file gets the socket's mode
    assert race(site, site.socket.parent) == (0, "0o600")
    with vault_site(*accounts, start=False) as other:
        other.own(other.socket.parent, other.vault, 0o777)
        assert "folder of the socket of ward" in other.refused_start()


def lax_modes(site: VaultSite, case: str) -> str:
    """Remove one separation; return words of the refusal."""
    folder = site.file.parent
    outside = site.base / "outside"
    outside.mkdir(exist_ok=True)
    site.own(outside, site.relay, 0o755)
    if case == "records readable by others":
        site.own(folder / "records.npz", site.vault, 0o604)
        return "records.npz: has mode 0604"
    if case == "records of the relay":
        site.own(folder / "records.npz", site.relay, 0o600)
        return f"records.npz: belongs to {site.relay.name}"
    if case == "ledger readable by its group":
        site.own(site.ledger, site.vault, 0o640)
        return "site.ledger: has mode 0640"
    if case == "witness of the relay":
        site.own(folder / "site.ledger-witness", site.relay, 0o600)
        return f"site.ledger-witness: belongs to {site.relay.name}"
    if case == "folder open":
        site.own(folder, site.vault, 0o755)
        return "has mode 0755"
    if case == "site file writable":
        site.own(site.file, site.vault, 0o602)
        return "site.toml: "
    if case == "access list":
        entries = [(1, 7, -1), (2, 7, site.relay.uid), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
        packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
        os.setxattr(site.base, "system.posix_acl_access", struct.pack("<I", 2) + packed)
        return "has an access list"
    if case == "socket folder writable":
        site.own(site.socket.parent, site.vault, 0o733)
        return "has mode 0733"
    if case == "socket folder of the relay":
        site.own(site.socket.parent, site.relay, 0o711)
        return f"belongs to {site.relay.name}"
    if case == "a parent writable":
        site.own(site.base, None, 0o777)
        return f"{site.base} is writable by all accounts"
    if case == "a parent of the relay":
        site.own(site.base, site.relay, 0o755)
        return f"{site.base} belongs to {site.relay.name}"
    if case == "records by a link":
        (folder / "records.npz").rename(folder / "real.npz")
        (folder / "records.npz").symlink_to(folder / "real.npz")
        return "is not a regular file"
    if case == "folder by a link":
        (site.base / "site").rename(site.base / "real")
        (site.base / "site").symlink_to(site.base / "real")
        return "symbolic link"
    text = site.file.read_text()
    if case == "relay is the vault":
        site.file.write_text(text.replace(site.relay.name, site.vault.name))
        return "is the account of the vault"
    if case == "relay is root":
        site.file.write_text(text.replace(site.relay.name, "root"))
        return "is root"
    if case == "no such relay":
        site.file.write_text(text.replace(site.relay.name, "nobody-here"))
        return "does not exist"
    if case == "socket for all":
        site.file.write_text(text + "mode = 0o666\n")
        return "mode must be like 0o660"
    assert case == "a file at the socket"
    site.socket.write_text("")
    return "exists and is not a socket"


CASES = [
    "records readable by others", "records of the relay", "ledger readable by its group",
    "witness of the relay", "folder open", "site file writable", "access list",
    "socket folder writable",
    "socket folder of the relay", "a parent writable", "a parent of the relay", "records by a link",
    "folder by a link", "relay is the vault", "relay is root", "no such relay", "socket for all",
    "a file at the socket",
]  # fmt: skip

DOCTOR = """
import json, sys
from pathlib import Path
from noisewise.errors import NoisewiseError
from noisewise.site.serve_site import load_vault_site
from noisewise.site.vault_checks import vault_findings
found = {}
for name in sys.argv[1:]:
    try:
        file = Path(name)
        findings = vault_findings(load_vault_site(file)[0], file)
        found[name] = [f"{one.subject}: {one.fault}; {one.remedy}" for one in findings if one.fault]
    except NoisewiseError as error:
        found[name] = [str(error)]
print(json.dumps(found))
"""


def test_start_up_checks_refuse_every_lax_mode(accounts: tuple[Account, Account]) -> None:
    """All sites are checked by one process of the vault's account."""
    from contextlib import ExitStack

    with ExitStack() as sites:
        made = {case: sites.enter_context(vault_site(*accounts, start=False)) for case in CASES}
        sound = sites.enter_context(vault_site(*accounts, start=False))
        words = {case: lax_modes(site, case) for case, site in made.items()}
        files = [str(site.file) for site in (*made.values(), sound)]
        found = accounts[1].python(DOCTOR, *files, seconds=200)
        assert found[str(sound.file)] == []
        for case, site in made.items():
            faults = found[str(site.file)]
            assert any(words[case] in fault for fault in faults), (case, faults)
        first = made[CASES[0]]
        said = first.refused_start()  # the service itself, not only the list of checks
        assert "the vault does not start" in said
        assert words[CASES[0]] in said
        assert not first.socket.exists()


def test_two_names_of_one_user_id_do_not_separate_federations(
    accounts: tuple[Account, Account],
) -> None:
    """The account of ward uses the socket of its twin's federation; so the vault does not start."""
    relay, vault = accounts
    with another_account("nwtwin", relay.uid) as twin, vault_site(relay, vault, start=False) as one:
        path = one.socket.with_name("twin.sock")
        more = f'\n[[vault.federations]]\nname = "twin"\nsocket = "{path}"\n'
        one.file.write_text(
            one.file.read_text() + more + f'account = "{twin.name}"\ngroup = "{relay.name}"\n'
        )
        listen = subprocess.Popen(
            vault.command(
                sys.executable, "-c", PEER, str(path), str(relay.gid), groups=[relay.gid]
            ),
            env=ENVIRONMENT, cwd="/", stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "vault gave no reply" in relay.python(STATUS_LATE, str(path))
        out, _ = listen.communicate(timeout=60)
        assert int(out) == twin.uid  # the attack: the kernel shows the relay of ward as the twin
        said = one.refused_start()
        assert f"has the user id {relay.uid} of {relay.name}" in said


PEER = """
import sys
from pathlib import Path
from noisewise.site.vault_socket import Listener
listener = Listener(Path(sys.argv[1]), int(sys.argv[2]), 0o660)
connection = listener.accept(60)
print(connection.peer_uid)
connection.close()
listener.close()
"""

STATUS_LATE = """
import json, sys, time
from pathlib import Path
from noisewise.errors import VaultError
from noisewise.flower.relay import vault_status
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
try:
    print(json.dumps(vault_status(Path(sys.argv[1]))))
except VaultError as error:
    print(json.dumps(str(error)))
"""


def noisewise(site: VaultSite, *words: str) -> subprocess.CompletedProcess[str]:
    program = "from noisewise.cli import main; main()"
    return subprocess.run(
        site.vault.command(sys.executable, "-c", program, *words), capture_output=True, text=True,
        timeout=600, cwd="/", env=ENVIRONMENT, check=False,
    )  # fmt: skip


def test_doctor_prints_each_check_and_sets_the_exit_code(site: VaultSite) -> None:
    done = noisewise(site, "site", "doctor", str(site.file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    assert f"ok    account: {site.vault.name}" in done.stdout
    os.chmod(site.file.parent / "records.npz", 0o644)
    try:
        done = noisewise(site, "site", "doctor", str(site.file))
    finally:
        os.chmod(site.file.parent / "records.npz", 0o600)
    assert done.returncode == 1
    assert "FAIL  records" in done.stdout
    assert "remedy: chmod 0600" in done.stdout


def test_code_that_another_account_could_have_named_does_not_run(
    accounts: tuple[Account, Account],
) -> None:
    """A site file names functions: it is not read before its owner and mode are checked."""
    with vault_site(*accounts, start=False) as site:
        mark = site.base / "run" / "mark"
        code = site.base / "code"
        code.mkdir()
        (code / "planted.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
        text = site.file.read_text().replace('"softmax"', '"planted:model"')
        site.file.write_text(text)
        program = "from noisewise.cli import main; main()"
        environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}:{code}"}
        for mode, runs in ((0o600, True), (0o602, False)):
            site.own(site.file, site.vault, mode)
            for command in ("doctor", "serve"):
                words = [sys.executable, "-c", program, "site", command, str(site.file)]
                done = subprocess.run(
                    site.vault.command(*words),
                    capture_output=True, text=True, timeout=600, cwd="/", env=environment,
                    check=False,
                )  # fmt: skip
                assert done.returncode != 0
                assert mark.exists() == runs, done.stdout + done.stderr  # power: it runs if sound
                assert ("writable by all accounts" in done.stdout + done.stderr) is not runs
                mark.unlink(missing_ok=True)


PLANT = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
path.parent.mkdir(exist_ok=True)
path.write_text("ran = True\\n")
print(json.dumps(str(path)))
"""

RUN = """
import json, sys
sys.path.append(sys.argv[1])
from planted import code
print(json.dumps(code.ran))
"""


@pytest.mark.parametrize("case", ["owner", "mode", "folder", "link"])
def test_code_below_a_folder_of_ours_is_checked(
    accounts: tuple[Account, Account], case: str
) -> None:
    """The folder belongs to root, but a file in a package below it is the relay's to write."""
    relay, vault = accounts
    with vault_site(relay, vault, start=False) as site:
        path = site.base / "code"
        target = site.base / "elsewhere" if case == "link" else path / "planted"
        target.mkdir(parents=True)
        path.mkdir(exist_ok=True)
        if case == "link":
            (path / "planted").symlink_to(target)
        (target / "code.py").write_text("ran = False\n")
        owner = relay if case == "owner" else None
        site.own(target / "code.py", owner, 0o666 if case in ("mode", "link") else 0o644)
        if case == "folder":
            site.own(target, None, 0o777)
            relay.python("import os, sys; os.unlink(sys.argv[1]); print(0)", f"{target}/code.py")
        relay.python(PLANT, str(path / "planted" / "code.py"))
        assert vault.python(RUN, str(path)) is True  # the attack: the vault runs the relay's code
        said = site.refused_start(PYTHONPATH=f"{ROOT / 'src'}:{path}")
        assert "the vault does not start: software" in said
        assert str(target) in said
        if case == "folder":
            site.own(target, None, 0o755)
        site.own(target / "code.py", None, 0o644)
        found = vault.python(SOFTWARE, str(path))
        assert found == []  # power: nothing else was wrong


SOFTWARE = """
import json, sys
sys.path.append(sys.argv[1])
from noisewise.site.software_files import software_findings
print(json.dumps([one.fault for one in software_findings() if one.fault]))
"""


def test_a_missing_folder_of_code_in_tmp_is_refused(accounts: tuple[Account, Account]) -> None:
    """Others cannot rename what is in /tmp, but they can create what is missing there."""
    relay, vault = accounts
    with vault_site(relay, vault, start=False) as site:
        path = Path(f"{site.base}-missing")
        try:
            relay.python(PLANT, str(path / "planted.py"))
            program = "import json, sys; sys.path.append(sys.argv[1]); import planted; print(1)"
            assert vault.python(program, str(path)) == 1  # the attack
        finally:
            shutil.rmtree(path, ignore_errors=True)
        said = site.refused_start(PYTHONPATH=f"{ROOT / 'src'}:{path}")
        assert f"{path}: is missing, and other accounts can create it in /tmp" in said
        said = site.refused_start(NOISEWISE_CACHE=str(path))
        assert f"{path}: is missing, and other accounts can create it in /tmp" in said
        assert f"install -d -m 0700 {path}" in said
        assert vault.python(MISSING, str(site.file.parent / "cache")) == ""  # in our own folder


MISSING = """
import json, sys
from pathlib import Path
from noisewise.site.path_checks import only_ours_to_write
print(json.dumps(only_ours_to_write(Path(sys.argv[1]), "cache").fault))
"""


def test_root_is_refused(site: VaultSite) -> None:
    program = "from noisewise.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "site", "serve", str(site.file)],
        capture_output=True, text=True, timeout=600, env={**os.environ, **ENVIRONMENT}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "runs as root" in done.stderr


def test_a_second_vault_for_the_same_dataset_does_not_start(site: VaultSite) -> None:
    assert "another vault serves this dataset" in site.refused_start()
    # another ledger for the same records
    folder = site.file.parent
    text = site.file.read_text().replace('"site.ledger"', '"other.ledger"')
    other = folder / "other.toml"
    other.write_text(text.replace("ward.sock", "other.sock"))
    site.own(other, site.vault, 0o600)
    made = noisewise(
        site, "ledger", "init", str(folder / "other.ledger"), "--dataset", "digits-0",
        "--epsilon", "8", "--delta", "1e-3",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = noisewise(site, "site", "serve", str(other))
    assert done.returncode == 1
    assert "another vault uses these records with another ledger" in done.stderr
    for path in (other, *folder.glob("other.ledger*")):
        path.unlink()


def test_a_dataset_has_one_vault_with_sockets_in_a_folder(site: VaultSite) -> None:
    """Copies of the records with another ledger: only the name of the dataset is the same."""
    folder = site.base / "copy"
    shutil.copytree(site.file.parent, folder, ignore=shutil.ignore_patterns("site.ledger*"))
    text = site.file.read_text().replace("ward.sock", "copy.sock")
    (folder / "site.toml").write_text(text)
    site.own(folder, site.vault, 0o700)
    for path in folder.iterdir():
        site.own(path, site.vault, 0o700 if path.is_dir() else 0o600)
    made = noisewise(
        site, "ledger", "init", str(folder / "site.ledger"), "--dataset", "digits-0",
        "--epsilon", "8", "--delta", "1e-3",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = noisewise(site, "site", "serve", str(folder / "site.toml"))
    assert done.returncode == 1
    assert "dataset 'digits-0': another vault with sockets in" in done.stderr
    [lock] = [path for path in site.socket.parent.iterdir() if path.name.startswith(".dataset")]
    assert lock.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(folder)


DIAL = """
import json, socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20).close()
    print(json.dumps("connected"))
except OSError as error:
    print(json.dumps(f"refused: {error}"))
"""


def dial(site: VaultSite) -> str:
    """A program of the vault's account, in the network of the running vault, calls this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        under = ["nsenter", f"--net=/proc/{site.pid}/ns/net"]
        return str(site.vault.python(DIAL, str(server.getsockname()[1]), under=under))


def test_without_any_network_the_vault_works(accounts: tuple[Account, Account]) -> None:
    with vault_site(*accounts, start=False) as site:
        site.start()
        assert dial(site) == "connected"  # power: with a network
        assert site.end() == 0
        (site.base / "vault.log").write_text("")
        site.start(under=["unshare", "--net"])
        assert dial(site).startswith("refused")
        interfaces = Path(f"/proc/{site.pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        assert Path(f"/proc/{site.pid}/net/route").read_text().count("\n") <= 1
        site.still_works(1)
        inodes = {
            link.partition("[")[2].rstrip("]")
            for one in Path(f"/proc/{site.pid}/fd").iterdir()
            if (link := os.readlink(one)).startswith("socket:")
        }
        unix = Path(f"/proc/{site.pid}/net/unix").read_text()
        assert inodes
        assert all(f" {inode} " in unix for inode in inodes)
        assert site.end() == 0
        assert not site.socket.exists()


def test_the_plain_start_script_gives_up_root_and_network(
    accounts: tuple[Account, Account],
) -> None:
    from vault_accounts import reaching

    relay, vault = accounts
    script = ROOT / "src" / "noisewise" / "flower" / "site_template" / "start_vault.sh.txt"
    with vault_site(relay, vault, start=False) as site:
        program = site.base / "noisewise"
        line = "from noisewise.cli import main; main()"
        program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{line}' \"$@\"\n")
        site.own(program, None, 0o755)
        log = open(site.base / "vault.log", "ab")  # noqa: SIM115
        site.logs.append(log)
        site.process = subprocess.Popen(
            [*reaching(), "sh", str(script), str(site.file)], stdout=log, stderr=log,
            start_new_session=True,
            env={
                **ENVIRONMENT, "VAULT_ACCOUNT": vault.name, "RELAY_GROUP": relay.name,
                "SOCKET_FOLDER": str(site.socket.parent), "NOISEWISE": str(program),
            },
        )  # fmt: skip
        site.wait_until_ready()
        status = Path(f"/proc/{site.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {str(vault.uid)}
        assert int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert {int(group) for group in fields["Groups"].split()} == {relay.gid, *vault.groups}
        assert set(vault.groups) > {relay.gid}
        site.still_works(1)
        deadline = time.monotonic() + 30
        assert site.end() == 0
        assert time.monotonic() < deadline
