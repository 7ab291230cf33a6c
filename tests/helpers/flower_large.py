"""Aggregate 20 updates of 11.2 million parameters, and print the peak memory in MB.

python tests/helpers/flower_large.py FOLDER [PARAMETERS]
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flower_cases import LocalGrid
from flwr.app import Array, ArrayRecord, Message, RecordDict

from noisewise.aggregation.methods import make_method
from noisewise.flower.strategy import NoiseAware

SIZE, CLIENTS = int(sys.argv[2]) if len(sys.argv) > 2 else 11_200_000, 20


class LateGrid(LocalGrid):
    """Makes a reply only when the server pulls it, as with a SuperLink."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.seen))
            self.seen.append(message)
        return [message.metadata.message_id for message in self.seen]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (name,) = message_ids
        noise = np.random.default_rng(int(name)).standard_normal(SIZE, dtype=np.float32)
        arrays = ArrayRecord({"w": Array((1 + int(name)) * np.float32(0.01) * noise)})
        return [Message(RecordDict({"delta": arrays}), reply_to=self.seen[int(name)])]


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    before, began = peak(), time.perf_counter()
    method = make_method("NoiseWise", {"server_steps": 1.0})
    strategy = NoiseAware(
        method, learning_rate=0.1, folder=Path(sys.argv[1]), declaration_seconds=0
    )
    grid = LateGrid({k: lambda message: None for k in range(1, CLIENTS + 1)})
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}), 1)
    assert strategy.run is not None
    assert len(strategy.run.records[0].weights) == CLIENTS
    print(f"{peak() - before:.0f} MB more, {time.perf_counter() - began:.0f} s")
