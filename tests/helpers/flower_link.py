"""Flower's SuperLink state, grid and fleet protocol for tests, with sites that choose every byte.

`Link` is a SuperLink without sockets: Flower's `HttpGrid` calls Flower's handlers and state in this
process. `Site` uses the fleet protocol, in this process or over HTTP to a real SuperLink, as an
attacker's own SuperNode would.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flower_cases import Answer
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import (
    FLWR_IN_MEMORY_DB_NAME,
    HEAD_BODY_DIVIDER,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

SERVER = 1  # Flower's node id of the SuperLink


@dataclass
class Parcel:
    """A message as a site uploads it: metadata for the SuperLink, and the bytes of its objects.

    Attributes:
        proto: metadata for the SuperLink.
        tree: ids of the objects.
        contents: bytes by object id; the object of an id without bytes never becomes available.
    """

    proto: Any
    tree: Any
    contents: dict[str, bytes]


Behaviour = Callable[[Message], list[Parcel]]
"""(the server's instruction) -> the messages that a site uploads."""


def honest(answer: Answer) -> Behaviour:
    """Upload an answer exactly as Flower would."""

    def behaviour(message: Message) -> list[Parcel]:
        reply = answer(message)
        return [] if reply is None else [pack(reply)]

    return behaviour


def pack(reply: Message) -> Parcel:
    """Return a message as a SuperNode sends it."""
    reply.metadata.__dict__["_message_id"] = reply.object_id
    contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    proto = message_to_proto(remove_content_from_message(reply))
    return Parcel(proto, get_object_tree(reply), contents)


@dataclass
class Raw:
    """One object with any type, any bytes as its body, and children."""

    kind: str
    body: bytes
    children: list[Raw] = field(default_factory=list)

    def content(self) -> bytes:
        ids = ",".join(child.object_id() for child in self.children)
        head = f"{self.kind} {ids} {len(self.body)}".encode()
        return head + HEAD_BODY_DIVIDER + self.body

    def object_id(self) -> str:
        return get_object_id(self.content())

    def all(self) -> Iterator[Raw]:
        for child in self.children:
            yield from child.all()
        yield self

    def tree(self) -> Any:
        children = [child.tree() for child in self.children]
        return message_pb2.ObjectTree(object_id=self.object_id(), children=children)


def by_hand(message: Message, content: Raw | None, **metadata: Any) -> Parcel:
    """Return a reply with any content.

    ``metadata`` replaces fields of the message's own metadata, but not of the metadata that the
    SuperLink receives.
    """
    empty = Message(RecordDict(), reply_to=message)
    proto = message_to_proto(remove_content_from_message(empty))
    claimed = message_pb2.Message()
    claimed.metadata.CopyFrom(proto.metadata)
    for name, value in metadata.items():
        setattr(claimed.metadata, name, value)
    root = Raw("Message", claimed.SerializeToString(), [] if content is None else [content])
    proto.metadata.message_id = root.object_id()
    return Parcel(proto, root.tree(), {part.object_id(): part.content() for part in root.all()})


def records(**named: Raw) -> Raw:
    """Return a `RecordDict` of raw objects."""
    names = {name: part.object_id() for name, part in named.items()}
    return Raw("RecordDict", json.dumps(names).encode(), list(named.values()))


def array(values: np.ndarray[Any, Any] | bytes, repeats: int = 1, **claims: Any) -> Raw:
    """Return an `Array` that lists its only chunk ``repeats`` times; ``claims`` replace fields."""
    data = values if isinstance(values, bytes) else npy(values)
    body = {"dtype": "float32", "shape": [1], "stype": "numpy.ndarray"}
    body |= {"arraychunk_ids": [0] * repeats, **claims}
    return Raw("Array", json.dumps(body).encode(), [Raw("ArrayChunk", data)])


def npy(values: np.ndarray[Any, Any]) -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def array_record(**named: Raw) -> Raw:
    names = {name: part.object_id() for name, part in named.items()}
    return Raw("ArrayRecord", json.dumps(names).encode(), list(named.values()))


class Handlers:
    """Calls Flower's fleet handlers in this process, with the methods of Flower's HTTP client."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        return fleet_handlers.pull_messages(request, self._state, self._state.object_store)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        return fleet_handlers.push_messages(request, self._state)

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        return fleet_handlers.push_object(request, self._state)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        return fleet_handlers.pull_object(request, self._state)

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return fleet_handlers.confirm_message_received(
            request, self._state, self._state.object_store
        )


class Site:
    """A node of the fleet with a chosen behaviour.

    Args:
        fleet: Flower's `FleetHttpClient`, or `Handlers`.
        node_id: Flower's id of the node.
        behaviour: what the site uploads for an instruction.
    """

    def __init__(self, fleet: Any, node_id: int, behaviour: Behaviour) -> None:
        self.fleet, self.node, self.behaviour = fleet, Node(node_id=node_id), behaviour
        self.early = 0  # number of instructions to confirm before they are complete
        self.asked: list[Message] = []

    def serve(self) -> None:
        """Pull the waiting instructions and answer them."""
        found = self.fleet.PullMessages(fleet_pb2.PullMessagesRequest(node=self.node))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            message = message_from_proto(proto)
            run_id, name = message.metadata.run_id, message.metadata.message_id
            if not self.early:
                parts = [part.object_id for part in iterate_object_tree(tree)]
                contents = {part: self._pull(run_id, part) for part in parts}
            self.fleet.ConfirmMessageReceived(
                message_pb2.ConfirmMessageReceivedRequest(
                    node=self.node, run_id=run_id, message_object_id=name
                )
            )
            if self.early:
                self.early -= 1
                continue
            instruction: Any = inflate_object_from_contents(name, contents)
            instruction.metadata.__dict__["_message_id"] = name
            self.asked.append(instruction)
            for parcel in self.behaviour(instruction):
                self.upload(parcel, run_id)

    def _pull(self, run_id: int, name: str) -> bytes:
        request = message_pb2.PullObjectRequest(node=self.node, run_id=run_id, object_id=name)
        while not (found := self.fleet.PullObject(request)).object_available:
            assert found.object_found
            time.sleep(0.05)
        return bytes(found.object_content)

    def upload(self, parcel: Parcel, run_id: int) -> None:
        """Push a message and the objects that the SuperLink asks for."""
        pushed = self.fleet.PushMessages(
            fleet_pb2.PushMessagesRequest(
                node=self.node,
                messages_list=[parcel.proto],
                message_object_trees=[parcel.tree],
            )
        )
        for name in pushed.objects_to_push:
            if name in parcel.contents:
                self.fleet.PushObject(
                    message_pb2.PushObjectRequest(
                        node=self.node,
                        run_id=run_id,
                        object_id=name,
                        object_content=parcel.contents[name],
                        session_id=pushed.session_id,
                    )
                )


class _Runtime:
    """Calls Flower's runtime handlers in this process; sites answer when the server pulls."""

    def __init__(self, link: Link) -> None:
        self._link, self._lock = link, threading.Lock()

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        with self._lock:
            for site in self._link.sites:
                site.serve()
            return runtime_handlers.pull_messages(request, self._link.state, self._link.task)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        if self._link.closed:  # otherwise Flower's threads wait for minutes after a test
            raise ConnectionError
        return runtime_handlers.pull_object(request, self._link.state, self._link.task)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        handler = {
            "GetNodes": runtime_handlers.get_nodes,
            "PushMessages": runtime_handlers.push_messages,
            "PushObject": runtime_handlers.push_object,
            "ConfirmMessageReceived": runtime_handlers.confirm_message_received,
        }[name]
        return lambda request: handler(request, self._link.state, self._link.task)


class Link:
    """A SuperLink in this process with one run; ``grid`` is Flower's `HttpGrid`."""

    def __init__(self) -> None:
        manager = NoOpFederationManager()
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, ObjectStoreFactory())
        self.state: Any = factory.state()
        manager.linkstate = self.state
        self.run_id = self.state.create_run(
            None, None, "hash", {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP
        )
        (run,) = self.state.get_run_info(run_ids=[self.run_id])
        assert self.state.claim_task(run.primary_task_id)
        assert self.state.activate_task(run.primary_task_id)
        self.task = Task(run_id=self.run_id)
        self.sites: list[Site] = []
        self.closed = False
        self.grid = HttpGrid(insecure=True, token="token")
        self.grid.__dict__["_client"] = _Runtime(self)
        self.grid.set_run(Run.create_empty(self.run_id))

    def add(self, behaviour: Behaviour) -> Site:
        """Add a site that is online."""
        node_id = self.state.create_node("", "", bytes(f"key {len(self.sites)}", "ascii"), 3600)
        assert self.state.activate_node(node_id, 3600)
        site = Site(Handlers(self.state), node_id, behaviour)
        self.sites.append(site)
        return site


@contextmanager
def link() -> Iterator[Link]:
    """Yield a `Link`; messages that are made inside the block belong to its run."""
    made = Link()
    before = TaskIdentity._run_id
    TaskIdentity._run_id = made.run_id
    try:
        yield made
    finally:
        made.closed = True
        TaskIdentity._run_id = before


def refusal(message: Message) -> Message:
    return Message(Error(451, "not taking part"), reply_to=message)


@contextmanager
def fleet(address: str, behaviours: list[Behaviour]) -> Iterator[list[Site]]:
    """Connect sites to a real SuperLink, each in a thread, without Flower's SuperNode."""
    ended = threading.Event()
    with ExitStack() as open_clients:
        sites = [_connect(open_clients, address, made) for made in behaviours]
        threads = [threading.Thread(target=_serve, args=(site, ended)) for site in sites]
        for thread in threads:
            thread.start()
        try:
            yield sites
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)


def _connect(open_clients: ExitStack, address: str, behaviour: Behaviour) -> Site:
    private, public = generate_key_pairs()
    client = open_clients.enter_context(
        FleetHttpClient.from_server_address(
            address,
            True,
            None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, public),
            ],
        )
    )
    key = public_key_to_bytes(public)
    client.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=key))
    active = client.ActivateNode(
        fleet_pb2.ActivateNodeRequest(public_key=key, heartbeat_interval=600)
    )
    return Site(client, active.node_id, behaviour)


def _serve(site: Site, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        with suppress(Exception):  # the SuperLink may reject what a hostile site pushes
            site.serve()
