"""Sources of randomness: streams keyed by (seed, round, client, purpose), or the system's.

No global generator is read or set. A keyed stream does not depend on what ran before it, so a
result depends neither on the order of the clients nor on the number of workers, and a resumed run
is bit-identical. A deployed client uses `SecureRandom`, which cannot be seeded.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError

__all__ = ["RandomSource", "SecureRandom", "SeededRandom", "keyed_generator", "keyed_seed"]


def _digest(seed: int, parts: tuple[object, ...]) -> bytes:
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in parts)])
    return hashlib.sha256(text.encode()).digest()


def keyed_seed(seed: int, *parts: object) -> int:
    """Return a 63-bit seed for ``parts``, for libraries that accept only an integer."""
    return int.from_bytes(_digest(seed, parts)[:8], "little") >> 1


def keyed_generator(seed: int, *parts: object) -> np.random.Generator:
    """Return a counter-based generator (Philox) for one purpose.

    Args:
        seed: seed of the run.
        parts: what the numbers are for, for example the round and the client. Equal parts give
            equal numbers; different parts give independent numbers.

    Example:
        >>> one = keyed_generator(0, "round", 3).standard_normal()
        >>> one == keyed_generator(0, "round", 3).standard_normal()
        True
        >>> one == keyed_generator(0, "round", 4).standard_normal()
        False
    """
    key = int.from_bytes(_digest(seed, parts)[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


class RandomSource(Protocol):
    """The randomness of one client in one round."""

    def poisson_sample(self, step: int, size: int, rate: float) -> NDArray[np.int64]:
        """Return the indices of a Poisson sample: each record with probability ``rate``."""
        ...

    def record_order(self, step: int, person: int, size: int) -> NDArray[np.int64]:
        """Return a random order of the ``size`` records of one person in one step."""
        ...

    def normal(self, step: int, size: int) -> NDArray[np.floating[Any]]:
        """Return independent standard normal numbers for the noise of one step."""
        ...

    def model_seed(self) -> int:
        """Return a seed for layers that draw random numbers (dropout). It protects no record."""
        ...


_BLOCK = 1 << 14  # this many numbers fit into the processor's cache


def _box_muller(source: np.random.BitGenerator, size: int) -> NDArray[np.float32]:
    """Return standard normal numbers by Box and Muller's transform, in float32 and in blocks.

    The radius is computed from 32 random bits, so the numbers reach 6.7 standard deviations. For a
    small model the noise takes most of the time of a step; vectorised logarithms and cosines are
    faster than numpy's ziggurat, which computes one number at a time.
    """
    normals = np.empty(size + size % 2, dtype=np.float32)
    for start in range(0, len(normals), _BLOCK):
        part = normals[start : start + _BLOCK]
        half = len(part) // 2
        bits = np.asarray(source.random_raw(half)).view(np.uint32)
        uniform = bits.astype(np.float32)
        uniform += np.float32(0.5)
        uniform *= np.float32(2.0**-32)
        radius, angle = uniform[:half], uniform[half:]
        np.log(radius, out=radius)
        radius *= np.float32(-2.0)
        np.sqrt(radius, out=radius)
        angle *= np.float32(2.0 * np.pi)
        np.cos(angle, out=part[:half])
        np.sin(angle, out=part[half:])
        part[:half] *= radius
        part[half:] *= radius
    return normals[:size]


@dataclass(frozen=True)
class SeededRandom:
    """Reproducible randomness for the simulator. A deployment must not use it.

    Sampling and noise use separate streams, and so does each step: removing the last record of a
    dataset changes neither the noise nor which other records are sampled. A step is a position of
    the stream's 256-bit counter, so jumping to a step takes no time.

    Attributes:
        seed: seed of the run.
        round: number of the round, from 1.
        client: id of the client.
    """

    seed: int
    round: int
    client: str
    _streams: dict[str, tuple[np.random.Generator, dict[str, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _generator(self, purpose: str, step: int, person: int = 0) -> np.random.Generator:
        if purpose not in self._streams:
            stream = keyed_generator(self.seed, self.round, self.client, purpose)
            self._streams[purpose] = stream, dict(stream.bit_generator.state)
        generator, state = self._streams[purpose]
        state["state"]["counter"][:] = (0, person, step, 0)
        generator.bit_generator.state = state
        return generator

    def poisson_sample(self, step: int, size: int, rate: float) -> NDArray[np.int64]:
        """See `RandomSource`."""
        return np.flatnonzero(self._generator("sampling", step).random(size) < rate)

    def record_order(self, step: int, person: int, size: int) -> NDArray[np.int64]:
        """See `RandomSource`."""
        return self._generator("records of a person", step, person).permutation(size)

    def normal(self, step: int, size: int) -> NDArray[np.float32]:
        """See `RandomSource`. Three times as fast as numpy's normal numbers (see `_box_muller`)."""
        return _box_muller(self._generator("noise", step).bit_generator, size)

    def model_seed(self) -> int:
        """See `RandomSource`."""
        return keyed_seed(self.seed, self.round, self.client, "model")


class SecureRandom:
    """Randomness of the operating system's cryptographic generator, new at every call.

    Args:
        seed: must be None. Whoever knows a seed can compute the noise and subtract it.

    Raises:
        InvalidValueError: a seed is given.
    """

    def __init__(self, seed: None = None) -> None:
        if seed is not None:
            raise InvalidValueError(
                "seed",
                seed,
                "must be None: whoever knows the seed of a deployed client can remove its noise",
            )

    def _uniform(self, size: int) -> NDArray[np.float64]:
        """Return uniform numbers in (0, 1], each from 53 random bits."""
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        return ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def poisson_sample(self, step: int, size: int, rate: float) -> NDArray[np.int64]:
        """See `RandomSource`. ``step`` has no effect."""
        return np.flatnonzero(self._uniform(size) <= rate)

    def record_order(self, step: int, person: int, size: int) -> NDArray[np.int64]:
        """See `RandomSource`. ``step`` and ``person`` have no effect."""
        return np.argsort(self._uniform(size))

    def normal(self, step: int, size: int) -> NDArray[np.float64]:
        """See `RandomSource`. Box and Muller's transform of uniform numbers."""
        half = (size + 1) // 2
        radius = np.sqrt(-2.0 * np.log(self._uniform(half)))
        angle = 2.0 * np.pi * self._uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]

    def model_seed(self) -> int:
        """See `RandomSource`."""
        return int.from_bytes(os.urandom(8), "little") >> 1
