"""What one entry of a ledger costs, and the hashes that identify instructions and datasets."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
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
    "check_software",
    "dataset_fingerprint",
    "instruction_hash",
    "metrics_charge",
    "training_charge",
]

Purpose = Literal["training", "metrics"]

_FEDERATION = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Charge:
    """Steps of the Poisson-subsampled Gaussian mechanism that one reply costs.

    Attributes:
        purpose: ``training``, or ``metrics`` for noised figures about the data.
        sample_rate: q.
        noise_multiplier: z, deviation of the noise divided by the change that one record can make.
        steps: number of steps.
        federation: that asked for it, as the site names it; empty if the site serves only one.

    Raises:
        InvalidValueError: a value is out of range.
    """

    purpose: Purpose
    sample_rate: float
    noise_multiplier: float
    steps: int
    federation: str = ""

    def __post_init__(self) -> None:
        if self.purpose not in get_args(Purpose):
            allowed = f"must be one of {', '.join(get_args(Purpose))}"
            raise InvalidValueError("purpose", self.purpose, allowed)
        if self.federation and not _FEDERATION.fullmatch(self.federation):
            allowed = "must be at most 32 of a-z, 0-9, _ and -, and begin with a letter or digit"
            raise InvalidValueError("federation", self.federation[:40], allowed)
        # Python numbers: SQLite would store a numpy scalar as bytes.
        object.__setattr__(self, "sample_rate", fraction("sample_rate", self.sample_rate))
        noise = positive_number("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        object.__setattr__(self, "steps", positive_int("steps", self.steps))

    @property
    def mechanism(self) -> tuple[float, float, int]:
        """(sample_rate, noise_multiplier, steps), as accountants take them."""
        return self.sample_rate, self.noise_multiplier, self.steps

    @property
    def label(self) -> str:
        """Purpose and federation as ledgers on disk hold them: ``training`` or ``training@ward``.

        Example:
            >>> Charge("training", 0.01, 2.0, 100, "ward").label
            'training@ward'
        """
        return f"{self.purpose}@{self.federation}" if self.federation else self.purpose

    @classmethod
    def of_label(cls, label: str, rate: float, noise_multiplier: float, steps: int) -> Charge:
        """The charge with this `label`."""
        purpose, _, federation = str(label).partition("@")
        charge = cls(purpose, rate, noise_multiplier, steps, federation)  # type: ignore[arg-type]
        if charge.label != label:
            raise InvalidValueError("purpose", label[:40], "must be PURPOSE or PURPOSE@FEDERATION")
        return charge


def training_charge(plan: LocalPlan) -> Charge:
    """The charge of one round of a plan.

    The plan's own budget is not used: the ledger enforces the site's budget.

    Raises:
        InvalidValueError: the plan has no noise.
    """
    if not plan.is_private:
        raise InvalidValueError("plan", "without noise", "must have noise to be charged")
    return Charge("training", plan.sample_rate, plan.noise_multiplier, plan.steps_per_round)


def charge_of(cost: object) -> Charge:
    """The charge of a plan's round, or a copy of a charge whose values are checked again."""
    if isinstance(cost, LocalPlan):
        return training_charge(cost)
    if not isinstance(cost, Charge):
        raise InvalidValueError("cost", type(cost).__name__, "must be a LocalPlan or a Charge")
    return replace(cost)


def metrics_charge(noise_multiplier: float, releases: int = 1) -> Charge:
    """The charge of figures about all records with Gaussian noise: q = 1, without sampling.

    Args:
        noise_multiplier: z, deviation of the noise divided by the L2 change that one record can
            make to all figures released together.
        releases: number of releases.
    """
    return Charge("metrics", 1.0, noise_multiplier, releases)


def instruction_hash(*parts: bytes) -> str:
    """SHA-256 of a whole instruction; the length of each part is hashed too.

    Args:
        *parts: everything that the client receives, as bytes.

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
    """SHA-256 of a dataset's arrays with their shapes and types, to use as a dataset's id.

    It must not leave the site: an attacker who can guess all records can confirm the guess with it.
    """
    digest = hashlib.sha256(b"noisewise-dataset-1")
    for array in arrays:
        plain = np.ascontiguousarray(array)
        digest.update(f"{plain.dtype.str} {plain.shape};".encode())
        digest.update(plain.data.cast("B") if plain.size else b"")
    return digest.hexdigest()


def check_hash(field: str, value: object) -> str:
    """Return ``value`` if it is a SHA-256 in lower-case hexadecimal digits.

    Raises:
        InvalidValueError: it is not.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise InvalidValueError(field, value, "must be 64 hexadecimal digits (a SHA-256)")
    return value


def check_software(value: object) -> str:
    """Return ``value`` if it can name the software that makes an entry.

    Raises:
        InvalidValueError: it cannot.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,200}", value):
        raise InvalidValueError("software", str(value)[:40], "must be 1 to 200 printable letters")
    return value
