"""What a transport may pass to a site: plain requests, of which nothing is checked yet.

This file needs no torch, so that a relay without torch can make requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Instruction", "Question"]


@dataclass(frozen=True)
class Instruction:
    """An instruction to train, as a transport received it. Nothing in it is checked yet.

    Attributes:
        round: counted from 1.
        learning_rate: eta.
        parameters: arrays by the names of the model's parameters.
    """

    round: object
    learning_rate: object
    parameters: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Question:
    """A question for the noised score, as a transport received it; see `Instruction`."""

    round: object
    parameters: Mapping[str, NDArray[np.float32]]
