"""Unix domain sockets, with deadlines and the kernel's word about who connects.

The only file of the trusted core that imports `socket`, and it makes sockets of the family AF_UNIX
only (`tests/site/test_trusted_core.py` reads the code).
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from socket import AF_UNIX, SHUT_RD, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from noisewise.errors import InvalidValueError, VaultError

__all__ = ["LONGEST_PATH", "Connection", "Listener", "connect_to_vault"]

LONGEST_PATH = 107
"""Bytes that Linux allows for the path of a Unix socket."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PASSRIGHTS = 83  # since Linux 6.16; the module `socket` has no name for it
_BACKLOG = 16
_PIECE = 1 << 20


class Connection:
    """A connected socket; every call has a deadline, by `time.monotonic`."""

    def __init__(self, connected: socket) -> None:
        self._socket = connected

    @property
    def peer_uid(self) -> int:
        """User id of the process that connected, as the kernel noted it (SO_PEERCRED)."""
        credentials = self._socket.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[1])

    def receive(self, buffer: memoryview, deadline: float) -> None:
        """Fill the buffer.

        Raises:
            VaultError: the other side ended, or the deadline passed.
        """
        while buffer:
            self._socket.settimeout(_remaining(deadline))
            try:
                count = self._socket.recv_into(buffer[:_PIECE])
            except OSError as error:
                raise VaultError(f"the connection failed: {error}") from None
            if count == 0:
                raise VaultError("the other side closed the connection in the middle of a frame")
            buffer = buffer[count:]

    def send(self, buffers: Iterable[memoryview | bytes], deadline: float) -> None:
        """Send all buffers; see `receive`."""
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                self._socket.settimeout(_remaining(deadline))
                try:
                    rest = rest[self._socket.send(rest[:_PIECE]) :]
                except OSError as error:
                    raise VaultError(f"the connection failed: {error}") from None

    def end_reading(self) -> None:
        """Let `receive` end, also in another thread; `send` still works."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(SHUT_RD)

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise VaultError("the connection was too slow")
    return left


class Listener:
    """A listening socket at a path, for one group of accounts.

    The folder must belong to this account and nobody else may write to it (`vault_checks`): then no
    other account can put anything else at the path.

    Args:
        path: of the socket. A socket that an ended vault left there is replaced; nothing else is.
        group: id of the group that may connect.
        mode: of the socket.

    Raises:
        InvalidValueError: something else is at the path.
    """

    def __init__(self, path: Path, group: int, mode: int) -> None:
        self.path = path
        _remove_old(path)
        self._socket = socket(AF_UNIX, SOCK_STREAM)
        before = os.umask(0o777 & ~mode)  # no chmod afterwards, which would follow a link
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, -1, group, follow_symlinks=False)
        with contextlib.suppress(OSError):  # descriptors of a relay could be slow to close
            self._socket.setsockopt(SOL_SOCKET, _SO_PASSRIGHTS, 0)
        self._socket.listen(_BACKLOG)
        self._inode = os.lstat(path).st_ino

    def accept(self, seconds: float) -> Connection | None:
        """The next connection; None if there is none within the time."""
        self._socket.settimeout(seconds)
        try:
            return Connection(self._socket.accept()[0])
        except TimeoutError:
            return None

    def close(self) -> None:
        """Stop listening, and remove the socket from its folder."""
        self._socket.close()
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)


def _remove_old(path: Path) -> None:
    """Remove the socket of an ended vault."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        allowed = "must not exist, or be a socket of this account; remove what is there"
        raise InvalidValueError("socket", str(path), allowed)
    os.unlink(path)


def connect_to_vault(path: Path, seconds: float) -> Connection:
    """Connect to a vault.

    Args:
        path: of its socket.
        seconds: to wait at most.

    Raises:
        VaultError: one line with the reason and the remedy.
    """
    client = socket(AF_UNIX, SOCK_STREAM)
    client.settimeout(seconds)
    try:
        client.connect(str(path))
    except OSError as error:
        client.close()
        raise VaultError(f"{path}: {_REMEDIES.get(type(error), str(error))}") from None
    return Connection(client)


_REMEDIES: dict[type[OSError], str] = {
    FileNotFoundError: "there is no socket: the vault does not run, or the path is wrong "
    "(`noisewise site serve` starts it)",
    ConnectionRefusedError: "no vault listens there: it has ended, see its log "
    "(`noisewise site serve` starts it)",
    PermissionError: "this account may not connect: it must be `account` of a federation in "
    "[vault] of the site's file, and in the socket's group",
    TimeoutError: "the vault does not answer",
}
