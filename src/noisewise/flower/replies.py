"""Read an update or a noised score from a site's reply, and check everything in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from noisewise.aggregation.drop_reason import DropKind, DropReason
from noisewise.aggregation.screening import update_fault
from noisewise.errors import UpdateError
from noisewise.flower.parameter_records import read_theta
from noisewise.flower.wire import (
    ARRAYS,
    DELTA,
    HIGHEST_ACCURACY,
    LOWEST_ACCURACY,
    METRICS,
    NODE_UNAVAILABLE,
    NOISED_ACCURACY,
    REFUSED,
)
from noisewise.training.parameters import ParameterLayout

__all__ = [
    "Fault",
    "NoReplyError",
    "OpenRound",
    "read_noised_accuracy",
    "read_update",
    "reading",
]


_KINDS = {REFUSED: DropKind.REFUSED, NODE_UNAVAILABLE: DropKind.LOST}


class NoReplyError(UpdateError):
    """The site does not take part or its reply was lost: this is no unusable reply."""


@dataclass(frozen=True)
class Fault:
    """Why a reply could not be fetched or decoded.

    Attributes:
        reason: one line of bounded length, without any text of the site.
        counts: whether it counts as an unusable reply: the site certainly caused it.
    """

    reason: str
    counts: bool = True


@contextmanager
def reading() -> Iterator[None]:
    """Turn every exception into an `UpdateError` without any text of the site.

    A decorator for functions that read a reply.
    """
    try:
        yield
    except UpdateError:
        raise
    except Exception as error:
        name = type(error).__name__[:60]
        raise UpdateError(f"sent a reply that cannot be read ({name})") from None


@dataclass(frozen=True)
class OpenRound:
    """What the updates of a round must match.

    Attributes:
        number: of the round.
        layout: of the model.
        theta: [p] the parameters that clients started from.
        normalise: whether clients divide updates by their number of steps.
    """

    number: int
    layout: ParameterLayout
    theta: Tensor
    normalise: bool


@reading()
def read_update(reply: Message | Fault, open_round: OpenRound) -> Tensor:
    """The update [p] of a reply. It passes `update_fault` and needs no second screening.

    Args:
        reply: of a site, or why there is none.
        open_round: the round that the reply must answer.

    Raises:
        NoReplyError: there is no reply to read.
        UpdateError: what is wrong with the reply, in one line.
    """
    records = _content(reply, open_round.number, "update").array_records
    if len(records) != 1 or next(iter(records)) not in (DELTA, ARRAYS):
        names = [str(name)[:20] for name in list(records)[:3]]
        raise _other_form(f"sent the array records {names}, expected {DELTA!r} or {ARRAYS!r}")
    (name, record), *_ = records.items()
    try:
        update = read_theta(record, open_round.layout)
    except UpdateError as error:
        raise _other_form(str(error)) from None
    if name == ARRAYS:
        if open_round.normalise:
            raise _other_form("sent parameters, but updates divided by their steps are needed")
        update -= open_round.theta
    fault = update_fault(update, open_round.layout.size, torch.float32)
    if fault is not None:
        raise UpdateError(fault)
    return update


@reading()
def read_noised_accuracy(reply: Message | Fault, number: int) -> float:
    """The noised score of a reply.

    Args:
        reply: of a site, or why there is none.
        number: of the round that the reply must answer.

    Raises:
        NoReplyError: there is no reply to read.
        UpdateError: what is wrong with the reply, in one line.
    """
    content = _content(reply, number, "metric")
    names = [str(name)[:20] for name in list(content)[:3]]
    if names != [METRICS] or [*content.metric_records] != [METRICS]:
        raise UpdateError(f"sent the records {names}, expected {METRICS!r}")
    record = content.metric_records[METRICS]
    keys = [str(key)[:20] for key in list(record)[:3]]
    if keys != [NOISED_ACCURACY]:
        raise UpdateError(f"sent the metrics {keys}, expected {NOISED_ACCURACY!r}")
    value = record[NOISED_ACCURACY]
    low, high = LOWEST_ACCURACY, HIGHEST_ACCURACY
    if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
        raise UpdateError(f"sent {str(value)[:40]}, expected a number in [{low:g}, {high:g}]")
    return value


def _other_form(text: str) -> UpdateError:
    return UpdateError(DropReason(text, DropKind.OTHER_FORM))


def _content(reply: Message | Fault, number: int, what: str) -> RecordDict:
    if isinstance(reply, Fault):
        raise (UpdateError if reply.counts else NoReplyError)(reply.reason)
    if reply.has_error():
        code = reply.error.code
        kind = _KINDS.get(code, DropKind.FAILED)
        raise NoReplyError(DropReason(f"gave no {what} (code {code})", kind))
    if reply.metadata.group_id not in ("", str(number)):
        raise UpdateError(f"answered round {str(reply.metadata.group_id)[:20]!r}")
    return reply.content
