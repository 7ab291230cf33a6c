"""The server drops a site that sends anything invalid, and uses the others (guarantee 8).

The replies are bytes that a site chose, and Flower's own code decodes them: `flower_link` runs
Flower's state and grid in this process. The slow test does the same with a real SuperLink.
"""

from __future__ import annotations

import builtins
import json
import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import LocalGrid, start_arrays  # noqa: E402
from flower_cases import honest as noise  # noqa: E402
from flower_link import (  # noqa: E402
    SERVER,
    Behaviour,
    Parcel,
    Raw,
    Site,
    array,
    array_record,
    by_hand,
    fleet,
    honest,
    link,
    pack,
    records,
    refusal,
)
from flower_processes import Deployment  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_object_id  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402

from noisewise.errors import InvalidValueError, UpdateError  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower import reply_stream  # noqa: E402
from noisewise.flower.new_app import write_app  # noqa: E402
from noisewise.flower.strategy import NoiseAware  # noqa: E402
from noisewise.flower.wire import NOISED_ACCURACY  # noqa: E402

RATE = 0.2
NOT_PROTOBUF = b"\xff\xff\xff"


def strategy(**options: Any) -> NoiseAware:
    told = {"poll_seconds": 0.05, "round_seconds": 5.0, "declaration_seconds": 0, **options}
    return NoiseAware("RobustHDP", learning_rate=RATE, **told)


def content(part: Raw, **metadata: Any) -> Behaviour:
    return lambda message: [by_hand(message, part, **metadata)]


def body(kind: str, text: bytes) -> Behaviour:
    """A reply with one object of this type, whose body is these bytes."""
    if kind == "Message":
        return lambda message: [_with_root(message, text)]
    if kind == "RecordDict":
        return content(Raw(kind, text, [Raw("ConfigRecord", b"")]))
    if kind == "Array":
        return content(records(delta=array_record(a=Raw(kind, text, [Raw("ArrayChunk", b"x")]))))
    if kind == "ArrayRecord":
        return content(records(delta=Raw(kind, text, [array(b"x")])))
    return content(records(delta=Raw(kind, text)))


def _with_root(message: Message, text: bytes) -> Parcel:
    parcel = by_hand(message, records(config=Raw("ConfigRecord", b"")))
    root = Raw("Message", text, [records(config=Raw("ConfigRecord", b""))])
    parcel.proto.metadata.message_id = root.object_id()
    return Parcel(
        parcel.proto, root.tree(), {part.object_id(): part.content() for part in root.all()}
    )


def never_uploaded(message: Message) -> list[Parcel]:
    """Names an object that never comes: Flower's own pull waits for minutes."""
    parcel = by_hand(message, records(delta=Raw("ConfigRecord", b"")))
    parcel.contents.popitem()
    return [parcel]


def twice(message: Message) -> list[Parcel]:
    return [*body("ConfigRecord", NOT_PROTOBUF)(message), pack(noise()(message))]


def with_error(message: Message) -> list[Parcel]:
    return [pack(Message(Error(-(2**40), "\x1b[31m" + "x" * 3_000_000), reply_to=message))]


def in_array(**claims: Any) -> Behaviour:
    """A reply with one array about which a site claims something odd."""
    return content(records(delta=array_record(a=array(b"x" * 100, **claims))))


UNDECODABLE: dict[str, tuple[Behaviour, str]] = {
    "config": (body("ConfigRecord", NOT_PROTOBUF), "DecodeError"),
    "metric": (body("MetricRecord", NOT_PROTOBUF), "DecodeError"),
    "message": (body("Message", NOT_PROTOBUF), "DecodeError"),
    "no json": (body("RecordDict", b"{"), "JSONDecodeError"),
    "no utf-8": (body("RecordDict", b"\xff"), "UnicodeDecodeError"),
    "a list": (body("RecordDict", b"[1]"), "AttributeError"),
    "unhashable": (body("ArrayRecord", b'{"a": [1]}'), "TypeError"),
    "other children": (body("ArrayRecord", b'{"a": "b"}'), "ValueError"),
    "nested json": (body("Array", b"[" * 200_000), "RecursionError"),
    "no fields": (body("Array", b"{}"), "KeyError"),
    "no such chunk": (in_array(arraychunk_ids=[7]), "IndexError"),
    "no shape": (in_array(shape=3), "TypeError"),
    "children": (
        content(records(delta=Raw("ConfigRecord", b"", [Raw("ConfigRecord", b"")]))),
        "ValueError",
    ),
    "no content": (lambda message: [by_hand(message, None)], "IndexError"),
    "a bomb": (
        content(records(delta=array_record(a=array(b"x" * (4 << 20), repeats=2000)))),
        "MemoryError",
    ),
}
"""Behaviours whose reply raises inside of Flower's pull, and what it raises."""

UNUSABLE: dict[str, Behaviour] = {
    "other type": content(records(delta=Raw("ConfigRecord", b""))),
    "no records": content(records()),
    "other name": content(records(weights=array_record(a=array(b"x")))),
    "shape claimed": content(records(delta=array_record(a=array(np.zeros(3, np.float32))))),
    "giant": content(records(delta=array_record(a=array(bytes(40 << 20))))),
    "other round": lambda message: [_other_round(message)],
    "two replies": twice,
}
"""Behaviours whose reply Flower decodes, except for the last, and that no update can be read of."""


def _other_round(message: Message) -> Parcel:
    reply = noise()(message)
    reply.metadata.group_id = "77"
    return pack(reply)


def reasons(played: NoiseAware, sites: dict[str, Site]) -> list[dict[str, str]]:
    """Of each round, why each of the named sites was dropped."""
    assert played.run is not None
    return [
        {name: record.dropped[str(s.node.node_id)] for name, s in sites.items()}
        for record in played.run.records
    ]


def test_one_undecodable_config_record_ends_no_run_and_loses_no_other_reply() -> None:
    """The attack of the issue: one reply whose `ConfigRecord` is not protobuf."""
    with link() as there:
        good = [there.add(honest(noise())) for _ in range(3)]
        bad = there.add(body("ConfigRecord", NOT_PROTOBUF))
        played = strategy()
        played.start(there.grid, start_arrays(), 2)
    assert played.run is not None
    for record in played.run.records:
        assert set(record.weights) == {str(site.node.node_id) for site in good}
        assert record.dropped == {
            str(bad.node.node_id): "sent a reply that cannot be decoded (DecodeError)"
        }


def test_whatever_a_site_uploads_only_that_site_is_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_stream, "_SLACK", 200 << 20)
    with link() as there, caplog.at_level(logging.INFO, "noisewise"):
        good = [there.add(honest(noise())) for _ in range(3)]
        raising = {name: there.add(made) for name, (made, _) in UNDECODABLE.items()}
        others = {name: there.add(made) for name, made in UNUSABLE.items()}
        error = there.add(with_error)
        played = strategy(round_seconds=60.0)
        played.start(there.grid, start_arrays(), 1)
    assert played.run is not None
    for found in reasons(played, raising):
        assert found == {
            name: f"sent a reply that cannot be decoded ({raised})"
            for name, (_, raised) in UNDECODABLE.items()
        }
    for found in reasons(played, others | {"error": error}):
        assert found.pop("two replies") == "sent a reply that cannot be decoded (DecodeError)"
        assert found.pop("other round") == "answered round '77'"
        assert found.pop("error") == f"gave no update (code {-(2**40)})"
        assert all("expected" in why or "has other names" in why for why in found.values())
    for record in played.run.records:
        assert set(record.weights) == {str(site.node.node_id) for site in good}
        assert max(map(len, record.dropped.values())) < 300
    assert "\x1b" not in caplog.text
    assert "xxx" not in caplog.text


def declaring(answer: Behaviour, trains: Behaviour | None = None) -> Behaviour:
    """Trains honestly or as told, and answers the question for a declaration in some way."""

    def behave(message: Message) -> list[Parcel]:
        asked = message.metadata.message_type.startswith("query")
        return answer(message) if asked else (trains or honest(noise()))(message)

    return behave


def declines(message: Message) -> list[Parcel]:
    """What a site answers that declares nothing."""
    return [pack(Message(Error(451, "not taking part"), reply_to=message))]


def declared(message: Message) -> list[Parcel]:
    claim = ConfigRecord({"unit": "record", "epsilon": 1.0, "delta": 1e-5})
    return [pack(Message(RecordDict({"declaration": claim}), reply_to=message))]


def test_whatever_a_site_declares_the_run_goes_on_with_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_stream, "_SLACK", 200 << 20)
    with link() as there:
        good = there.add(declaring(declared))
        others = [there.add(declaring(made)) for made, _ in UNDECODABLE.values()]
        others += [there.add(declaring(made)) for made in UNUSABLE.values()]
        played = strategy(round_seconds=60.0, declaration_seconds=5.0)
        played.start(there.grid, start_arrays(), 1)
    assert played.run is not None
    assert set(played.run.declarations) == {str(good.node.node_id)}
    (record,) = played.run.records
    assert set(record.weights) == {str(site.node.node_id) for site in (good, *others)}


RUDE = "\x1b[31m\x00\r\n\u202e" * 5000


def rude_names(message: Message) -> list[Parcel]:
    arrays = {f"{RUDE}{k}": Array(np.zeros(3, np.float32)) for k in range(5)}
    return [pack(Message(RecordDict({"delta": ArrayRecord(arrays)}), reply_to=message))]


def rude_records(message: Message) -> list[Parcel]:
    return [pack(Message(RecordDict({RUDE: ArrayRecord({})}), reply_to=message))]


def rude_round(message: Message) -> list[Parcel]:
    reply = noise()(message)
    reply.metadata.group_id = RUDE
    return [pack(reply)]


def test_no_text_of_a_site_reaches_the_log_or_the_results_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with link() as there, caplog.at_level(logging.DEBUG, "noisewise"):
        for made in (rude_names, rude_records, rude_round, with_error):
            there.add(made)
        for _ in range(2):
            there.add(honest(noise()))
        strategy(folder=tmp_path).start(there.grid, start_arrays(), 1)
    (record,) = load_run(tmp_path).rounds
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("noisewise")]
    assert len(record.dropped) == 4
    for text in [*record.dropped, *record.dropped.values(), *ours]:
        assert text.isprintable()
        assert len(text) < 400


def test_without_the_memory_limit_a_small_reply_takes_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of 4 MiB, listed 50 times, is 210 MB: with the limit it is never built."""
    bomb = content(records(delta=array_record(a=array(b"x" * (4 << 20), repeats=50))))
    found = []
    for slack in (64 << 20, 4 << 30):
        monkeypatch.setattr(reply_stream, "_SLACK", slack)
        with link() as there:
            _, _, bad = (there.add(made) for made in (honest(noise()), honest(noise()), bomb))
            played = strategy(round_seconds=60.0)
            played.start(there.grid, start_arrays(), 1)
            found += [reasons(played, {"bomb": bad})[0]["bomb"]]
    assert found[0] == "sent a reply that cannot be decoded (MemoryError)"
    assert "other names" in found[1]


def test_a_reply_that_is_never_uploaded_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_stream, "_PATIENCE", 0.2)
    with link() as there:
        slow = there.add(never_uploaded)
        good = [there.add(honest(noise())) for _ in range(2)]
        played = strategy(round_seconds=1.0)
        played.start(there.grid, start_arrays(), 1)
    assert played.run is not None
    assert set(played.run.records[0].weights) == {str(site.node.node_id) for site in good}
    assert "not complete" in reasons(played, {"slow": slow})[0]["slow"]


def stray(message: Message, text: bytes, upload: bool = True) -> Parcel:
    """A message to the server that answers nothing."""
    made = message_to_proto(remove_content_from_message(Message(RecordDict(), 7, "train")))
    root = Raw("Message", text)
    made.metadata.message_id = root.object_id()
    made.metadata.src_node_id = made.metadata.dst_node_id = SERVER
    made.metadata.run_id = message.metadata.run_id
    return Parcel(made, root.tree(), {root.object_id(): root.content()} if upload else {})


@pytest.mark.parametrize("upload", [True, False])
def test_messages_that_answer_nothing_cost_no_other_site_its_reply(
    upload: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower delivers them with the next reply; pulled together, that reply would be lost."""
    monkeypatch.setattr(reply_stream, "_PATIENCE", 0.2)
    with link() as there:
        liar = there.add(
            lambda message: [stray(message, NOT_PROTOBUF, upload), pack(noise()(message))]
        )
        good = [there.add(honest(noise())) for _ in range(3)]
        played = strategy()
        with caplog.at_level(logging.WARNING, "noisewise"):
            played.start(there.grid, start_arrays(), 2)
    assert played.run is not None
    for record in played.run.records:
        assert set(record.weights) == {str(site.node.node_id) for site in [liar, *good]}
    assert "messages that are not replies" in caplog.text


def readable_stray(message: Message) -> list[Parcel]:
    """An update that answers nothing; the server's own number stands for its sender."""
    parcel = pack(noise()(message))
    root = Raw("Message", _claim(parcel), [])
    contents = dict(parcel.contents)
    old = contents.pop(parcel.proto.metadata.message_id)
    child = old.split(b" ")[1].decode()
    content = old.split(b" ")[0] + f" {child} {len(root.body)}".encode() + b"\x00" + root.body
    name = get_object_id(content)
    parcel.proto.metadata.message_id = name
    parcel.tree.object_id = name
    return [Parcel(parcel.proto, parcel.tree, contents | {name: content})]


def _claim(parcel: Parcel) -> bytes:
    meta = parcel.proto.metadata
    meta.src_node_id = meta.dst_node_id = SERVER
    meta.reply_to_message_id = ""
    claimed = type(parcel.proto)()
    claimed.metadata.CopyFrom(meta)
    return bytes(claimed.SerializeToString())


def test_an_update_that_answers_nothing_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the question for a silent site's reply, and is not that site's."""
    monkeypatch.setattr(reply_stream._Strays, "discard", lambda self: None)
    with link() as there:
        silent = there.add(lambda message: [])
        liar = there.add(lambda message: readable_stray(message))
        good = [there.add(honest(noise())) for _ in range(2)]
        played = strategy(round_seconds=2.0)
        played.start(there.grid, start_arrays(), 1)
    assert played.run is not None
    (record,) = played.run.records
    assert set(record.weights) == {str(site.node.node_id) for site in good}
    assert {str(site.node.node_id) for site in (silent, liar)} == set(record.dropped)


def test_a_site_is_not_blamed_for_what_came_with_its_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the message that answers nothing wins the race, the reply is lost, but not the site."""
    monkeypatch.setattr(
        reply_stream._Strays, "discard", lambda self: setattr(self, "present", True)
    )
    with link() as there:
        site = there.add(lambda message: [stray(message, NOT_PROTOBUF), *honest(noise())(message)])
        for _ in range(2):
            there.add(honest(noise()))
        played = strategy(max_bad_replies=1)
        played.start(there.grid, start_arrays(), 3)
    assert len(site.asked) == 3
    assert played.run is not None
    assert any(record.dropped for record in played.run.records)


# ------------------------------------------------------------ every exception at every stage


def _classes(kind: type[Exception]) -> Iterator[type[Exception]]:
    for below in kind.__subclasses__():
        if below.__module__ == "builtins" and getattr(builtins, below.__name__, None) is below:
            yield below
        yield from _classes(below)


EXCEPTIONS = [
    *sorted(set(_classes(Exception)), key=lambda kind: kind.__name__),
    DecodeError,
    UpdateError,
    json.JSONDecodeError,
    struct.error,
    zlib.error,
    type("AnybodysError", (Exception,), {}),
]


def raised(kind: type[Exception]) -> Exception:
    """An instance, whatever its constructor wants."""
    if kind is ExceptionGroup:
        return ExceptionGroup("several", [ValueError()])
    return kind.__new__(kind)


class Trap:
    """Stands in for a reply or a part of it and raises where it is touched."""

    def __init__(self, real: object, touched: str, error: Exception) -> None:
        self._real, self._touched, self._error = real, touched, error

    def __getattr__(self, name: str) -> Any:
        if name == self._touched:
            raise self._error
        return getattr(self._real, name)


def _content_trap(message: Message, stage: str, error: Exception) -> object:
    reply = noise()(message)
    if stage in ("has_error", "content"):
        return Trap(reply, stage, error)
    inside: object = reply.content
    if stage == "array_records":
        inside = Trap(inside, stage, error)
    elif stage == "items":
        record = Trap(reply.content["delta"], "keys", error)
        inside = Trap(inside, "", error)
        inside.__dict__["array_records"] = {"delta": record}
    elif stage == "data":
        arrays = {name: Trap(part, "data", error) for name, part in reply.content["delta"].items()}
        inside = Trap(inside, "", error)
        inside.__dict__["array_records"] = {"delta": arrays}
    elif stage == "metric_records":
        inside = Trap(RecordDict({"metrics": MetricRecord({})}), "", error)
        inside.__dict__["metric_records"] = Trap({}, "keys", error)
    trap = Trap(reply, "", error)
    trap.__dict__["content"] = inside
    return trap


class RaisingGrid(LocalGrid):
    """Raises for the nodes of ``errors`` while their replies are pulled."""

    def __init__(self, nodes: Any, errors: dict[int, Exception], late: bool) -> None:
        super().__init__(nodes)
        self._errors, self._late = errors, late

    def pull_messages(self, message_ids: Any) -> Any:
        for name in message_ids:
            node = next(m for m in self.seen if m.metadata.message_id == name).metadata.dst_node_id
            if node in self._errors:
                if self._late:
                    return (self._raise(node) for _ in range(1))
                self._raise(node)
        return super().pull_messages(message_ids)

    def _raise(self, node: int) -> Any:
        raise self._errors[node]


@pytest.mark.parametrize(
    "stage", ["pull", "iterate", "has_error", "content", "array_records", "items", "data"]
)
def test_every_exception_at_every_stage_drops_its_site_only(stage: str) -> None:
    assert len(EXCEPTIONS) > 60
    errors = {100 + k: raised(kind) for k, kind in enumerate(EXCEPTIONS)}
    good = {k: noise() for k in (1, 2, 3)}
    played = strategy(poll_seconds=0.01)
    if stage in ("pull", "iterate"):
        nodes = good | dict.fromkeys(errors, noise())
        grid = RaisingGrid(nodes, errors, late=stage == "iterate")
    else:

        def trapped(error: Exception) -> Callable[[Message], Any]:
            return lambda message: _content_trap(message, stage, error)

        grid = LocalGrid(good | {node: trapped(error) for node, error in errors.items()})
    played.start(grid, start_arrays(), 1)
    assert played.run is not None
    (record,) = played.run.records
    assert set(record.weights) == {"1", "2", "3"}
    assert set(record.dropped) == {str(node) for node in errors}
    own = {"UpdateError", "StopIteration"}  # passed on as it is; a RuntimeError in a generator
    for node, error in errors.items():
        name = type(error).__name__
        assert name in own or name in record.dropped[str(node)]


@pytest.mark.parametrize("stage", ["pull", "has_error", "content", "metric_records"])
def test_every_exception_of_an_accuracy_leaves_out_its_site_only(stage: str) -> None:
    errors = {100 + k: raised(kind) for k, kind in enumerate(EXCEPTIONS)}

    def site(error: Exception | None) -> Callable[[Message], Any]:
        def answer(message: Message) -> Any:
            if message.metadata.message_type == MessageType.TRAIN:
                return noise()(message)
            if error is not None and stage != "pull":
                return _content_trap(message, stage, error)
            metrics = MetricRecord({NOISED_ACCURACY: 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return answer

    nodes = {k: site(None) for k in (1, 2, 3)} | {n: site(e) for n, e in errors.items()}

    class Grid(RaisingGrid):
        def _raise(self, node: int) -> Any:
            if self.seen[-1].metadata.message_type == MessageType.EVALUATE:
                raise self._errors[node]

    grid = Grid(nodes, errors if stage == "pull" else {}, late=False)
    played = NoiseAware(
        RobustMean(), learning_rate=RATE, poll_seconds=0.01, round_seconds=20.0, evaluate_every=1
    )
    played.start(grid, start_arrays(), 1)
    assert played.run is not None
    assert played.run.records[0].noised_accuracy == {"1": 0.5, "2": 0.5, "3": 0.5}


class RobustMean:
    """Equal weights: cheap for many clients."""

    needs: frozenset[Any] = frozenset()
    reads_all_coordinates = True

    def aggregate(self, view: Any, state: Any) -> Any:
        from noisewise.aggregation import Aggregation, weighted_sum

        weights = np.full(view.updates.n_clients, 1 / view.updates.n_clients)
        return Aggregation(weighted_sum(view.updates.values, weights), weights)


def test_a_broken_connection_or_a_stopped_run_is_no_sites_fault() -> None:
    class Broken(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            self.broken = True
            raise ConnectionError("the run was stopped")

        def get_node_ids(self) -> Any:
            if getattr(self, "broken", False):
                raise ConnectionError("the run was stopped")
            return super().get_node_ids()

    played = strategy()
    with pytest.raises(ConnectionError, match="the run was stopped"):
        played.start(Broken({1: noise(), 2: noise()}), start_arrays(), 1)
    assert not played.bad_replies.excluded(MessageType.TRAIN)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_sites_fault(kind: type[BaseException]) -> None:
    class Interrupted(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            raise kind

    with pytest.raises(kind):
        strategy().start(Interrupted({1: noise(), 2: noise()}), start_arrays(), 1)


def test_a_site_that_cannot_be_sent_its_instruction_costs_no_other_site_its_own() -> None:
    """Flower uploads all instructions at once; a site that confirms too early makes that fail."""

    class Grid(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            if any(message.metadata.dst_node_id == 9 for message in messages):
                raise RuntimeError("object was not pre-registered")
            return super().push_messages(messages)

    played = strategy()
    played.start(Grid({k: noise() for k in (1, 2, 3, 9)}), start_arrays(), 2)
    assert played.run is not None
    for record in played.run.records:
        assert set(record.weights) == {"1", "2", "3"}
        assert record.dropped == {"9": "could not receive its instruction (RuntimeError)"}


class Fragile(RobustMean):
    """Fails on an update that passes the screening."""

    def __init__(self, largest: float) -> None:
        self.largest = largest

    def aggregate(self, view: Any, state: Any) -> Any:
        if float(view.updates.values.abs().max()) > self.largest:
            raise np.linalg.LinAlgError("SVD did not converge")
        return super().aggregate(view, state)


def test_an_update_on_which_an_own_aggregator_fails_is_dropped_and_a_bug_is_not_hidden() -> None:
    nodes = {1: noise(), 2: noise(), 3: noise(1e6), 4: noise()}
    played = NoiseAware(Fragile(1.0), learning_rate=RATE, declaration_seconds=0)
    played.start(LocalGrid(nodes), start_arrays(), 2)
    assert played.run is not None
    for record in played.run.records:
        assert set(record.weights) == {"1", "2", "4"}
        assert record.dropped == {"3": "sent an update on which Fragile fails (LinAlgError)"}
    with pytest.raises(np.linalg.LinAlgError):
        NoiseAware(Fragile(0.0), learning_rate=RATE, declaration_seconds=0).start(
            LocalGrid(nodes), start_arrays(), 2
        )


# ------------------------------------------------------------ who is not asked again


def test_after_three_unusable_replies_in_a_row_a_site_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def now_and_then(message: Message) -> list[Parcel]:
        number = int(message.content["config"]["server-round"])
        return (body("ConfigRecord", NOT_PROTOBUF) if number % 3 else honest(noise()))(message)

    with link() as there, caplog.at_level(logging.WARNING, "noisewise"):
        for _ in range(2):
            there.add(honest(noise()))
        bad = there.add(body("ConfigRecord", NOT_PROTOBUF))
        refusing = there.add(honest(refusal))
        sometimes = there.add(now_and_then)
        strategy(folder=tmp_path).start(there.grid, start_arrays(), 5)
        assert [len(site.asked) for site in (bad, refusing, sometimes)] == [3, 5, 5]
        assert f"client {bad.node.node_id} sent 3 unusable replies (train) in a row" in caplog.text
        played = strategy(folder=tmp_path)
        played.start(there.grid, start_arrays(), 9)  # a restarted server asks again
        assert [len(site.asked) for site in (bad, refusing, sometimes)] == [6, 9, 9]
    assert played.run is not None
    dropped = [record.dropped.get(str(bad.node.node_id), "") for record in played.run.records]
    assert ["not asked again" in why for why in dropped] == [
        number in (3, 8) for number in range(1, 10)
    ]
    assert not any(dropped[3:5])


def test_excluded_sites_do_not_count_as_connected() -> None:
    with link() as there:
        there.add(honest(noise()))
        there.add(body("ConfigRecord", NOT_PROTOBUF))
        played = strategy(max_bad_replies=1, wait_seconds=0.2, failures_allowed=3)
        with pytest.raises(
            UpdateError, match=r"1 of at least 2 .* not counting 1 that sent unusable"
        ):
            played.start(there.grid, start_arrays(), 3)


def test_the_limit_must_be_a_positive_number() -> None:
    with pytest.raises(InvalidValueError, match="max_bad_replies = 0"):
        strategy(max_bad_replies=0)


def test_flower_driving_the_rounds_finds_senders_by_what_they_answer() -> None:
    """A reply that names another node as its sender does not count as that node's."""
    played = strategy()
    grid = LocalGrid({1: noise(), 2: noise(), 3: noise()})
    sent = list(played.configure_train(1, start_arrays(), None, grid))  # type: ignore[arg-type]
    replies = list(grid.send_and_receive(sent))
    forged = noise()(sent[0])
    forged.metadata.__dict__["_src_node_id"] = 2
    forged.metadata.__dict__["_reply_to_message_id"] = "another message"
    arrays, _ = played.aggregate_train(1, [forged, *replies, replies[0]])
    assert arrays is not None
    assert played.run is not None
    assert set(played.run.records[0].weights) == {"1", "2", "3"}


def test_the_link_of_these_tests_delivers_honest_replies_bit_for_bit() -> None:
    """Flower's own coding on the way gives the model that no coding gives."""
    models = []
    with link() as there:
        for _ in range(3):
            there.add(honest(noise()))
        models.append(strategy().start(there.grid, start_arrays(), 2).arrays)
        nodes = {site.node.node_id: noise() for site in there.sites}
    models.append(strategy().start(LocalGrid(nodes), start_arrays(), 2).arrays)
    for name, part in models[0].items():
        assert np.array_equal(part.numpy(), models[1][name].numpy())


def once_stray(message: Message) -> list[Parcel]:
    """An honest site that sends a message which answers nothing in the first round."""
    first = message.content["config"]["server-round"] == 1
    return [stray(message, NOT_PROTOBUF)] * first + honest(noise())(message)


def trained(site: Site) -> int:
    """How often a site was asked to train; it was also asked for a declaration."""
    return sum(message.metadata.message_type == MessageType.TRAIN for message in site.asked)


@pytest.mark.slow
def test_a_real_superlink_with_hostile_sites(tmp_path: Path) -> None:
    """The template's server, a SuperLink, honest sites and hostile ones that speak its protocol."""
    app, output = tmp_path / "app", tmp_path / "output"
    write_app(app)
    bad = {name: UNDECODABLE[name][0] for name in ("config", "message", "no utf-8", "a bomb")}
    bad |= {name: UNUSABLE[name] for name in ("giant", "other round", "two replies")}
    others: dict[str, Behaviour] = {
        "stray": once_stray,
        "early": honest(noise()),
        "error": with_error,
    }
    told = f'output="{output}" num-rounds=5 round-seconds=30.0 noise-floor=0.0 min-clients=3'
    behaviours = [honest(noise()), honest(noise()), honest(noise()), *others.values()]
    behaviours = [declaring(declines, made) for made in (*behaviours, *bad.values())]
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        address = f"127.0.0.1:{there.port}"
        with fleet(address, behaviours) as sites:
            sites[4].early = 2  # the question for a declaration, and the first instruction
            there.run("run", app, told)
            assert there.wait("run", 500) == 0, there.log("run")
    run = load_run(output)
    assert run.status == "finished", there.log("run")
    assert len(run.rounds) == 5
    names = [str(site.node.node_id) for site in sites]
    for record in run.rounds:
        assert set(record.weights) <= set(names[:5])
        lost = {name: record.dropped[name] for name in names[:3] if name not in record.weights}
        # The stray message of round 1 can arrive with an honest reply, which Flower then loses.
        assert len(lost) <= (record.round == 1), lost
        assert all("cannot be decoded (DecodeError)" in reason for reason in lost.values()), lost
    for name, client, site in zip(bad, names[6:], sites[6:], strict=True):
        last = trained(site)
        assert last in (3, 4), name  # one may not have counted, beside the message of round 1
        assert all(client in record.dropped for record in run.rounds[:last])
        assert "not asked again in this run" in run.rounds[last - 1].dropped[client]
        assert all(client not in record.dropped for record in run.rounds[last:])
    assert trained(sites[5]) == 5
