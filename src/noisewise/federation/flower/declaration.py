"""A site's declaration on the wire: three fields of its own file, if the site opted in.

The question is an empty message of type ``query.declaration``. The answer is one config record with
the unit, epsilon and delta, or the usual refusal. No record and no ledger is read for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.claims import UNITS, Declaration, read_declaration
from noisewise.federation.flower.replies import Fault
from noisewise.federation.flower.site import Site

__all__ = [
    "ACTION",
    "declaration_content",
    "declaration_questions",
    "read_declarations",
]

ACTION = "declaration"
"""Flower's name for the question: an app's own ``query`` function never receives it."""

RECORD = "declaration"
"""Name of the answer's one record."""

_TYPE = f"{MessageType.QUERY}.{ACTION}"
_site_log = logging.getLogger("noisewise.site")
_log = logging.getLogger(__name__)


def declaration_content(read_site: Callable[[], Site], asked: RecordDict) -> RecordDict | None:
    """The content of a site's answer; None to refuse.

    No exception leaves: Flower would send its text to the server.

    Args:
        read_site: loads the site.
        asked: content of the server's message; must be empty.
    """
    try:
        if len(asked):
            names = [str(name)[:20] for name in list(asked)[:5]]
            raise InvalidValueError("records", names, "must be none: the question has no content")
        site = read_site()
        part = site.config.declaration
        if part is None or not part.publish:
            _site_log.info(
                "a server asked for this site's declaration and gets none: publish = true in "
                "[declaration] of the site's file would send unit, epsilon and delta"
            )
            return None
        declared = Declaration(UNITS[0], site.budget.epsilon, site.budget.delta)
    except NoisewiseError as error:
        _site_log.error("no declaration is sent: %s", error)
    except Exception:
        _site_log.exception("no declaration is sent: an error that is ours or this machine's")
    else:
        _site_log.info("a declaration is sent: %s", declared)
        return RecordDict({RECORD: ConfigRecord(asdict(declared))})
    return None


def declaration_questions(nodes: Iterable[int]) -> list[Message]:
    """The question for each node."""
    return [Message(RecordDict(), node, _TYPE) for node in nodes]


def read_declarations(
    replies: Iterable[tuple[int, Message | Fault]], asked: Iterable[int]
) -> dict[str, Declaration]:
    """Declarations by client id. A node that sends none, or an invalid one, is left out.

    Args:
        replies: (node, its reply or what went wrong); whatever the iterator raises ends the asking.
        asked: the nodes.
    """
    declared: dict[str, Declaration] = {}
    remaining = set(asked)
    try:
        for node, reply in replies:
            if node not in remaining:
                continue
            remaining.discard(node)
            try:
                found = _read(reply)
            except Exception as error:  # whatever a node sends, it concerns this node only
                words = str(error) if isinstance(error, NoisewiseError) else type(error).__name__
                _log.warning("site %s: its declaration is invalid and left out: %s", node, words)
                continue
            if found is not None:
                declared[str(node)] = found
    except Exception as error:  # a report without declarations is no reason to stop a run
        _log.warning("asking for declarations failed: %s", type(error).__name__)
    return declared


def _read(reply: Message | Fault) -> Declaration | None:
    """The declaration of a reply; None if the node gave no answer."""
    if isinstance(reply, Fault) or reply.has_error():
        return None
    content = reply.content
    if [*content] != [RECORD] or [*content.config_records] != [RECORD]:
        names = [str(name)[:20] for name in list(content)[:3]]
        raise InvalidValueError("records", names, f"must be one config record {RECORD!r}")
    return read_declaration(dict(content.config_records[RECORD]))
