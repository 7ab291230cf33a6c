"""A site's side of the wire: plain requests from Flower's messages, Flower's records from answers.

Which records and keys a message holds is checked here, against the list of what is allowed. Their
values are checked by `noisewise.site.instruction`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.flower.arrays import DecodedArrays, array_record
from noisewise.flower.wire import (
    ARRAYS,
    CONFIG,
    DECLARATION,
    DELTA,
    LEARNING_RATE,
    METRICS,
    NOISED_ACCURACY,
    ROUND,
)
from noisewise.site.requests import Instruction, Question

__all__ = [
    "accuracy_content",
    "asked_round",
    "check_empty",
    "declaration_content",
    "read_instruction",
    "read_question",
    "update_content",
]


def read_instruction(content: RecordDict) -> Instruction:
    """The instruction of a message to train.

    Raises:
        InvalidValueError: a record or key is missing or not allowed.
    """
    config = _config(content, (LEARNING_RATE, ROUND))
    parameters = DecodedArrays(content.array_records[ARRAYS])
    return Instruction(config[ROUND], config[LEARNING_RATE], parameters)


def read_question(content: RecordDict) -> Question:
    """The question of a message to evaluate; see `read_instruction`."""
    config = _config(content, (ROUND,))
    return Question(config[ROUND], DecodedArrays(content.array_records[ARRAYS]))


def check_empty(content: RecordDict) -> None:
    """Check a question for the declaration.

    Raises:
        InvalidValueError: it holds a record.
    """
    if len(content):
        names = [str(name)[:20] for name in list(content)[:5]]
        raise InvalidValueError("records", names, "must be empty: this request has no content")


def asked_round(message: Message) -> object:
    """The round that a message names, for a site's notes; None if it names none."""
    try:
        return message.content.config_records[CONFIG][ROUND]
    except Exception:  # whatever the server sent
        return None


def update_content(update: Mapping[str, NDArray[np.float32]]) -> RecordDict:
    """The content of a reply with a noised update."""
    return RecordDict({DELTA: array_record(update)})


def accuracy_content(accuracy: float) -> RecordDict:
    """The content of a reply with a noised score."""
    return RecordDict({METRICS: MetricRecord({NOISED_ACCURACY: accuracy})})


def declaration_content(declared: Mapping[str, str | float]) -> RecordDict:
    """The content of a reply with the fields of a declaration."""
    return RecordDict({DECLARATION: ConfigRecord(dict(declared))})


def _config(content: RecordDict, allowed: tuple[str, ...]) -> ConfigRecord:
    """The config record of a message that has exactly these keys and an arrays record."""
    names = sorted(str(name)[:20] for name in content)
    if names != [ARRAYS, CONFIG] or [*content.array_records] != [ARRAYS]:
        words = f"must be {ARRAYS} and {CONFIG}, nothing else"
        raise InvalidValueError("records", names[:5], words)
    if [*content.config_records] != [CONFIG]:
        raise InvalidValueError(CONFIG, "other", "must be a config record")
    config = content.config_records[CONFIG]
    keys = tuple(sorted(str(key) for key in config))
    if keys != allowed:
        words = f"must hold {' and '.join(allowed)} only"
        raise InvalidValueError(CONFIG, [key[:20] for key in keys[:5]], words)
    return config
