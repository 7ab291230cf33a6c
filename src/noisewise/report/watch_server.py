"""`watch_folder`: serve the page of a folder on the loopback address. It only reads."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from noisewise.errors import InvalidValueError
from noisewise.palette import MUTED
from noisewise.report.live_progress import Progress, ProgressReader
from noisewise.report.watch_page import live_report, progress_html, script_text, watch_page
from noisewise.text import printable

__all__ = ["LOOPBACK", "WatchServer", "watch_folder"]

LOOPBACK = "127.0.0.1"
_SHARE = 10  # a page is computed again after this multiple of the time that it took
_PROGRESS_PAUSE, _REPORT_PAUSE = 1.0, 5.0  # seconds, at least
_MOST_CONNECTIONS = 32  # at the same time; more are closed
# The report may have scripts of its own; nothing may be loaded from anywhere else.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; "
    "form-action 'none'"
)
_log = logging.getLogger(__name__)
_Request = socket.socket | tuple[bytes, socket.socket]
Content = TypeVar("Content")


class _Kept(Generic[Content]):
    """A value that is computed when it is asked for, and not again for some time.

    Args:
        compute: returns the value.
        pause: seconds for which the value is kept, at least.
    """

    def __init__(self, compute: Callable[[], Content], pause: float) -> None:
        self._compute, self._pause = compute, pause
        self._lock = threading.Lock()
        self._value: Content | None = None
        self._until = 0.0
        self._version = ""

    def get(self, version: str = "", *, final: bool = False) -> Content:
        """Return the value.

        Args:
            version: the value is computed again only for another version, if there is one.
            final: compute the value of another version at once.
        """
        with self._lock:
            begun = time.monotonic()
            late = begun >= self._until or (final and version != self._version)
            if self._value is None or (late and not (version and version == self._version)):
                self._value, self._version = self._compute(), version
                took = time.monotonic() - begun
                self._until = time.monotonic() + max(self._pause, _SHARE * took)
            return self._value


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one folder on the loopback address.

    Args:
        folder: of a run, a comparison, a sweep or a Flower server.
        port: of the server; 0 selects a free one.

    Raises:
        InvalidValueError: there is no such folder, it contains too many folders, or the port is in
            use.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, folder: Path, port: int) -> None:
        if not folder.is_dir():
            allowed = "must be a folder" if folder.exists() else "there is no such folder"
            raise InvalidValueError("FOLDER", str(folder), allowed)
        self.folder = folder
        name = printable(folder.resolve().name)
        self._title = f"Watch {name}"
        self._report_title = f"Report on {name}"
        self._progress = _Kept(self._read_progress, _PROGRESS_PAUSE)
        self._report = _Kept(self._draw_report, _REPORT_PAUSE)
        self._reader = ProgressReader(folder)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._progress.get()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            allowed = "is in use by another program or not permitted; choose another one (--port)"
            raise InvalidValueError("--port", port, allowed) from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> frozenset[str]:
        """Values of the Host header that are answered; other names may be a rebound DNS name."""
        port = self.server_port
        names = (LOOPBACK, "localhost")
        return frozenset([*(f"{name}:{port}" for name in names), *(names if port == 80 else ())])

    def _read_progress(self) -> Progress:
        return self._reader.read(time.time())

    def _draw_report(self) -> str:
        runs = [run for run in self._progress.get().runs if run.result is not None]
        if not runs:
            return _plain_page("No run has begun yet.")
        try:
            return live_report([self.folder / run.folder for run in runs], self._report_title)
        except Exception as error:  # a run of another version, or a file replaced at this moment
            _log.warning("the report cannot be drawn now (%s: %s)", type(error).__name__, error)
            return _plain_page("The report cannot be drawn now; the next rounds will show it.")

    def content(self, path: str) -> tuple[str, str] | None:
        """The type and text of a page; None if there is no such page."""
        if path == "/":
            return "text/html", watch_page(self._title)
        if path == "/watch.js":
            return "text/javascript", script_text()
        progress = self._progress.get()
        if path == "/progress":
            return "text/html", progress_html(progress, time.time())
        if path == "/report":
            final = progress.state != "training"
            return "text/html", self._report.get(progress.version, final=final)
        return None

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: tuple[str, int]
    ) -> None:
        """Answer a request in a thread of its own; close it if too many are being answered."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: tuple[str, int]
    ) -> None:
        """Answer a request, then permit another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error of one request, such as a closed connection; the server continues."""
        _log.info("request failed", exc_info=True)


def _plain_page(text: str) -> str:
    style = f"<style>body{{font:16px/1.5 system-ui,sans-serif;color:{MUTED}}}</style>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Report</title>{style}'
        f"</head><body><p>{escape(text)}</p></body></html>"
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD requests of the pages in `WatchServer.content`."""

    server: WatchServer
    server_version = "noisewise"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_text=True)

    def do_HEAD(self) -> None:
        self._answer(with_text=False)

    def _answer(self, *, with_text: bool) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this server answers on loopback only")
            return
        path = urlsplit(self.path).path
        try:
            content = self.server.content(path)
        except Exception as error:  # a file in the folder that this version cannot read
            _log.warning("the folder cannot be read now (%s: %s)", type(error).__name__, error)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the folder cannot be read now")
            return
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, text = content
        payload = text.encode(errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Cache-Control", "no-store")
        scripts = "'unsafe-inline'" if path == "/report" else "'self'"
        self.send_header("Content-Security-Policy", _POLICY.format(scripts=scripts))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if with_text:
            self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        _log.info("%s", printable(format % args))


def watch_folder(
    folder: Path, port: int, on_start: Callable[[WatchServer], None] = lambda server: None
) -> None:
    """Serve the page of a folder until the process is interrupted.

    Args:
        folder: of a run, a comparison, a sweep or a Flower server.
        port: of the server; 0 selects a free one.
        on_start: called when the server answers requests.

    Raises:
        InvalidValueError: there is no such folder, or the port is in use.
    """
    with WatchServer(folder, port) as server:
        on_start(server)
        server.serve_forever(poll_interval=0.2)
