"""Random generators of the data part: one independent stream for each (seed, purpose)."""

from __future__ import annotations

import numpy as np

from noisewise.checks import non_negative_int

__all__ = ["generator"]


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator of ``purpose`` under ``seed``.

    Streams of different purposes (or keys, such as a client's number) are independent, so that the
    epsilons and the batch sizes drawn under one seed are not correlated. No global state is used.

    Args:
        seed: the run's seed, a whole number >= 0.
        purpose: what the numbers are for, such as ``"partition"``.
        *keys: further whole numbers >= 0 that tell streams of one purpose apart.
    """
    seed = non_negative_int("seed", seed)
    name = int.from_bytes(purpose.encode(), "little")
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(name, *keys)))
