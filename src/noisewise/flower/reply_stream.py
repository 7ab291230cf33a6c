"""Fetch replies one by one, so that a bad reply of one site does not affect the others.

Flower decodes a reply while it pulls it, inside of the grid. A hand-made reply can raise any
exception there, can name objects that are never uploaded, or can grow in memory (an array may list
the same chunk a million times). Therefore each pull asks for one reply, in its own thread, with
limited memory.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from noisewise.flower.replies import Fault

__all__ = ["fetch_replies", "memory_limit", "senders"]

_TRIES = 3  # pulls of one reply that may raise before the server drops the reply
_PATIENCE = 5.0  # seconds to wait for one pull before the next reply is pulled
_SLACK = 512 << 20  # bytes that pulls may take besides the copies of a reply
_COPIES = 10  # of a reply: Flower holds chunks, objects and arrays at the same time
_STRAY_PULLS = 8  # largest number of hanging pulls of messages that are not replies
_STATM = Path("/proc/self/statm")

T = TypeVar("T")
_log = logging.getLogger(__name__)


def fetch_replies(
    grid: Grid,
    messages: Sequence[Message],
    seconds: float,
    *,
    poll_seconds: float,
    reply_bytes: int,
) -> Iterator[tuple[int, Message | Fault]]:
    """Send messages and yield (node, reply or what was wrong with it) as replies arrive.

    Nothing is yielded for a site that does not answer in time. Only replies to one of ``messages``
    are yielded, each once, with the node that was asked.

    Args:
        grid: Flower's.
        messages: one for each node.
        seconds: time limit.
        poll_seconds: time between two requests for replies.
        reply_bytes: size of an honest reply. All pulls together may take ten times as much memory
            plus 512 MiB.

    Raises:
        Exception: of the grid, if it cannot list the nodes either: the connection is broken or the
            run was stopped, and no site is to blame.
    """
    deadline = time.monotonic() + seconds
    unsent = _push(grid, messages)
    yield from unsent.items()
    waiting = {
        message.metadata.message_id: _Awaited(message.metadata.dst_node_id)
        for message in messages
        if message.metadata.message_id and message.metadata.dst_node_id not in unsent
    }
    limit = _data_bytes() + _COPIES * reply_bytes + _SLACK
    strays = _Strays(grid)
    while waiting and time.monotonic() < deadline:
        for message_id, awaited in list(waiting.items()):
            with memory_limit(limit):
                strays.discard()
                pull = awaited.pull or _Call(grid, _pull_one(grid, message_id))
                ended = pull.wait(min(_PATIENCE, deadline - time.monotonic()))
            awaited.pull = None if ended else pull
            reply = awaited.judge(pull, strays.present) if ended else None
            if reply is not None:
                del waiting[message_id], pull
                yield awaited.node, reply
                del reply
        if waiting:
            with memory_limit(limit):
                time.sleep(min(poll_seconds, max(0.0, deadline - time.monotonic())))
    hanging = [awaited.node for awaited in waiting.values() if awaited.pull is not None]
    counts = bool(hanging) and not strays.ever and _Call(grid, grid.get_node_ids).wait(_PATIENCE)
    for node in hanging:
        yield node, Fault("sent a reply that was not complete when the round closed", counts)


def senders(
    instructions: Mapping[int, Message], replies: Iterable[Message]
) -> Iterator[tuple[int, Message]]:
    """Find the sender of each reply by the message that it answers.

    Args:
        instructions: the messages, by node.
        replies: messages that have arrived.

    Returns:
        (node that was asked, its reply); messages that answer no instruction are left out.
    """
    nodes = {message.metadata.message_id: node for node, message in instructions.items()}
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id)
        if node is None:
            _log.warning("a message that is not a reply to this server was discarded")
        else:
            yield node, reply


def _push(grid: Grid, messages: Sequence[Message]) -> dict[int, Fault]:
    """Send all messages; returns the nodes to which no message can be sent.

    If one site confirms its message before the upload is complete, the upload fails for all sites.
    Therefore messages are then sent one by one.
    """
    try:
        grid.push_messages(messages)
    except Exception as error:
        _check_connection(grid, error)
    else:
        return {}
    unsent = {}
    for message in messages:
        try:
            grid.push_messages([message])
        except Exception as error:
            _check_connection(grid, error)
            reason = f"could not receive its instruction ({type(error).__name__[:60]})"
            unsent[message.metadata.dst_node_id] = Fault(reason)
    return unsent


def _check_connection(grid: Grid, error: Exception) -> None:
    """Raise the error if the grid cannot list the nodes either: then no site is to blame."""
    try:
        list(grid.get_node_ids())
    except Exception:
        raise error from None


@dataclass
class _Awaited:
    """A reply that has not arrived yet.

    Attributes:
        node: that was asked.
        pull: that is still running.
        raised: names of the exceptions of earlier pulls.
        innocent: whether another message may have caused an exception.
    """

    node: int
    pull: _Call[Message | None] | None = None
    raised: tuple[str, ...] = ()
    innocent: bool = False

    def judge(self, pull: _Call[Message | None], strays: bool) -> Message | Fault | None:
        """The reply, or its fault, after a pull has ended; None to continue waiting.

        An exception does not prove that this site has answered: Flower delivers messages that are
        no replies together with any reply. If the exception lost a reply, Flower reports it as
        unavailable at the next pull.

        Args:
            pull: that has ended.
            strays: whether messages that are not replies are arriving at this time.
        """
        reply = pull.result()
        self.innocent = bool(self.innocent or (strays and (self.raised or pull.raised)))
        if pull.raised is not None:
            self.raised += (pull.raised,)
            lost = len(self.raised) >= _TRIES
        else:
            lost = bool(self.raised) and reply is not None and reply.has_error()
        if lost:
            reason = f"sent a reply that cannot be decoded ({self.raised[-1]})"
            return Fault(reason, not self.innocent)
        return reply


def _pull_one(grid: Grid, message_id: str) -> Callable[[], Message | None]:
    """A function that pulls the reply to one message; it returns None if there is none yet."""

    def pull() -> Message | None:
        for message in grid.pull_messages([message_id]):
            if message.metadata.reply_to_message_id == message_id:
                return message
        return None

    return pull


class _Strays:
    """Fetches and discards messages that are not replies.

    Flower (1.41) lets a SuperNode push a message that is no reply, and delivers it together with
    the reply that is pulled next. That reply is lost if the message cannot be decoded. Discarding
    before every pull leaves a window of one request: a message that arrives in it can still cost
    another site its reply of this round.

    Attributes:
        present: whether the last call of `discard` fetched any.
        ever: whether any call did.
    """

    def __init__(self, grid: Grid) -> None:
        self.present = self.ever = False
        self._grid = grid
        self._calls: list[_Call[int]] = []

    def discard(self) -> None:
        """Fetch the messages that have arrived since the last call."""
        if len(self._calls) < _STRAY_PULLS:
            self._calls.append(_Call(self._grid, lambda: len(list(self._grid.pull_messages([])))))
            self._calls[-1].wait(_PATIENCE)
        ended = [call for call in self._calls if call.wait(0.0)]
        self._calls = [call for call in self._calls if call not in ended]
        self.present = any(call.result() or call.raised for call in ended) or bool(self._calls)
        if self.present and not self.ever:
            _log.warning("a site sends messages that are not replies; the server discards them")
        self.ever = self.ever or self.present


class _Call(Generic[T]):
    """A call of the grid in a daemon thread, so that a call that hangs does not block others.

    Attributes:
        raised: name of the exception, if the call raised one that a site can have caused.
    """

    def __init__(self, grid: Grid, call: Callable[[], T]) -> None:
        self.raised: str | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run, grid, call), daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the call; returns whether it ended within the time."""
        return self._ended.wait(max(0.0, seconds))

    def result(self) -> T | None:
        """The result of the call; None if it raised.

        Raises:
            BaseException: of the call, if the connection is broken.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, grid: Grid, call: Callable[[], T]) -> None:
        try:
            self._result = call()
        except Exception as error:
            self.raised = type(error).__name__[:60]
            try:
                _check_connection(grid, error)
            except Exception:
                self._error = error
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[None]:
    """Limit the data of this process to ``n_bytes``; an allocation above it is a MemoryError.

    This is the soft limit ``RLIMIT_DATA`` of Linux; on other systems there is no limit.
    """
    if not _STATM.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [n_bytes] + [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Bytes of data that this process has mapped; 0 if the system does not report it."""
    if not _STATM.exists():
        return 0
    import resource

    return int(_STATM.read_text().split()[5]) * resource.getpagesize()
