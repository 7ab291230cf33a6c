"""`Prepared`: everything that decides the result of one simulated run, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noisewise.aggregation.methods import Method
from noisewise.aggregation.noise_floor import plan_noise
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack, check_attacks
from noisewise.federation.clients import Client
from noisewise.federation.evaluation import Metric, accuracy
from noisewise.federation.settings import TrainingSettings
from noisewise.privacy.plan import LocalPlan
from noisewise.training.gradients import Loss
from noisewise.training.parameters import ParameterLayout, check_model

__all__ = ["Prepared"]


@dataclass(frozen=True)
class Prepared:
    """One method under one seed, ready for `simulate`.

    Choices that do not change the result (workers, folder, display) are not part of it.

    Attributes:
        clients: settings and records.
        plans: of the clients, in the same order, from `plan_clients`.
        method: what clients and server do. If it has no number of server steps, the plans set it.
        model: structure and initial parameters; not changed.
        settings: rounds, learning rate and so on.
        seed: of participation, sampling and noise.
        loss: mean loss of a batch.
        metric: score of each record, reported as accuracy.
        reference_plans: every client's plan with its own budget, for the oracle's noise; by default
            ``plans``.
        attacks: clients that do not send an honest update, and what they send.
        noise_floor: F, the least noise energy of an honest update, which attackers know; by default
            the smallest value of the clients' plans.

    Raises:
        InvalidValueError: the plans do not match the clients, an attack names an unknown client, or
            the method shares no model and there are attacks or rounds with a share of the clients.
        UnsupportedModelError: the model cannot be trained with per-record gradients.
    """

    clients: Sequence[Client]
    plans: Sequence[LocalPlan]
    method: Method
    model: nn.Module
    settings: TrainingSettings
    seed: int = 0
    loss: Loss = cross_entropy
    metric: Metric = accuracy
    reference_plans: Sequence[LocalPlan] = ()
    attacks: Sequence[Attack] = ()
    noise_floor: float | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        n_plans, n_clients = len(self.plans), len(self.clients)
        if n_plans != n_clients or not self.clients:
            raise InvalidValueError(
                "plans", f"{n_plans} plans", f"must be one for each of the {n_clients} clients"
            )
        check_attacks(self.attacks, self.ids)
        if not self.method.shares_model:
            self._check_unshared()
        for name, value in (
            ("clients", tuple(self.clients)),
            ("plans", tuple(self.plans)),
            ("method", self.method.with_server_steps(self.plans)),
            ("reference_plans", tuple(self.reference_plans) or tuple(self.plans)),
            ("attacks", tuple(self.attacks)),
        ):
            object.__setattr__(self, name, value)

    def _check_unshared(self) -> None:
        name, participation = self.method.name, self.settings.participation
        if self.attacks:
            kinds = [attack.kind for attack in self.attacks]
            raise InvalidValueError(
                "attacks", kinds, f"must be empty for {name}: its clients receive no updates"
            )
        if participation != 1:
            allowed = f"must be 1 for {name}: every client trains its own model in every round"
            raise InvalidValueError("training.participation", participation, allowed)

    @property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(client.spec.id for client in self.clients)

    @property
    def initial_parameters(self) -> Tensor:
        """[p] the model's parameters, on the device of the settings."""
        return ParameterLayout.of(self.model).flatten(self.model).to(self.settings.device)

    @cached_property
    def true_noise(self) -> NDArray[np.float64]:
        """[n] closed-form noise energy of the update that each client sends."""
        return self._noise(self.plans)

    @cached_property
    def reference_noise(self) -> NDArray[np.float64]:
        """[n] the same with every client's own budget (``reference_plans``), for the oracle."""
        return self._noise(self.reference_plans)

    @property
    def floor(self) -> float:
        """F, the least noise energy of an honest update."""
        return float(self.true_noise.min()) if self.noise_floor is None else self.noise_floor

    def _noise(self, plans: Sequence[LocalPlan]) -> NDArray[np.float64]:
        size, rate = ParameterLayout.of(self.model).size, self.settings.learning_rate
        normalised = self.method.normalise
        return np.array([plan_noise(plan, size, rate, normalised=normalised) for plan in plans])
