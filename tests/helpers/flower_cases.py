"""Flower parts for tests: a grid that passes messages to client apps in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from federation_helpers import small_model
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from site_cases import METRICS, make_site
from torch import nn

try:  # Flower's processes set these ids; a test that makes messages has to set them itself
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1
except ImportError:
    pass

__all__ = [
    "METRICS",
    "Answer",
    "LocalGrid",
    "context",
    "honest",
    "make_site",
    "start_arrays",
    "with_batch_norm",
]

Answer = Callable[[Message], Message | None]


def context(**node_config: Any) -> Context:
    return Context(1, 1, dict(node_config), RecordDict(), {})


class LocalGrid(Grid):  # type: ignore[misc]
    """Passes messages to functions in this process; the last node answers first.

    Queries and the messages of rounds are recorded separately. An exception that a node raises for
    a query becomes an error reply, as with Flower if an app has no function for the query.
    """

    def __init__(self, nodes: Mapping[int, Answer]) -> None:
        self._nodes = dict(nodes)
        self._replies: dict[str, Message] = {}
        self.seen: list[Message] = []
        self.queries: list[Message] = []

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            query = message.metadata.message_type.startswith("query")
            kept = self.queries if query else self.seen
            message.metadata.__dict__["_message_id"] = f"{'q' if query else 'm'}{len(kept)}"
            kept.append(message)
        for message in reversed(sent):
            reply = self._reply(message)
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
        return [message.metadata.message_id for message in sent]

    def _reply(self, message: Message) -> Message | None:
        try:
            return self._nodes[message.metadata.dst_node_id](message)
        except Exception:
            if not message.metadata.message_type.startswith("query"):
                raise
            return Message(Error(2, "the app raised an exception"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        return list(reversed(list(self.pull_messages(ids))))


def start_arrays() -> ArrayRecord:
    return ArrayRecord(dict(small_model().named_parameters()))


def honest(scale: float = 0.01, seed: int = 0) -> Any:
    """Return a client that sends noise, which depends on node and round."""

    def answer(message: Message) -> Message:
        arrays = message.content["arrays"]
        key = [seed, message.metadata.dst_node_id, int(message.content["config"]["server-round"])]
        rng = np.random.default_rng(key)
        noise = {
            k: Array((scale * rng.standard_normal(a.shape)).astype(np.float32))
            for k, a in arrays.items()
        }
        return Message(RecordDict({"delta": ArrayRecord(noise)}), reply_to=message)

    return answer


def with_batch_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model with BatchNorm, which every site refuses to train."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))
