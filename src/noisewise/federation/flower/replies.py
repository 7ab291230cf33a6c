"""What a server takes from a site's reply: an update or a noised accuracy, every claim checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from noisewise.aggregation.screening import update_fault
from noisewise.errors import UpdateError
from noisewise.federation.flower.records import read_theta
from noisewise.training.parameters import ParameterLayout

__all__ = [
    "ARRAYS",
    "CONFIG",
    "DELTA",
    "METRICS",
    "NOISED_ACCURACY",
    "Fault",
    "NoReplyError",
    "read_noised_accuracy",
    "read_update",
    "reading",
]

ARRAYS, DELTA, CONFIG, METRICS = "arrays", "delta", "config", "metrics"
"""Names of the records: parameters, their change, the server's instruction, a noised figure."""

NOISED_ACCURACY = "noised-accuracy"
"""Name of the figure."""

LOWEST, HIGHEST = -1.0, 2.0
"""What is taken for a noised accuracy: its noise deviates by at most 1/4 (see `MetricsPart`)."""


class NoReplyError(UpdateError):
    """The site does not take part or its reply was lost: nothing that counts against the site."""


@dataclass(frozen=True)
class Fault:
    """What was wrong with a reply that could not be read at all.

    Attributes:
        reason: in one line, of bounded length; no text of a site.
        counts: whether the site is certainly to blame.
    """

    reason: str
    counts: bool = True


@contextmanager
def reading() -> Iterator[None]:
    """Turn whatever a reply raises into an `UpdateError` that holds no text of the site.

    A decorator of functions that read a reply.
    """
    try:
        yield
    except UpdateError:
        raise
    except Exception as error:
        name = type(error).__name__[:60]
        raise UpdateError(f"sent what cannot be read ({name})") from None


@reading()
def read_update(
    reply: Message | Fault, number: int, layout: ParameterLayout, theta: Tensor, normalise: bool
) -> Tensor:
    """The update [p] of a reply.

    Args:
        reply: or what was wrong with it.
        number: of the round.
        layout: of the model.
        theta: [p] what clients started from.
        normalise: whether updates are divided by their steps.

    Raises:
        NoReplyError: there is no reply to read.
        UpdateError: whatever is wrong with it, in one line.
    """
    records = _content(reply, number, "update").array_records
    if len(records) != 1 or next(iter(records)) not in (DELTA, ARRAYS):
        names = [str(name)[:20] for name in list(records)[:3]]
        raise UpdateError(f"sent the array records {names}, expected {DELTA!r} or {ARRAYS!r}")
    (name, record), *_ = records.items()
    update = read_theta(record, layout)
    if name == ARRAYS:
        if normalise:
            raise UpdateError("sent parameters where updates divided by their steps are needed")
        update -= theta
    fault = update_fault(update, len(theta), torch.float32)
    if fault is not None:
        raise UpdateError(fault)
    return update


@reading()
def read_noised_accuracy(reply: Message | Fault, number: int) -> float:
    """The noised accuracy of a reply; see `read_update`.

    Raises:
        NoReplyError: there is no reply to read.
        UpdateError: whatever is wrong with it, in one line.
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
    if type(value) is not float or not math.isfinite(value) or not LOWEST <= value <= HIGHEST:
        raise UpdateError(f"sent {str(value)[:40]}, expected a number in [{LOWEST:g}, {HIGHEST:g}]")
    return value


def _content(reply: Message | Fault, number: int, what: str) -> RecordDict:
    if isinstance(reply, Fault):
        raise (UpdateError if reply.counts else NoReplyError)(reply.reason)
    if reply.has_error():
        raise NoReplyError(f"gave no {what} (code {reply.error.code})")
    if reply.metadata.group_id not in ("", str(number)):
        raise UpdateError(f"answered round {str(reply.metadata.group_id)[:20]!r}")
    return reply.content
