"""What one entry costs, and the names by which a ledger knows instructions and datasets."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan

__all__ = [
    "Charge",
    "Purpose",
    "charge_of",
    "check_hash",
    "dataset_fingerprint",
    "instruction_hash",
    "metrics_charge",
    "training_charge",
]

Purpose = Literal["training", "metrics"]


@dataclass(frozen=True)
class Charge:
    """Steps of the Poisson-subsampled Gaussian mechanism that one reply costs.

    Attributes:
        purpose: ``training``, or ``metrics`` for noised figures about the data.
        sample_rate: q.
        noise_multiplier: z, noise deviation over what one record can change.
        steps: a whole number.
    """

    purpose: Purpose
    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if self.purpose not in get_args(Purpose):
            allowed = f"must be one of {', '.join(get_args(Purpose))}"
            raise InvalidValueError("purpose", self.purpose, allowed)
        # Plain numbers: a numpy scalar would be stored in the database as bytes.
        object.__setattr__(self, "sample_rate", fraction("sample_rate", self.sample_rate))
        noise = positive_number("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        object.__setattr__(self, "steps", positive_int("steps", self.steps))


def training_charge(plan: LocalPlan) -> Charge:
    """One round of a plan. The plan's own budget plays no part: the ledger keeps the site's."""
    if not plan.is_private:
        raise InvalidValueError("plan", "without noise", "a ledger grants only plans with noise")
    return Charge("training", plan.sample_rate, plan.noise_multiplier, plan.steps_per_round)


def charge_of(cost: object) -> Charge:
    """The charge that is asked for, checked anew: an object that was tampered with is refused."""
    if isinstance(cost, LocalPlan):
        return training_charge(cost)
    if not isinstance(cost, Charge):
        raise InvalidValueError("cost", type(cost).__name__, "must be a LocalPlan or a Charge")
    return Charge(cost.purpose, cost.sample_rate, cost.noise_multiplier, cost.steps)


def metrics_charge(noise_multiplier: float, releases: int = 1) -> Charge:
    """Figures about all records with Gaussian noise: q = 1, no amplification by sampling.

    Args:
        noise_multiplier: z, deviation of the noise over the L2 change that one record can make to
            all figures released together.
        releases: how often that is done.
    """
    return Charge("metrics", 1.0, noise_multiplier, releases)


def instruction_hash(*parts: bytes) -> str:
    """SHA-256 of a whole instruction, part by part, so that no two instructions run together.

    Example:
        >>> instruction_hash(b"ab", b"c") == instruction_hash(b"a", b"bc")
        False
    """
    digest = hashlib.sha256(b"noisewise-instruction-1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def dataset_fingerprint(*arrays: NDArray[np.generic]) -> str:
    """SHA-256 of a dataset's arrays with their shapes and types: an id that cannot be mixed up.

    It belongs on the site only. Whoever can guess all records can confirm the guess with it.
    """
    digest = hashlib.sha256(b"noisewise-dataset-1")
    for array in arrays:
        plain = np.ascontiguousarray(array)
        digest.update(f"{plain.dtype.str} {plain.shape};".encode())
        digest.update(plain.data.cast("B") if plain.size else b"")
    return digest.hexdigest()


def check_hash(field: str, value: object) -> str:
    """Return ``value`` if it is a SHA-256 in lower-case hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise InvalidValueError(field, value, "must be 64 hexadecimal digits (a SHA-256)")
    return value
