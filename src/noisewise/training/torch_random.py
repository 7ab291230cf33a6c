"""`torch_seed`: seeds torch's global generator for a block of code, then restores it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["torch_seed"]

_lock = threading.RLock()


@contextlib.contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generator that layers such as dropout use on one device, and restore it at the end.

    It does the same as `torch.random.fork_rng` with `torch.manual_seed`, which take ten times as
    long because they handle every kind of device. The generator is shared by the whole process, so
    only one thread at a time is inside of the block.

    Args:
        seed: of the generator.
        device: its generator is seeded besides the CPU's.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    with _lock:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
