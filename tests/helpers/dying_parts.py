"""A loss that lets a test kill the process that computes it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor
from torch.nn.functional import cross_entropy

VARIABLE = "NOISEWISE_TEST_VICTIM"


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy. The first process that finds the file ``armed`` waits to be killed.

    It renames the file to ``victim-PID`` with its process id.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (Path(folder) / "armed").exists():
        try:
            os.rename(Path(folder) / "armed", Path(folder) / f"victim-{os.getpid()}")
        except FileNotFoundError:
            pass  # another process renamed the file first
        else:
            time.sleep(60)
    return cross_entropy(outputs, targets)
