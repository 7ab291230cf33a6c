"""`ClientSpec`: one client's own settings, the input of every plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from noisewise.checks import fraction, positive_int, positive_number, printable_name
from noisewise.errors import InvalidValueError

__all__ = ["UNITS", "ClientSpec", "Unit", "check_unit", "check_unit_name"]

Unit = Literal["record", "person"]
UNITS: tuple[Unit, ...] = get_args(Unit)
"""The units that a budget can protect: one record, or one person with all of their records."""


def check_unit_name(unit: object, name: str = "unit") -> None:
    """Check a unit of privacy.

    Args:
        unit: one of `UNITS`.
        name: of the field, for messages.

    Raises:
        InvalidValueError: names the field.
    """
    if unit not in UNITS:
        raise InvalidValueError(name, unit, f"must be one of {', '.join(UNITS)}")


def check_unit(unit: object, max_records: int | None, name: str = "") -> None:
    """Check a unit of privacy and the number of records of a person that a step uses.

    Args:
        unit: one of `UNITS`.
        max_records: required for persons, None for records.
        name: what precedes the fields' names in messages.

    Raises:
        InvalidValueError: names the field.
    """
    check_unit_name(unit, name + "unit")
    if unit == "person":
        positive_int(name + "max_records", max_records)
    elif max_records is not None:
        allowed = 'must be left out with unit = "record"'
        raise InvalidValueError(name + "max_records", max_records, allowed)


@dataclass(frozen=True)
class ClientSpec:
    """One client's own settings. Only the client needs to know them.

    Args:
        id: name of the client, unique in a federation.
        n_examples: N_i, the declared number of training records; with ``unit = "person"``, of
            persons.
        batch_size: b_i, the expected batch size of Poisson sampling; at most N_i.
        epsilon: epsilon_i, the client's own privacy budget.
        delta: delta_i of the same budget.
        local_epochs: K_i, passes over the data in a round.
        unit: what the budget protects, a record or a person with all of their records.
        max_records: the largest number of a person's records in a step; None for records.

    Raises:
        InvalidValueError: a value is not allowed; the message names the client and the field.

    Example:
        >>> ClientSpec("a", n_examples=2400, batch_size=32, epsilon=0.5, delta=1e-4).sample_rate
        0.013333333333333334
    """

    id: str
    n_examples: int
    batch_size: int
    epsilon: float
    delta: float
    local_epochs: int = 1
    unit: Unit = "record"
    max_records: int | None = None

    def __post_init__(self) -> None:
        printable_name("id", self.id)
        name = f"client {self.id}: "
        positive_int(name + "n_examples", self.n_examples)
        positive_int(name + "batch_size", self.batch_size)
        positive_int(name + "local_epochs", self.local_epochs)
        positive_number(name + "epsilon", self.epsilon)
        fraction(name + "delta", self.delta, one_allowed=False)
        check_unit(self.unit, self.max_records, name)
        if self.batch_size > self.n_examples:
            raise InvalidValueError(
                name + "batch_size",
                self.batch_size,
                f"must be at most n_examples = {self.n_examples}; use a smaller batch",
            )

    @property
    def sample_rate(self) -> float:
        """q_i = b_i / N_i."""
        return self.batch_size / self.n_examples

    @property
    def steps_per_round(self) -> int:
        """E_i = K_i * ceil(N_i / b_i), in integers (the paper's notation table)."""
        return self.local_epochs * -(-self.n_examples // self.batch_size)
