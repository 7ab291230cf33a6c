"""Fetch replies one by one, so that whatever one site sends is that site's loss only.

Flower decodes a reply while it is pulled, inside the grid. A reply made by hand can raise any
exception there, can name objects that are never uploaded, or can grow in memory (an array may list
the same chunk a million times). Hence each pull asks for one reply, in a thread of its own, with
bounded memory.
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

from noisewise.federation.flower.replies import Fault

__all__ = ["fetch_replies", "memory_limit", "senders"]

_TRIES = 3  # pulls of one reply that may raise before the server gives up on it
_PATIENCE = 5.0  # seconds that one pull may take before the next site is asked about
_SLACK = 512 << 20  # bytes that pulls may take besides the copies of a reply
_COPIES = 10  # of a reply: Flower holds chunks, objects and arrays at the same time
_STRAY_PULLS = 8  # pulls of messages that answer nothing which may hang at the same time
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
    """Send messages and yield (node, reply, or what was wrong with it) as replies come.

    Nothing is yielded for a site that does not answer in time. Only messages that answer one of
    ``messages`` are yielded, each once, under the node that was asked.

    Args:
        grid: Flower's.
        messages: instructions, one for each node.
        seconds: after which the function returns.
        poll_seconds: between questions for replies.
        reply_bytes: size of an honest reply; all pulls together may take ten times as much memory
            and 512 MiB.

    Raises:
        Exception: what the grid raised, if it cannot list the nodes either: the connection is
            broken or the run was stopped, and no site is to blame.
    """
    ends = time.monotonic() + seconds
    unsent = _push(grid, messages)
    yield from unsent.items()
    waiting = {
        message.metadata.message_id: _Awaited(message.metadata.dst_node_id)
        for message in messages
        if message.metadata.message_id and message.metadata.dst_node_id not in unsent
    }
    most = _data_bytes() + _COPIES * reply_bytes + _SLACK
    strays = _Strays(grid)
    while waiting and time.monotonic() < ends:
        with memory_limit(most):
            strays.discard()
        for sent, awaited in list(waiting.items()):
            with memory_limit(most):
                pull = awaited.pull or _Call(grid, _pull_one(grid, sent))
                ended = pull.wait(min(_PATIENCE, ends - time.monotonic()))
            awaited.pull = None if ended else pull
            reply = awaited.judge(pull, strays.present) if ended else None
            if reply is not None:
                del waiting[sent], pull
                yield awaited.node, reply
                del reply
        if waiting:
            with memory_limit(most):
                time.sleep(min(poll_seconds, max(0.0, ends - time.monotonic())))
    hanging = [awaited.node for awaited in waiting.values() if awaited.pull is not None]
    counts = bool(hanging) and not strays.ever and _Call(grid, grid.get_node_ids).wait(_PATIENCE)
    for node in hanging:
        yield node, Fault("sent a reply that was not complete when the round closed", counts)


def senders(
    asked: Mapping[int, Message], replies: Iterable[Message]
) -> Iterator[tuple[int, Message]]:
    """(node that was asked, its reply); a message that answers none of these is left out."""
    nodes = {message.metadata.message_id: node for node, message in asked.items()}
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id)
        if node is None:
            _log.warning("a message that answers nothing was discarded")
        else:
            yield node, reply


def _push(grid: Grid, messages: Sequence[Message]) -> dict[int, Fault]:
    """Send all messages; returns the nodes to which nothing can be sent.

    A site that confirms its instruction before it is complete makes the upload fail for all.
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
            why = f"did not let its instruction be sent ({type(error).__name__[:60]})"
            unsent[message.metadata.dst_node_id] = Fault(why)
    return unsent


def _check_connection(grid: Grid, error: Exception) -> None:
    """Raise the error if the grid cannot list the nodes either: then no site is to blame."""
    try:
        list(grid.get_node_ids())
    except Exception:
        raise error from None


@dataclass
class _Awaited:
    """A reply that has not come yet.

    Attributes:
        node: that was asked.
        pull: that is still running.
        raised: exceptions of earlier pulls, by name.
        innocent: whether an exception may be due to a message that came with the reply.
    """

    node: int
    pull: _Call[Message | None] | None = None
    raised: tuple[str, ...] = ()
    innocent: bool = False

    def judge(self, pull: _Call[Message | None], strays: bool) -> Message | Fault | None:
        """What a pull that has ended says about the reply; None to go on waiting.

        An exception does not prove that this site has answered: Flower delivers messages that
        answer nothing together with any reply. If a reply was lost by the exception, Flower
        reports it as unavailable at the next pull.

        Args:
            pull: that has ended.
            strays: whether such messages are coming at this time.
        """
        reply = pull.result()
        self.innocent = bool(self.innocent or (strays and (self.raised or pull.raised)))
        if pull.raised is not None:
            self.raised += (pull.raised,)
            lost = len(self.raised) >= _TRIES
        else:
            lost = bool(self.raised) and reply is not None and reply.has_error()
        if lost:
            return Fault(f"sent what cannot be decoded ({self.raised[-1]})", not self.innocent)
        return reply


def _pull_one(grid: Grid, sent: str) -> Callable[[], Message | None]:
    """A question for the reply to one message."""

    def pull() -> Message | None:
        for message in grid.pull_messages([sent]):
            if message.metadata.reply_to_message_id == sent:
                return message
        return None

    return pull


class _Strays:
    """Messages that answer nothing, fetched to be forgotten.

    Flower (1.41) lets a SuperNode push a message that is no reply, and delivers it together with
    whichever reply is pulled next; that reply is lost if the message cannot be decoded.

    Attributes:
        present: whether the last call of `discard` met any.
        ever: whether any call did.
    """

    def __init__(self, grid: Grid) -> None:
        self.present = self.ever = False
        self._grid = grid
        self._calls: list[_Call[int]] = []

    def discard(self) -> None:
        """Fetch what has come since the last call."""
        if len(self._calls) < _STRAY_PULLS:
            self._calls.append(_Call(self._grid, lambda: len(list(self._grid.pull_messages([])))))
            self._calls[-1].wait(_PATIENCE)
        ended = [call for call in self._calls if call.wait(0.0)]
        self._calls = [call for call in self._calls if call not in ended]
        self.present = any(call.result() or call.raised for call in ended) or bool(self._calls)
        if self.present and not self.ever:
            _log.warning("a site sends messages that answer nothing; they are discarded")
        self.ever = self.ever or self.present


class _Call(Generic[T]):
    """A call of the grid in a daemon thread: one that hangs holds up nobody else.

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
        """Whether the call has ended, after waiting at most so long for it."""
        return self._ended.wait(max(0.0, seconds))

    def result(self) -> T | None:
        """What the call returned; None if it raised.

        Raises:
            BaseException: that of the call, if the connection is broken.
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
def memory_limit(most: int) -> Iterator[None]:
    """Let this process hold at most ``most`` bytes of data meanwhile; more is a MemoryError.

    This is the soft limit ``RLIMIT_DATA`` of Linux; on other systems there is no limit.
    """
    if not _STATM.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [most] + [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Bytes of data that this process has mapped; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    import resource

    return int(_STATM.read_text().split()[5]) * resource.getpagesize()
