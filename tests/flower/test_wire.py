"""The wire schema is defined in one file, and all refusals of a site look the same."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import context, make_site, start_arrays  # noqa: E402
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402

import noisewise  # noqa: E402
from noisewise.flower import client, wire  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402

PACKAGE = Path(noisewise.__file__).parent
NAMES = {value for name, value in vars(wire).items() if name.isupper() and isinstance(value, str)}
CODE = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "flower" / "wire.py"]


def literals(text: str) -> set[str]:
    """String constants of a program; docstrings are never equal to a name."""
    nodes = ast.walk(ast.parse(text))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def copies(text: str, path: Path) -> set[str]:
    """Names of the wire that a file repeats; other folders use most words for other things."""
    names = NAMES if path.parent.name == "flower" else {wire.ROUND, wire.LEARNING_RATE}
    return literals(text) & names


def test_no_file_repeats_a_name_of_the_wire() -> None:
    assert {"server-round", "learning-rate", "noised-accuracy", "query.declaration"} <= NAMES
    assert len(CODE) > 150
    repeated = {str(path): copies(path.read_text(), path) for path in CODE}
    assert {path: names for path, names in repeated.items() if names} == {}
    planted = 'reply = RecordDict({"delta": arrays})'
    assert copies(planted, PACKAGE / "flower" / "replies.py") == {"delta"}


def test_the_names_are_those_that_deployed_clients_know() -> None:
    """A change here breaks federations whose machines have different versions."""
    known = "arrays delta config metrics server-round learning-rate noised-accuracy declaration"
    assert {*known.split(), "query.declaration", "not taking part"} == NAMES
    assert wire.REFUSED == 451
    assert (wire.ARRAY_TYPE.str, wire.NPY_VERSIONS) == ("<f4", ((1, 0), (2, 0)))


GOOD = {"server-round": 1, "learning-rate": 0.2}


def message(kind: str = "train", config: dict[str, Any] | None = None) -> Message:
    records = {"arrays": start_arrays(), "config": ConfigRecord(GOOD if config is None else config)}
    return Message(RecordDict(records), 7, kind)


def ask(site: Path, asked: Message) -> Message:
    return make_client_app()(asked, context(site=str(site)))


def test_every_refusal_is_the_same_reply(tmp_path: Path) -> None:
    site = make_site(tmp_path, records=60, rounds=1)
    assert not ask(site, message()).has_error()
    refusals = {
        "budget spent": ask(site, message(config=GOOD | {"server-round": 2})),
        "learning rate": ask(site, message(config=GOOD | {"learning-rate": 1e9})),
        "another key": ask(site, message(config=GOOD | {"epsilon": 1e9})),
        "no metrics": ask(site, message("evaluate", {"server-round": 1})),
        "no declaration": ask(site, Message(RecordDict(), 7, wire.DECLARE)),
        "declaration with content": ask(site, message(wire.DECLARE)),
        "another query": ask(site, Message(RecordDict(), 7, "query")),
        "no site file": ask(tmp_path / "none.toml", message()),
    }
    for case, reply in refusals.items():
        assert reply.has_error(), case
        assert (reply.error.code, reply.error.reason) == (451, "not taking part"), case


@pytest.mark.parametrize("name", ["read_instruction", "update_content", "asked_round", "_answers"])
def test_no_exception_of_the_adapter_reaches_the_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> Any:
        raise MemoryError("secret text")

    monkeypatch.setattr(client, name, fails)
    reply = ask(make_site(tmp_path, records=60), message())
    assert (reply.error.code, reply.error.reason) == (451, "not taking part")
