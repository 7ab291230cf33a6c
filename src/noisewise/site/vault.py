"""`Vault`: answers the relays of a site's federations, one request at a time.

Each connection carries one request and one reply. A relay that sends slowly, half a frame or
nothing occupies only the connections of its own federation, and only until its deadline. All
requests that use records run one after the other in the thread that calls `run`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from noisewise import __version__
from noisewise.errors import NoisewiseError, VaultError
from noisewise.site.frames import FrameError, Head, Value, frame_start, read_head, read_payload
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.log_limit import lines_of
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_file import Site
from noisewise.site.tensor_bytes import largest_payload, pack_arrays, unpack_arrays
from noisewise.site.vault_config import VaultPart
from noisewise.site.vault_socket import Connection, Listener
from noisewise.training.parameters import ParameterLayout

__all__ = ["Door", "Vault"]

_FIELDS = {
    "train": {"kind", "round", "learning_rate"},
    "evaluate": {"kind", "round"},
    "declare": {"kind"},
    "status": {"kind"},
}
_HEADER_SECONDS = 5.0
_POLL_SECONDS = 0.5
_log = logging.getLogger("noisewise.site")

Arrays = dict[str, NDArray[np.float32]]
Reply = tuple[dict[str, Value], list[memoryview]]
REFUSED: Reply = ({"kind": "refused"}, [])
BUSY: Reply = ({"kind": "busy"}, [])


@dataclass(frozen=True)
class Door:
    """The entrance of one federation.

    Attributes:
        federation: its name.
        listener: its socket.
        peer_uid: user id of the only account that is answered.
    """

    federation: str
    listener: Listener
    peer_uid: int


class Vault:
    """A running vault.

    Args:
        site: whose records are used; see `keep_loaded`.
        part: ``[vault]`` of its file.
        doors: one for each federation.
    """

    def __init__(self, site: Site, part: VaultPart, doors: list[Door]) -> None:
        self._part, self._doors = part, doors
        self._sites = {door.federation: replace(site, federation=door.federation) for door in doors}
        self._layout = ParameterLayout.of(site.model)
        self._n_arrays = len(self._layout.names)
        self._largest = largest_payload(self._n_arrays, self._layout.size)
        self._turns = {door.federation: threading.Lock() for door in doors}
        self._room = {
            door.federation: threading.BoundedSemaphore(part.connections) for door in doors
        }
        self._longest = {door.federation: 0.0 for door in doors}
        self._serving: dict[str, list[tuple[threading.Thread, Connection]]] = {
            door.federation: [] for door in doors
        }
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Reply], Future[Reply]]] = (
            queue.SimpleQueue()
        )

    def run(self, stop: threading.Event) -> None:
        """Answer requests until ``stop`` is set.

        A request that trains is finished first, and replies that are ready are still sent.
        """
        with ExitStack() as open_doors:
            accepting = []
            for door in self._doors:
                open_doors.callback(door.listener.close)
                thread = threading.Thread(target=self._accept, args=(door, stop), daemon=True)
                thread.start()
                accepting.append(thread)
            while not stop.is_set():
                try:
                    job, result = self._jobs.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                result.set_result(job())
            for thread in accepting:
                thread.join(10 * _POLL_SECONDS)
            self._end_connections()

    def _end_connections(self) -> None:
        """Wait until replies are sent; end all other connections.

        No thread may be left at the end of the process: Python aborts a process if it ends while a
        thread runs code of torch.
        """
        serving = [one for each in self._serving.values() for one in each]
        for _, connection in serving:
            connection.end_reading()
        longest = self._part.reply_grid_seconds + self._part.frame_seconds + _POLL_SECONDS
        ends = time.monotonic() + longest
        while any(thread.is_alive() for thread, _ in serving) and time.monotonic() < ends:
            try:
                _, result = self._jobs.get(timeout=_POLL_SECONDS / 10)
            except queue.Empty:
                continue
            result.set_exception(VaultError("a request was not answered: the vault ends"))

    def _accept(self, door: Door, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                connection = door.listener.accept(_POLL_SECONDS)
                if connection is not None:
                    self._admit(door, connection)
            except Exception as error:  # as when no descriptor is left; deadlines free some
                _log.error("%s: a connection failed: %s", door.federation, error)
                stop.wait(_POLL_SECONDS)

    def _admit(self, door: Door, connection: Connection) -> None:
        """Serve a connection of the relay's account, if there is room for it; else close it."""
        room = self._room[door.federation]
        if connection.peer_uid != door.peer_uid:
            uid = connection.peer_uid
            with lines_of(f"{door.federation}: foreign accounts"):
                _log.error("%s: user id %d may not use this socket", door.federation, uid)
            connection.close()
        elif not room.acquire(blocking=False):
            with lines_of(door.federation):
                _log.error("%s: too many connections; one was closed", door.federation)
            connection.close()
        else:
            serve = threading.Thread(target=self._serve, args=(door, connection), daemon=True)
            try:
                serve.start()
            except RuntimeError:
                room.release()
                connection.close()
                raise
            others = self._serving[door.federation]
            others[:] = [one for one in others if one[0].is_alive()]
            others.append((serve, connection))

    def _serve(self, door: Door, connection: Connection) -> None:
        """Read a request, answer it and close the connection. No exception leaves."""
        with lines_of(door.federation):
            try:
                self._exchange(door.federation, connection)
            except NoisewiseError as error:
                _log.error("%s: %s", door.federation, error)
            except Exception:
                _log.exception("%s: an error of this software or of this machine", door.federation)
            finally:
                connection.close()
                self._room[door.federation].release()

    def _exchange(self, federation: str, connection: Connection) -> None:
        began = time.monotonic()
        deadline = began + min(_HEADER_SECONDS, self._part.frame_seconds)
        turn = self._turns[federation]
        try:
            head = read_head(lambda buffer: connection.receive(buffer, deadline), self._largest)
            kind = _checked_kind(head)
        except FrameError as error:
            _log.error("%s: a frame was refused: %s", federation, error)
            self._send(connection, REFUSED, began)
            return
        if kind not in ("train", "evaluate"):
            self._send(connection, self._small_answer(federation, kind), began)
        elif not turn.acquire(timeout=self._part.wait_seconds):
            self._send(connection, BUSY, began)
        else:
            try:  # until the reply is sent: a federation has one model in memory at a time
                reply = self._answer(federation, connection, head)
                self._send(connection, reply, began)
            finally:
                turn.release()

    def _answer(self, federation: str, connection: Connection, head: Head) -> Reply:
        """The answer to a request with parameters; they are parsed here, one thread trains."""
        deadline = time.monotonic() + self._part.frame_seconds
        payload = read_payload(lambda buffer: connection.receive(buffer, deadline), head)
        site, header = self._sites[federation], head.header
        read = _parsed(payload, self._n_arrays)
        job = _train if header["kind"] == "train" else _evaluate
        result: Future[Reply] = Future()

        def counted() -> Reply:
            with lines_of(federation):
                return _answered(lambda: job(site, header, read))

        asked = time.monotonic()
        self._jobs.put((counted, result))
        reply = result.result()
        self._warn_of_grid(federation, time.monotonic() - asked)
        return reply

    def _warn_of_grid(self, federation: str, seconds: float) -> None:
        """Say once, and again if it doubles, that a round took longer than the grid."""
        grid = self._part.reply_grid_seconds
        if seconds > max(grid, 2 * self._longest[federation]):
            self._longest[federation] = seconds
            _log.warning(
                "%s: a round took %.2f s, longer than reply_grid_seconds = %g: the time of replies "
                "shows the time of training; set a grid longer than a round",
                federation, seconds, grid,
            )  # fmt: skip

    def _small_answer(self, federation: str, kind: str) -> Reply:
        if kind == "status":
            return self._status(federation), []
        declared = answer_declaration(lambda: self._sites[federation])
        return REFUSED if declared is None else ({"kind": "declared", **asdict(declared)}, [])

    def _status(self, federation: str) -> dict[str, Value]:
        """What a relay may know: nothing that depends on records or on what was spent."""
        config = self._sites[federation].config
        return {
            "kind": "status",
            "software": f"noisewise {__version__}",
            "federation": federation,
            "parameters": self._layout.size,
            "reply_grid_seconds": self._part.reply_grid_seconds,
            "answers_evaluation": config.metrics is not None,
            "answers_declaration": config.declaration is not None and config.declaration.publish,
        }

    def _send(self, connection: Connection, reply: Reply, began: float) -> None:
        """Send a reply at the next multiple of the time grid."""
        header, payload = reply
        size = sum(len(part) for part in payload)
        grid, now = self._part.reply_grid_seconds, time.monotonic()
        time.sleep(max(0.0, began + grid * math.ceil((now - began) / grid) - now))
        deadline = time.monotonic() + self._part.frame_seconds
        connection.send([frame_start(header, size), *payload], deadline)


def _checked_kind(head: Head) -> str:
    """The kind of a request that has exactly the fields of its kind."""
    kind, names = head.header.get("kind"), set(head.header)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise FrameError("kind", str(kind)[:40], f"must be one of {', '.join(_FIELDS)}")
    if names != _FIELDS[kind]:
        listed = [name[:20] for name in sorted(names)[:5]]
        raise FrameError("fields", listed, f"must be {', '.join(sorted(_FIELDS[kind]))}")
    if head.payload_size and kind not in ("train", "evaluate"):
        raise FrameError("size of the payload", head.payload_size, f"must be 0 for {kind}")
    return kind


def _answered(job: Callable[[], Reply]) -> Reply:
    """The answer of a job; errors are refusals, and their reason stays here."""
    try:
        return job()
    except Exception:
        _log.exception("not taking part: an error of this software or of this machine")
        return REFUSED


def _parsed(payload: memoryview, n_arrays: int) -> Callable[[], Arrays]:
    """Parse a payload; the result returns its arrays, or raises the error for the site's notes."""
    try:
        arrays = unpack_arrays(payload, n_arrays)
    except FrameError as error:
        refusal = error

        def refuse() -> Arrays:
            raise refusal

        return refuse
    return lambda: arrays


def _train(site: Site, header: Mapping[str, Value], read: Callable[[], Arrays]) -> Reply:
    round_number, rate = header["round"], header["learning_rate"]
    update = answer_instruction(
        lambda: site, lambda: Instruction(round_number, rate, read()), round_number
    )
    return REFUSED if update is None else ({"kind": "update"}, pack_arrays(update))


def _evaluate(site: Site, header: Mapping[str, Value], read: Callable[[], Arrays]) -> Reply:
    round_number = header["round"]
    accuracy = answer_question(lambda: site, lambda: Question(round_number, read()), round_number)
    return REFUSED if accuracy is None else ({"kind": "accuracy", "noised_accuracy": accuracy}, [])
