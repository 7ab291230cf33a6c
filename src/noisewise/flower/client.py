"""The client of a site: Flower's messages in, the site's answers out. It decides nothing.

A reply is a noised update, a noised score, a declaration, or the one refusal of `wire`. What a
site answers is decided in `noisewise.site`: in a vault, to whose socket this client passes messages
on, or in this process (`in_process`). With a vault, this file imports no torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.flower import show_log
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
from noisewise.site.requests import Instruction, Question

__all__ = ["make_client_app"]

SITE_VARIABLE = "NOISEWISE_SITE"

_log = logging.getLogger("noisewise.site")


class Answers(Protocol):
    """Where answers come from."""

    def update(
        self, read: Callable[[], Instruction], asked_round: object
    ) -> Mapping[str, NDArray[np.float32]] | None:
        """A noised update, or None for a refusal."""
        ...

    def accuracy(self, read: Callable[[], Question], asked_round: object) -> float | None:
        """A noised score, or None."""
        ...

    def declaration(self) -> dict[str, str | float] | None:
        """The fields of a declaration, or None."""
        ...


def make_client_app(site: str | Path | None = None) -> ClientApp:
    """A `ClientApp` that answers a server's messages by the site's own rules.

    The SuperNode's ``--node-config``, which the site's people write, names the socket of a vault
    (``vault="..."``) or, for simulations and trials, the site's file (``site="..."``). A run's
    config is never read.

    Args:
        site: the site's file. None takes it from ``--node-config``, or else from the environment
            variable ``NOISEWISE_SITE``.
    """
    show_log()
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            update = _answers(site, context).update(
                lambda: read_instruction(message.content), asked_round(message)
            )
            return None if update is None else update_content(update)

        return _reply(message, content)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            accuracy = _answers(site, context).accuracy(
                lambda: read_question(message.content), asked_round(message)
            )
            return None if accuracy is None else accuracy_content(accuracy)

        return _reply(message, content)

    @app.query(DECLARATION)  # type: ignore[untyped-decorator, unused-ignore]
    def declare(message: Message, context: Context) -> Message:
        def content() -> RecordDict | None:
            check_empty(message.content)
            declared = _answers(site, context).declaration()
            return None if declared is None else declaration_content(declared)

        return _reply(message, content)

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def query(message: Message, context: Context) -> Message:
        _log.warning("a query was refused: this site answers training instructions only")
        return _reply(message, lambda: None)

    return app


def _answers(site: str | Path | None, context: Context) -> Answers:
    """The vault or the site's file, whichever the site's people named."""
    vault = context.node_config.get("vault")
    if vault is None:
        from noisewise.flower.in_process import InProcessAnswers  # imports torch

        return InProcessAnswers(lambda: _site_file(site, context))
    if not isinstance(vault, str) or site is not None or "site" in context.node_config:
        allowed = "must be the path of a vault's socket, without a site's file in addition"
        raise InvalidValueError("vault", vault, allowed)
    from noisewise.flower.relay import VaultAnswers  # Linux only

    return VaultAnswers(Path(vault))


def _reply(message: Message, content: Callable[[], RecordDict | None]) -> Message:
    """The reply with this content, or the refusal.

    No exception leaves: Flower would send its text to the server. The site's own functions raise
    none; reading a message and building a reply can.
    """
    try:
        reply = content()
    except NoisewiseError as error:
        _log.error("a message was refused: %s", error)
        reply = None
    except Exception:
        _log.exception("a message was refused: an error of this software or of this machine")
        reply = None
    if reply is None:
        return Message(Error(REFUSED, NOT_TAKING_PART), reply_to=message)
    return Message(reply, reply_to=message)


def _site_file(site: str | Path | None, context: Context) -> Path:
    """Named by code that the site installed, its node config or its environment; no run's config.

    ``{partition-id}`` stands for the number that Flower's simulation gives a node.
    """
    path = site or context.node_config.get("site") or os.environ.get(SITE_VARIABLE)
    if not isinstance(path, (str, Path)):
        allowed = 'must be in --node-config of the SuperNode: site="PATH", the site\'s file'
        raise InvalidValueError("site", path, allowed)
    number = str(context.node_config.get("partition-id", ""))
    return Path(str(path).replace("{partition-id}", number))
