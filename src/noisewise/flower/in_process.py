"""The answers of a site's own file, in the process of the Flower client.

For simulations and trials: code that the server ships runs in the same process and under the same
account as the records. A deployment uses a vault (`noisewise.flower.relay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question

__all__ = ["InProcessAnswers"]


class InProcessAnswers:
    """The answers of `noisewise.site.interface`.

    Args:
        find_file: returns the path of the site's file.
    """

    def __init__(self, find_file: Callable[[], Path]) -> None:
        self._find_file = find_file

    def update(
        self, read: Callable[[], Instruction], asked_round: object
    ) -> Mapping[str, NDArray[np.float32]] | None:
        """See `answer_instruction`."""
        return answer_instruction(self._find_file, read, asked_round)

    def accuracy(self, read: Callable[[], Question], asked_round: object) -> float | None:
        """See `answer_question`."""
        return answer_question(self._find_file, read, asked_round)

    def declaration(self) -> dict[str, str | float] | None:
        """See `answer_declaration`."""
        declared = answer_declaration(self._find_file)
        return None if declared is None else asdict(declared)
