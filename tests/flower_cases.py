"""Flower parts for tests: a grid that hands messages to client apps in this process, and sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from federation_helpers import small_model
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from noisewise.data import load_dataset
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger

try:  # Flower's own processes know who they are; where messages are made in a test, we say it
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1
except ImportError:
    pass

Answer = Callable[[Message], Message | None]

SITE = """
[ledger]
file = "site.ledger"
dataset = "digits-{number}"

[data]
file = "records.npz"
records = {records}

[model]
name = "softmax"
input_shape = [1, 8, 8]
classes = 10

[budget]
epsilon = {epsilon}
delta = 1e-3
planned_rounds = {rounds}

[training]
batch_size = {batch}
clip_norm = 1.0
local_epochs = {epochs}
normalise = {normalise}

[limits]
learning_rate = [0.01, 1.0]
"""

METRICS = """
[metrics]
noise_multiplier = {noise}
records = {records}
releases = {releases}
"""


def make_site(
    folder: Path,
    number: int = 0,
    *,
    sites: int = 5,
    records: int | None = None,
    epsilon: float = 8.0,
    rounds: int = 3,
    batch: int = 30,
    epochs: int = 1,
    normalise: bool = False,
    ledger: bool = True,
) -> Path:
    """A site's folder: records, file, ledger. Returns the site's file."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_dataset("digits").train
    inputs, targets = digits.arrays()
    mine = np.arange(number, len(targets), sites)[:records]
    np.savez(folder / "records.npz", inputs=inputs[mine], targets=targets[mine])
    text = SITE.format(
        number=number, records=len(mine), epsilon=epsilon, rounds=rounds, batch=batch,
        epochs=epochs, normalise=str(normalise).lower(),
    )  # fmt: skip
    (folder / "site.toml").write_text(text)
    if ledger:
        place = folder / "site.ledger"
        Ledger.create(place, PrivacyBudget(epsilon, 1e-3), f"digits-{number}")
    return folder / "site.toml"


def context(**node_config: Any) -> Context:
    return Context(1, 1, dict(node_config), RecordDict(), {})


class LocalGrid(Grid):  # type: ignore[misc]
    """Carries messages to functions in this process; the last node answers first.

    Queries are kept apart from the messages of rounds. Whatever a node raises at a query becomes
    an error reply, as Flower makes one where an app has no function for it.
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
    """A client that sends noise, keyed by node and round."""

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
    """A model that no site trains."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))
