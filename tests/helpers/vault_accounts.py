"""Two real system accounts for the tests of the vault, and processes under them. Linux, root.

A vault runs under one account, hostile programs under the other. Without root or without two
distinct accounts every function fails; nothing is skipped.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from site_cases import make_site

from noisewise.flower.relay import VaultAnswers, vault_status
from noisewise.privacy.ledger import Ledger, Statement
from noisewise.site.requests import Instruction
from noisewise.training.models import make_model

ROOT = Path(__file__).parents[2]
MODEL = make_model("softmax", (1, 8, 8), 10, seed=0)

# The interpreter may be in a folder of root's that no other account can enter. Then a private mount
# namespace shows the same interpreter at the same path, in an otherwise empty folder.
_REACH = """
set -eu
closed=$1 base=$2 copy=$3
shift 3
mount --make-rprivate /
mount --bind "$base" "$copy"
mount -t tmpfs -o mode=755 tmpfs "$closed"
mkdir -p "$base"
mount --move "$copy" "$base"
exec "$@"
"""


@dataclass(frozen=True)
class Account:
    """A system account of the test run."""

    name: str

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.name).pw_uid

    @property
    def gid(self) -> int:
        return pwd.getpwnam(self.name).pw_gid

    @property
    def groups(self) -> list[int]:
        return os.getgrouplist(self.name, self.gid)

    def command(self, *words: str, groups: list[int] | None = None) -> list[str]:
        """A command line, run by root, that becomes this account without any privilege."""
        listed = ",".join(map(str, groups or self.groups))
        become = [
            "setpriv", "--reuid", str(self.uid), "--regid", str(self.gid), "--groups", listed,
            "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--",
        ]  # fmt: skip
        return [*reaching(), *become, *words]

    def python(
        self, program: str, *words: str, seconds: float = 240, under: list[str] | None = None
    ) -> Any:
        """Run a Python program under this account; what it prints last is JSON, and returned."""
        done = subprocess.run(
            (under or []) + self.command(sys.executable, "-c", textwrap.dedent(program), *words),
            capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT, cwd="/", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])


ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": f"{ROOT / 'src'}",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/nonexistent",
}


def reaching() -> list[str]:
    """The start of a command line under which other accounts can run this interpreter."""
    base = Path(sys.base_prefix).resolve()
    for folder in reversed(base.parents):
        if not folder.stat().st_mode & 0o001:
            copy = Path(tempfile.gettempdir()) / "noisewise-test-python"
            copy.mkdir(exist_ok=True)
            words = ["unshare", "--mount", "sh", "-c", _REACH, "reach"]
            return [*words, str(folder), str(base), str(copy)]
    return []


@contextlib.contextmanager
def two_accounts() -> Iterator[tuple[Account, Account]]:
    """Create the relay's and the vault's account; the vault is in the relay's group."""
    assert os.geteuid() == 0, "these tests create system accounts: run them as root"
    for path in (ROOT, ROOT / "src" / "noisewise", Path(sys.prefix), Path(sys.base_prefix)):
        assert path.stat().st_uid == 0, f"{path} must belong to root: a vault runs no other code"
    mark = f"{os.getpid()}"
    relay, vault = Account(f"nwrelay{mark}"), Account(f"nwvault{mark}")
    try:
        _admin("useradd", "--system", "--user-group", "--no-create-home", relay.name)
        _admin("useradd", "--system", "--user-group", "--no-create-home",
               "--groups", relay.name, vault.name)  # fmt: skip
        assert len({0, relay.uid, vault.uid}) == 3, "these tests need two accounts besides root"
        yield relay, vault
    finally:
        for one in (vault, relay):
            with contextlib.suppress(KeyError):
                pwd.getpwnam(one.name)
                _admin("userdel", one.name)
        with contextlib.suppress(KeyError):
            grp.getgrnam(relay.name)
            _admin("groupdel", relay.name)


@contextlib.contextmanager
def another_account(name: str, uid: int | None = None) -> Iterator[Account]:
    """Create one more account, with its own group; with ``uid`` another name of that user id."""
    made = Account(f"{name}{os.getpid()}")
    more = [] if uid is None else ["--non-unique", "--uid", str(uid)]
    _admin("useradd", "--system", "--user-group", "--no-create-home", *more, made.name)
    try:
        yield made
    finally:
        _admin("userdel", made.name)


def _admin(*words: str) -> None:
    """Run a command that changes /etc/passwd; another test process may hold its lock."""
    for _ in range(40):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "lock" not in done.stderr:
            break
        time.sleep(0.25)
    raise AssertionError(f"{' '.join(words)}: {done.stderr}")


VAULT = """
[vault]
reply_grid_seconds = {grid}
frame_seconds = {frame}
wait_seconds = {wait}
connections = {connections}

[[vault.federations]]
name = "ward"
socket = "{socket}"
account = "{relay}"
{more}
"""


@dataclass
class VaultSite:
    """A site's folder of the vault's account, and the vault that serves it."""

    base: Path
    relay: Account
    vault: Account
    process: subprocess.Popen[bytes] | None = None
    logs: list[Any] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.base / "site" / "site.toml"

    @property
    def ledger(self) -> Path:
        return self.base / "site" / "site.ledger"

    @property
    def socket(self) -> Path:
        return self.base / "run" / "ward.sock"

    def own(self, path: Path, account: Account | None, mode: int) -> None:
        """Give a path to an account; None is root."""
        uid, gid = (0, 0) if account is None else (account.uid, account.gid)
        os.chown(path, uid, gid)
        os.chmod(path, mode)

    def start(self, *, under: list[str] | None = None, groups: list[int] | None = None) -> None:
        """Start the vault under its account and wait until it listens."""
        script = "from noisewise.cli import main; main()"
        words = [sys.executable, "-c", script, "--verbose", "site", "serve", str(self.file)]
        log = open(self.base / "vault.log", "ab")  # noqa: SIM115
        self.logs.append(log)
        self.process = subprocess.Popen(
            [*(under or []), *self.vault.command(*words, groups=groups)],
            stdout=log, stderr=log, cwd="/",
            env={**ENVIRONMENT, "NOISEWISE_CACHE": str(self.base / "site" / "cache")},
            start_new_session=True,
        )  # fmt: skip
        self.wait_until_ready()

    def wait_until_ready(self, seconds: float = 240) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                if " answers user id" in self.log() and self.socket.is_socket():
                    return
            time.sleep(0.1)
        raise AssertionError(f"the vault did not start:\n{self.log()}")

    @property
    def pid(self) -> int:
        """The process of the vault itself: every wrapper replaces itself."""
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        return (self.base / "vault.log").read_text(errors="replace")

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None
            (self.base / "vault.log").write_text("")

    def end(self) -> int:
        """End the vault with SIGTERM; return its exit code."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait(60)
        self.process = None
        return code

    def statement(self) -> Statement:
        with Ledger.inspect(self.ledger) as ledger:
            return ledger.statement()

    def refused_start(self, **environment: str) -> str:
        """Start a vault that must refuse; return what it says."""
        script = "from noisewise.cli import main; main()"
        words = [sys.executable, "-c", script, "site", "serve", str(self.file)]
        done = subprocess.run(
            self.vault.command(*words), capture_output=True, text=True, timeout=600, cwd="/",
            env=ENVIRONMENT | environment, check=False,
        )  # fmt: skip
        assert done.returncode in (1, 2), (done.returncode, done.stderr)
        return done.stderr

    def round(self, number: int, rate: float = 0.2) -> list[float] | None:
        """A whole round by the relay, under its account: the first values of the update."""
        return self.relay.python(ROUND, str(self.socket), str(number), str(rate))

    def still_works(self, number: int) -> None:
        """The vault is the same process, and gives the relay an update."""
        assert self.alive(), self.log()
        assert self.round(number) is not None, self.log()


ROUND = """
import json, sys
import numpy as np
from pathlib import Path
from noisewise.flower.relay import VaultAnswers
from noisewise.site.requests import Instruction
parameters = {"1.weight": np.zeros((10, 64), np.float32), "1.bias": np.zeros(10, np.float32)}
asked = Instruction(int(sys.argv[2]), float(sys.argv[3]), parameters)
update = VaultAnswers(Path(sys.argv[1])).update(lambda: asked, asked.round)
assert "torch" not in sys.modules
print(json.dumps(None if update is None else update["1.weight"].ravel()[:4].tolist()))
"""


@contextlib.contextmanager
def vault_site(
    relay: Account,
    vault: Account,
    *,
    start: bool = True,
    grid: float = 0.05,
    frame: float = 5.0,
    wait: float = 20.0,
    connections: int = 8,
    more: str = "",
    **site: Any,
) -> Iterator[VaultSite]:
    """A site in a new folder, with a running vault."""
    base = Path(tempfile.mkdtemp(prefix="nwv-", dir="/tmp"))
    made = VaultSite(base, relay, vault)
    try:
        os.chmod(base, 0o755)
        make_site(base / "site", **{"records": 60, "rounds": 50, **site})
        (base / "run").mkdir()
        text = made.file.read_text() + VAULT.format(
            grid=grid, frame=frame, wait=wait, connections=connections, socket=made.socket,
            relay=relay.name, more=more,
        )  # fmt: skip
        made.file.write_text(text)
        made.own(base / "site", vault, 0o700)
        made.own(base / "run", vault, 0o711)
        for path in (base / "site").iterdir():
            made.own(path, vault, 0o600)
        if start:
            made.start()
        yield made
    finally:
        made.kill()
        for log in made.logs:
            log.close()
        shutil.rmtree(base, ignore_errors=True)


def parameters() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    return {name: part.detach().numpy() for name, part in MODEL.named_parameters()}


def ask(socket: Path, number: int = 1, rate: float = 0.2) -> Mapping[str, Any] | None:
    """A round in this process, for sites whose relay is this account."""
    asked = Instruction(number, rate, parameters())
    return VaultAnswers(socket).update(lambda: asked, number)


__all__ = [
    "Account",
    "VaultSite",
    "another_account",
    "ask",
    "two_accounts",
    "vault_site",
    "vault_status",
]
