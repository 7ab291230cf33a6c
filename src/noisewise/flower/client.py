"""The client of a site: Flower's messages in, the site's answers out. It decides nothing.

A reply is a noised update, a noised accuracy, a declaration, or the one refusal of `wire`. What a
site answers is decided in `noisewise.site`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.flower.messages import (
    accuracy_content,
    asked_round,
    check_empty,
    declaration_content,
    read_instruction,
    read_question,
    update_content,
)
from noisewise.flower.wire import DECLARATION, NOT_TAKING_PART, REFUSED
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question

__all__ = ["make_client_app"]

SITE_VARIABLE = "NOISEWISE_SITE"

_log = logging.getLogger("noisewise.site")


def make_client_app(site: str | Path | None = None) -> ClientApp:
    """A `ClientApp` that answers a server's messages by the site's own rules.

    Args:
        site: the site's file. None takes the path from the SuperNode's ``--node-config
            'site="..."'``, which the site's people start, or else from the environment variable
            ``NOISEWISE_SITE``; never from a run's config.
    """
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            update = answer_instruction(
                lambda: _site_file(site, context),
                lambda: read_instruction(message.content),
                asked_round(message),
            )
            return None if update is None else update_content(update)

        return _reply(message, content)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            accuracy = answer_question(
                lambda: _site_file(site, context),
                lambda: read_question(message.content),
                asked_round(message),
            )
            return None if accuracy is None else accuracy_content(accuracy)

        return _reply(message, content)

    @app.query(DECLARATION)  # type: ignore[untyped-decorator, unused-ignore]
    def declare(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            check_empty(message.content)
            declared = answer_declaration(lambda: _site_file(site, context))
            return None if declared is None else declaration_content(declared)

        return _reply(message, content)

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def query(message: Message, context: Context) -> Message:
        _log.warning("a query was refused: this site answers training instructions only")
        return _reply(message, lambda: None)

    return app


def _reply(message: Message, content: Callable[[], RecordDict | None]) -> Message:
    """The reply with this content, or the refusal.

    No exception leaves: Flower would send its text to the server. The site's own functions raise
    none; reading a message and building a reply can.
    """
    try:
        made = content()
    except NoisewiseError as error:
        _log.error("a message was refused: %s", error)
        made = None
    except Exception:
        _log.exception("a message was refused: an error of this software or of this machine")
        made = None
    if made is None:
        return Message(Error(REFUSED, NOT_TAKING_PART), reply_to=message)
    return Message(made, reply_to=message)


def _site_file(given: str | Path | None, context: Context) -> Path:
    """Named by code that the site installed, its node config or its environment; no run's config.

    ``{partition-id}`` stands for the number that Flower's simulation gives a node.
    """
    path = given or context.node_config.get("site") or os.environ.get(SITE_VARIABLE)
    if not isinstance(path, (str, Path)):
        allowed = 'must be in --node-config of the SuperNode: site="PATH", the site\'s file'
        raise InvalidValueError("site", path, allowed)
    number = str(context.node_config.get("partition-id", ""))
    return Path(str(path).replace("{partition-id}", number))
