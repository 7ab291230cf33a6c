"""What a server takes from a site's reply: an update or a noised accuracy, every claim checked."""

from __future__ import annotations

import math

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
    "read_noised_accuracy",
    "read_update",
]

ARRAYS, DELTA, CONFIG, METRICS = "arrays", "delta", "config", "metrics"
"""Names of the records: parameters, their change, the server's instruction, a noised figure."""

NOISED_ACCURACY = "noised-accuracy"
"""Name of the figure."""

LOWEST, HIGHEST = -1.0, 2.0
"""What is taken for a noised accuracy: its noise deviates by at most 1/4 (see `MetricsPart`)."""


def read_update(
    reply: Message | str, number: int, layout: ParameterLayout, theta: Tensor, normalise: bool
) -> Tensor:
    """The update [p] of a reply.

    Args:
        reply: or what went wrong with it.
        number: of the round.
        layout: of the model.
        theta: [p] what clients started from.
        normalise: whether updates are divided by their steps.

    Raises:
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


def read_noised_accuracy(reply: Message | str, number: int) -> float:
    """The noised accuracy of a reply; see `read_update`.

    Raises:
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


def _content(reply: Message | str, number: int, what: str) -> RecordDict:
    if isinstance(reply, str):
        raise UpdateError(reply)
    if reply.has_error():
        raise UpdateError(f"gave no {what} (code {reply.error.code})")
    if reply.metadata.group_id not in ("", str(number)):
        raise UpdateError(f"answered round {str(reply.metadata.group_id)[:20]!r}")
    return reply.content
