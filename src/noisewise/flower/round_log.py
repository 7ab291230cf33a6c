"""What a server reports about a round: a line in its log, and the metrics of Flower's result."""

from __future__ import annotations

import logging
import math

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from noisewise.federation.round_record import RoundRecord
from noisewise.federation.task_info import TaskInfo
from noisewise.flower.wire import NOISED_ACCURACY

__all__ = ["note_round"]

_log = logging.getLogger(__name__)


def note_round(record: RoundRecord, task: TaskInfo, result: Result) -> None:
    """Add a round's scores to Flower's result, and log the round.

    Args:
        record: of the round.
        task: its main metric is logged; all of its metrics go into the result.
        result: of Flower's run.
    """
    noised, main = record.mean_noised_accuracy, task.main
    public = {metric.name: record.figure(metric.name) for metric in task.metrics}
    public = {name: value for name, value in public.items() if math.isfinite(value)}
    if public:
        result.evaluate_metrics_serverapp[record.round] = MetricRecord(dict(public))
    if math.isfinite(noised):
        result.evaluate_metrics_clientapp[record.round] = MetricRecord({NOISED_ACCURACY: noised})
    _log.info(
        "round %d: %d updates used, %d not; %s on public records %s%s",
        record.round,
        len(record.used),
        len(record.dropped),
        main.name,
        main.text(public[main.name]) if main.name in public else "not measured",
        f"; noised score of sites {100 * noised:.1f} %" if math.isfinite(noised) else "",
    )
