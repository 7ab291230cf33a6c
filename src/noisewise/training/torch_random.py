"""Torch's own generator for a while: seeded, and afterwards as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["torch_seed"]

_turn = threading.RLock()


@contextlib.contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed what layers such as dropout draw from, on one device; then restore it.

    The same as `torch.random.fork_rng` and `torch.manual_seed`, which together take ten times as
    long: they prepare every kind of device that torch knows. The generator belongs to the whole
    process, so threads take turns.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    with _turn:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
