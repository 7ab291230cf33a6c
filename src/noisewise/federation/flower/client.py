"""The client of a site: its own budget, its own ledger, noised arrays out and nothing else.

A reply is either the noised change of the parameters or the words "not taking part"; a site whose
own file has a part ``[metrics]`` also answers questions, with one noised number, and a site with a
part ``[declaration]`` tells its unit and budget. The reason why a site does not take part is in its
own log and in the output of ``noisewise ledger why``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.flower.check import FAR
from noisewise.federation.flower.declaration import ACTION, declaration_content
from noisewise.federation.flower.instruction import Instruction, asked_round, read_instruction
from noisewise.federation.flower.metrics import noised_accuracy_content
from noisewise.federation.flower.records import to_record
from noisewise.federation.flower.site import Site, load_site
from noisewise.privacy.ledger import SealedReply, note_refusal
from noisewise.randomness import SecureRandom
from noisewise.training.engine import IsolatedGradients
from noisewise.training.local import local_update, per_step
from noisewise.training.parameters import ParameterLayout

__all__ = ["NOT_TAKING_PART", "REFUSED", "answer", "make_client_app", "site_reply"]

NOT_TAKING_PART = "not taking part"
SITE_VARIABLE = "NOISEWISE_SITE"
REFUSED = 451
"""Code of the error reply; the same for every reason."""

_log = logging.getLogger("noisewise.site")


def make_client_app(site: str | Path | None = None) -> ClientApp:
    """A `ClientApp` that answers training instructions by the site's own rules.

    Args:
        site: the site's file. None takes the path from the SuperNode's ``--node-config
            'site="..."'``, which the site's people start, or else from the environment variable
            ``NOISEWISE_SITE``; never from a run's config.
    """
    app = ClientApp()

    def site_file(context: Context) -> Path:
        return _site_file(site, context)

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        return answer(message, lambda: site_file(context))

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, lambda: site_file(context), noised_accuracy_content)

    @app.query(ACTION)  # type: ignore[untyped-decorator, unused-ignore]
    def declare(message: Message, context: Context) -> Message:
        made = declaration_content(lambda: load_site(site_file(context)), message.content)
        return _refusal(message) if made is None else Message(made, reply_to=message)

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def query(message: Message, context: Context) -> Message:
        _log.warning("a query was refused: this site answers training instructions only")
        return _refusal(message)

    return app


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


def answer(
    message: Message,
    site_file: Callable[[], Path],
    content: Callable[[Site, RecordDict], RecordDict] | None = None,
) -> Message:
    """The reply to a message: noised arrays, or "not taking part" whatever went wrong.

    No exception leaves: Flower would send its text to the server. The reason of a refusal is noted
    beside the ledger, or beside the site's file if that cannot be read.

    Args:
        message: the server's.
        site_file: finds the site's file.
        content: (site, content of the message) -> content of the reply; a noised update by default.
    """
    notes: Path | None = None
    try:
        notes = site_file()
        site = load_site(notes)
        notes = site.ledger_file
        made = (content or _update_content)(site, message.content)
    except Exception as error:
        if isinstance(error, NoisewiseError):
            _log.error("not taking part: %s", error)
        else:
            _log.exception("not taking part: an error of this software or of this machine")
        if notes is not None:
            note_refusal(notes, error, round_number=asked_round(message))
        return _refusal(message)
    return Message(made, reply_to=message)


def _update_content(site: Site, asked: RecordDict) -> RecordDict:
    layout = ParameterLayout.of(site.model)
    instruction = read_instruction(asked, layout, site.config.limits)
    made = RecordDict({"delta": to_record(layout, site_reply(site, instruction))})
    _log.info("round %d: a noised update is sent", instruction.round)
    return made


def _refusal(message: Message) -> Message:
    return Message(Error(REFUSED, NOT_TAKING_PART), reply_to=message)


def site_reply(site: Site, instruction: Instruction) -> Tensor:
    """Reserve, train, seal: the noised update [p] as the ledger stored it.

    Raises:
        LedgerError: the budget is spent, or the ledger cannot be trusted.
    """
    layout = ParameterLayout.of(site.model)
    normalise = site.config.training.normalise
    digest = instruction.digest(layout, site.plan, normalise)
    engine = IsolatedGradients(site.model, site.loss)
    engine.prepare(instruction.theta, site.record_form)  # before any record is read
    data = site.data()  # before the ledger is asked: a missing file must not cost a round
    _warn_of_size(site, len(data))
    with site.open_ledger() as ledger:
        granted = ledger.reserve(digest, site.plan, at_most=site.rounds_allowed)
        if isinstance(granted, SealedReply):
            _log.info(
                "round %d was answered before: the stored reply of an identical instruction is "
                "sent again; no budget is charged",
                instruction.round,
            )
            return decode(granted.reply)["delta"]
        made = local_update(
            site.model,
            instruction.theta,
            data,
            site.plan,
            instruction.learning_rate,
            site.loss,
            SecureRandom(),
            physical_batch=site.config.training.physical_batch,
            engine=engine,
        )
        delta = per_step(made.delta, site.plan) if normalise else made.delta
        return decode(ledger.seal(granted, encode({"delta": delta.contiguous()})))["delta"]


def _warn_of_size(site: Site, found: int) -> None:
    planned = site.config.data.records
    if abs(found - planned) > FAR * planned:
        _log.warning("data.records = %d in the plan, but there are %d records", planned, found)
