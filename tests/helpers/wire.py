"""Record every byte that a SuperNode sends to the SuperLink, and count what it receives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One HTTP request of a site."""

    path: str
    head: bytes
    body: bytes


class Recorder:
    """Forwards TCP connections to a port of this machine and records what the caller sends.

    ``received`` counts the bytes that callers received.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.streams: list[bytearray] = []
        self.received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            stream = bytearray()
            self.streams.append(stream)
            for source, sink, note in (
                (caller, server, stream.extend),
                (server, caller, self._count),
            ):
                threading.Thread(target=_pump, args=(source, sink, note), daemon=True).start()

    def _count(self, data: bytes) -> None:
        self.received += len(data)

    def close(self) -> None:
        self._listener.close()

    @property
    def sent(self) -> bytes:
        """All recorded bytes, connection by connection."""
        return b"".join(bytes(stream) for stream in self.streams)

    def requests(self) -> list[Request]:
        """Return the recorded HTTP requests."""
        return [request for stream in self.streams for request in _parse(bytes(stream))]


def _pump(source: socket.socket, sink: socket.socket, note: Callable[[bytes], None]) -> None:
    try:
        while data := source.recv(1 << 16):
            note(data)
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            end.close()


def _parse(stream: bytes) -> list[Request]:
    found = []
    while b"\r\n\r\n" in stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        fields = {
            k.strip().lower(): v.strip() for k, _, v in (x.partition(b":") for x in lines[1:])
        }
        length = int(fields.get(b"content-length", b"0"))
        found.append(Request(lines[0].split()[1].decode(), head, rest[:length]))
        stream = rest[length:]
    return found
