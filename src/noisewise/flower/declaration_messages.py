"""A server's question for a site's declaration, and the replies.

The question is an empty message. The reply is one config record with the unit, epsilon and delta,
or the usual refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import Message, RecordDict

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.flower.replies import Fault
from noisewise.flower.wire import DECLARATION, DECLARE
from noisewise.privacy.declaration import Declaration, read_declaration

__all__ = ["declaration_questions", "read_declarations"]

_log = logging.getLogger(__name__)


def declaration_questions(nodes: Iterable[int]) -> list[Message]:
    """The question for each node."""
    return [Message(RecordDict(), node, DECLARE) for node in nodes]


def read_declarations(
    replies: Iterable[tuple[int, Message | Fault]], nodes: Iterable[int]
) -> dict[str, Declaration]:
    """Declarations by client id. A node that sends none, or an invalid one, is left out.

    Args:
        replies: (node, its reply or what went wrong). If the iterator raises, the declarations
            received so far are returned.
        nodes: the nodes.
    """
    declared: dict[str, Declaration] = {}
    remaining = set(nodes)
    try:
        for node, reply in replies:
            if node not in remaining:
                continue
            remaining.discard(node)
            try:
                declaration = _read(reply)
            except Exception as error:  # whatever a node sends, it concerns this node only
                words = str(error) if isinstance(error, NoisewiseError) else type(error).__name__
                _log.warning("site %s: its declaration is invalid and ignored: %s", node, words)
                continue
            if declaration is not None:
                declared[str(node)] = declaration
    except Exception as error:  # missing declarations must not stop a run
        _log.warning("the request for declarations failed: %s", type(error).__name__)
    return declared


def _read(reply: Message | Fault) -> Declaration | None:
    """The declaration of a reply; None if the node did not answer."""
    if isinstance(reply, Fault) or reply.has_error():
        return None
    content = reply.content
    if [*content] != [DECLARATION] or [*content.config_records] != [DECLARATION]:
        names = [str(name)[:20] for name in list(content)[:3]]
        raise InvalidValueError("records", names, f"must be one config record {DECLARATION!r}")
    return read_declaration(dict(content.config_records[DECLARATION]))
