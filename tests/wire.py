"""A recorder between a SuperNode and the SuperLink: every byte that the site sends."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One HTTP request of a site."""

    path: str
    head: bytes
    body: bytes


class Recorder:
    """Forwards TCP connections to a port of this machine and keeps what the caller sends."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.streams: list[bytearray] = []
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
            for source, sink, kept in ((caller, server, stream), (server, caller, None)):
                threading.Thread(target=_pump, args=(source, sink, kept), daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    @property
    def sent(self) -> bytes:
        """Everything, connection by connection."""
        return b"".join(bytes(stream) for stream in self.streams)

    def requests(self) -> list[Request]:
        """The HTTP requests in it."""
        return [request for stream in self.streams for request in _parse(bytes(stream))]


def _pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
    try:
        while data := source.recv(1 << 16):
            if kept is not None:
                kept.extend(data)
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
