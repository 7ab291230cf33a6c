"""`TrainingSettings`: how a federation trains, the same for all methods."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields

import torch

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.errors import InvalidValueError
from noisewise.text import short_repr
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH
from noisewise.training.local_optimisers import SGD, LocalOptimiser

__all__ = ["DEFAULT_LOSS_RECORDS", "TrainingSettings"]

DEFAULT_LOSS_RECORDS = 128


@dataclass(frozen=True, repr=False)
class TrainingSettings:
    """How a federation trains.

    Attributes:
        rounds: E, number of global rounds.
        learning_rate: eta of the clients' local steps.
        participation: share of the clients that take part in each round.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        loss_records: largest number of a client's training records that its train loss is computed
            from; the same records in every round.
        physical_batch: number of gradients that a client holds in memory at the same time.
        device: of the tensors, as torch names it.
        evaluate_clients: share of the clients that is evaluated: the same clients, chosen by the
            seed, in every evaluation.
        local_optimiser: of the clients' local steps.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> TrainingSettings(rounds=20, learning_rate=0.1, participation=0.5)
        TrainingSettings(rounds=20, learning_rate=0.1, participation=0.5)
    """

    rounds: int
    learning_rate: float
    participation: float = 1.0
    evaluate_every: int = 1
    physical_batch: int = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"
    loss_records: int = DEFAULT_LOSS_RECORDS
    evaluate_clients: float = 1.0
    local_optimiser: LocalOptimiser = SGD

    def __repr__(self) -> str:
        """The rounds, the rate, and what is not the default."""
        varied = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.default is MISSING or getattr(self, each.name) != each.default
        }
        return short_repr(self, **varied)

    def described(self) -> dict[str, object]:
        """The fields for results and fingerprints; newer ones only if they are not the default."""
        fields = asdict(self)
        for name, default in (("evaluate_clients", 1.0), ("local_optimiser", asdict(SGD))):
            if fields[name] == default:
                del fields[name]
        return fields

    def __post_init__(self) -> None:
        positive_int("rounds", self.rounds)
        positive_number("learning_rate", self.learning_rate)
        fraction("participation", self.participation)
        fraction("evaluate_clients", self.evaluate_clients)
        positive_int("evaluate_every", self.evaluate_every)
        positive_int("physical_batch", self.physical_batch)
        positive_int("loss_records", self.loss_records)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            allowed = f'must be a device of this machine, such as "cpu" ({reason})'
            raise InvalidValueError("device", self.device, allowed) from error
