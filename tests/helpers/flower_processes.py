"""Start and end real Flower processes on loopback: a SuperLink, SuperNodes and runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """A SuperLink and any number of SuperNodes, each in its own session; logs are in ``folder``."""

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        self.folder, self.keys = folder, keys
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        home = folder / "home"
        home.mkdir(parents=True)
        security = f'root-certificates = "{keys}/ca.crt"' if keys else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink.dep]\naddress = "127.0.0.1:{self.port}"\n{security}\n'
        )
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def _start(
        self,
        name: str,
        *command: str,
        under: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        self._logs.append(log)
        self.processes[name] = subprocess.Popen(
            [*under, str(BIN / command[0]), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**self.environment, **(environment or {})},
            cwd=self.folder,
            start_new_session=True,
        )

    def superlink(self) -> None:
        security = ["--insecure"]
        if self.keys:
            security = [
                "--ssl-certfile", f"{self.keys}/server.pem",
                "--ssl-keyfile", f"{self.keys}/server.key",
                "--ssl-ca-certfile", f"{self.keys}/ca.crt", "--enable-supernode-auth",
            ]  # fmt: skip
        self._start(
            "superlink", "flower-superlink", *security, "--host", "127.0.0.1",
            "--port", str(self.port), "--database", str(self.folder / "state.db"),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self._wait_for_port()

    def supernode(
        self,
        name: str,
        config: str,
        key: str | None = None,
        through: int | None = None,
        under: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a SuperNode.

        Args:
            name: of the process and its log.
            config: ``--node-config``.
            key: of the node, if the deployment has keys.
            through: port of a recorder in front of the SuperLink.
            under: the start of the command line, which becomes another account.
            environment: variables of this process.
        """
        security = ["--insecure"]
        if self.keys:
            security = ["--root-certificates", f"{self.keys}/ca.crt"]
            if key:
                security += ["--auth-supernode-private-key", f"{self.keys}/{key}"]
        self._start(
            name, "flower-supernode", *security, "--superlink", f"127.0.0.1:{through or self.port}",
            "--port", str(free_port()), "--node-config", config,
            under=under, environment=environment,
        )  # fmt: skip

    def wait_for_nodes(self, count: int, seconds: float = 600) -> None:
        ends = time.monotonic() + seconds
        while (found := self.flwr("supernode", "list", "dep").count("online")) < count:
            if time.monotonic() > ends:
                raise RuntimeError(f"{found} of {count} SuperNodes are online")
            time.sleep(1)

    def run(self, name: str, app: Path, config: str) -> None:
        """Submit a run, and follow its log in a separate process."""
        self._start(name, "flwr", "run", str(app), "dep", "--stream", "--run-config", config)

    def flwr(self, *words: str, seconds: float = 300) -> str:
        result = subprocess.run(
            [str(BIN / "flwr"), *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return result.stdout + result.stderr

    def end_strays(self) -> None:
        """End daemons that Flower started: the processes with our FLWR_HOME in the environment."""
        mark = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), number)
            time.sleep(2)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, name: str, seconds: float) -> int:
        return self.processes[name].wait(seconds)

    def kill(self, name: str) -> None:
        """Kill a process and the processes that it started with kill -9."""
        process = self.processes.pop(name)
        _signal(process.pid, signal.SIGKILL)
        process.wait(30)

    def _wait_for_port(self) -> None:
        ends = time.monotonic() + 300
        while time.monotonic() < ends:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.processes["superlink"].poll() is not None:
                break
            time.sleep(0.5)
        raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')}")

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            _signal(process.pid, signal.SIGTERM)
        ends = time.monotonic() + 10
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, ends - time.monotonic()))
            _signal(process.pid, signal.SIGKILL)  # also its remaining child processes
            process.wait(10)
        for log in self._logs:
            log.close()


def _signal(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group that this test started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
