"""`ClientSpec`: one client's own settings, the input of every plan."""

from __future__ import annotations

from dataclasses import dataclass

from noisewise.checks import fraction, positive_int, positive_number, printable_name
from noisewise.errors import InvalidValueError

__all__ = ["ClientSpec"]


@dataclass(frozen=True)
class ClientSpec:
    """One client's own settings. Only the client needs to know them.

    Args:
        id: name of the client, unique in a federation.
        n_examples: N_i, the declared number of training records.
        batch_size: b_i, the expected batch size of Poisson sampling; at most N_i.
        epsilon: epsilon_i, the client's own privacy budget.
        delta: delta_i of the same budget.
        local_epochs: K_i, passes over the data in a round.

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

    def __post_init__(self) -> None:
        printable_name("id", self.id)
        name = f"client {self.id}: "
        positive_int(name + "n_examples", self.n_examples)
        positive_int(name + "batch_size", self.batch_size)
        positive_int(name + "local_epochs", self.local_epochs)
        positive_number(name + "epsilon", self.epsilon)
        fraction(name + "delta", self.delta, one_allowed=False)
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
