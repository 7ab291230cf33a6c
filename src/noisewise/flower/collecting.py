"""Collect the replies of a round: keep usable ones, note a reason for each other one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

from flwr.app import Message, MessageType

from noisewise.aggregation.drop_reason import DropKind, DropReason
from noisewise.errors import UpdateError
from noisewise.federation.spool import Spool
from noisewise.flower.bad_replies import BadReplies
from noisewise.flower.replies import (
    Fault,
    NoReplyError,
    OpenRound,
    read_noised_accuracy,
    read_update,
)

__all__ = ["Replies", "collect_accuracies", "collect_updates"]

Replies = Iterable[tuple[int, Message | Fault]]
"""(node that was asked, its reply or what was wrong with it), one at a time."""

_LARGE = 1_000_000
_log = logging.getLogger(__name__)


def collect_updates(
    replies: Replies,
    nodes: Iterable[int],
    open_round: OpenRound,
    spool: Spool,
    bad_replies: BadReplies,
) -> dict[str, str]:
    """Write each usable update to the spool when it arrives.

    Args:
        replies: from these nodes only.
        nodes: all nodes that were asked.
        open_round: the round that replies must answer.
        spool: receives the updates by client id.
        bad_replies: counts unusable replies.

    Returns:
        The clients without a usable update, and why.
    """
    silent = DropReason(f"did not answer in round {open_round.number}", DropKind.SILENT)
    absent: dict[str, str] = {str(node): silent for node in nodes}
    for node, reply in replies:
        client = str(node)
        if client in spool:
            _log.warning(
                "round %d: client %s sent a second reply; it is ignored", open_round.number, client
            )
            continue
        try:
            spool.add(client, read_update(reply, open_round))
            bad_replies.reset(MessageType.TRAIN, node)
            del absent[client]
        except NoReplyError as error:
            absent[client] = DropReason.of(error)
        except UpdateError as error:
            more = bad_replies.count(MessageType.TRAIN, node)
            absent[client] = DropReason.of(error, more)
        del reply
        if open_round.layout.size > _LARGE:
            gc.collect()  # Flower's messages refer to themselves and would stay in memory
    return absent


def collect_accuracies(replies: Replies, number: int, bad_replies: BadReplies) -> dict[str, float]:
    """Noised scores by client id; a site that sends none, or an invalid one, is left out.

    Args:
        replies: from nodes that were asked.
        number: of the round.
        bad_replies: counts unusable replies.
    """
    accuracies: dict[str, float] = {}
    for node, reply in replies:
        try:
            accuracies.setdefault(str(node), read_noised_accuracy(reply, number))
        except UpdateError as error:
            _log.info("round %d: no noised score from client %s: it %s", number, node, error)
            if not isinstance(error, NoReplyError):
                bad_replies.count(MessageType.EVALUATE, node)
        else:
            bad_replies.reset(MessageType.EVALUATE, node)
    return dict(sorted(accuracies.items()))
