"""The wire schema: every name, code and bound of the messages between a server and its sites.

| type of the message | records of the question | records of the reply |
|---|---|---|
| Flower's ``train`` | `ARRAYS`, `CONFIG`: `ROUND` and `LEARNING_RATE` | `DELTA` or `ARRAYS` |
| Flower's ``evaluate`` | `ARRAYS`, `CONFIG`: `ROUND` | `METRICS`: `NOISED_ACCURACY` |
| `DECLARE` | none | `DECLARATION`: the fields of a `Declaration` |

A site that does not answer replies with the error `REFUSED`, `NOT_TAKING_PART`, whatever the reason
is. Both sides refuse a message with any other record or key. Names have hyphens, as Flower's do.
"""

from __future__ import annotations

import numpy as np
from flwr.app import MessageType

__all__ = [
    "ARRAYS",
    "ARRAY_TYPE",
    "CONFIG",
    "DECLARATION",
    "DECLARE",
    "DELTA",
    "HIGHEST_ACCURACY",
    "LEARNING_RATE",
    "LONGEST_HEADER",
    "LOWEST_ACCURACY",
    "METRICS",
    "NODE_UNAVAILABLE",
    "NOISED_ACCURACY",
    "NOT_TAKING_PART",
    "NPY_VERSIONS",
    "REFUSED",
    "ROUND",
]

DECLARATION = "declaration"
"""Flower's action of the question for a declaration, and the name of the reply's config record."""

DECLARE = f"{MessageType.QUERY}.{DECLARATION}"
"""Type of the question for a declaration: an app's own ``query`` function never receives it."""

ARRAYS = "arrays"
"""Array record: the model's parameters."""

DELTA = "delta"
"""Array record: the change of the parameters."""

CONFIG = "config"
"""Config record of a question."""

METRICS = "metrics"
"""Metric record of a reply."""

ROUND = "server-round"
"""Key of `CONFIG`: the round, an integer from 1 on."""

LEARNING_RATE = "learning-rate"
"""Key of `CONFIG`: the learning rate of local steps, a float."""

NOISED_ACCURACY = "noised-accuracy"
"""Key of `METRICS`: a float."""

LOWEST_ACCURACY, HIGHEST_ACCURACY = -1.0, 2.0
"""Bounds of a noised score. Its noise has a deviation of at most 1/4 (see `MetricsPart`)."""

REFUSED = 451
"""Code of the error reply; the same for every reason."""

NODE_UNAVAILABLE = 5
"""Code of Flower's error reply for a node that it lost."""

NOT_TAKING_PART = "not taking part"
"""Text of the error reply; the same for every reason."""

ARRAY_TYPE = np.dtype("<f4")
"""Type of every array; an array travels as the bytes of a ``.npy`` file."""

NPY_VERSIONS = ((1, 0), (2, 0))
"""Versions of the ``.npy`` format."""

LONGEST_HEADER = 4096
"""Bytes that a ``.npy`` header may take; numpy's own headers have 128."""
