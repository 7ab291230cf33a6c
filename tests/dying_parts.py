"""A loss whose process waits to be killed once, when a test asks for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor
from torch.nn.functional import cross_entropy

VARIABLE = "NOISEWISE_TEST_VICTIM"


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy. The first process that finds the file ``armed`` says who it is and waits."""
    folder = os.environ.get(VARIABLE)
    if folder and (Path(folder) / "armed").exists():
        try:
            os.rename(Path(folder) / "armed", Path(folder) / f"victim-{os.getpid()}")
        except FileNotFoundError:
            pass  # another process was faster
        else:
            time.sleep(60)
    return cross_entropy(outputs, targets)
