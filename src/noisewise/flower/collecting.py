"""Collect the replies of a round: keep usable ones, note a reason for each other one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

from flwr.app import Message, MessageType

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
    replies: Replies, nodes: Iterable[int], asked: OpenRound, spool: Spool, bad_replies: BadReplies
) -> dict[str, str]:
    """Write each usable update to the spool when it arrives.

    Args:
        replies: from these nodes only.
        nodes: all nodes that were asked.
        asked: the round that replies must answer.
        spool: receives the updates by client id.
        bad_replies: counts unusable replies.

    Returns:
        The clients without a usable update, and why.
    """
    absent = {str(node): f"did not answer in round {asked.number}" for node in nodes}
    for node, reply in replies:
        client = str(node)
        if client in spool:
            _log.warning("round %d: client %s answered twice", asked.number, client)
            continue
        try:
            spool.add(client, read_update(reply, asked))
            bad_replies.reset(MessageType.TRAIN, node)
            del absent[client]
        except NoReplyError as error:
            absent[client] = str(error)
        except UpdateError as error:
            absent[client] = str(error) + bad_replies.count(MessageType.TRAIN, node)
        del reply
        if asked.layout.size > _LARGE:
            gc.collect()  # Flower's messages refer to themselves and would stay in memory
    return absent


def collect_accuracies(replies: Replies, number: int, bad_replies: BadReplies) -> dict[str, float]:
    """Noised accuracies by client id; a site that sends none, or an invalid one, is left out.

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
            _log.info("round %d: no noised accuracy from client %s: it %s", number, node, error)
            if not isinstance(error, NoReplyError):
                bad_replies.count(MessageType.EVALUATE, node)
        else:
            bad_replies.reset(MessageType.EVALUATE, node)
    return dict(sorted(accuracies.items()))
