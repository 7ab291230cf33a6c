"""`Prepared`: everything that decides the result of one simulated run, made once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from noisewise.aggregation.base import Disclosure
from noisewise.aggregation.methods import Method
from noisewise.aggregation.noise_floor import plan_noise
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack, check_attacks
from noisewise.federation.clients import Client
from noisewise.federation.run_loop import StopWhen
from noisewise.federation.settings import TrainingSettings
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import keyed_generator
from noisewise.text import short_repr
from noisewise.training.parameters import ParameterLayout, check_model
from noisewise.training.tasks import CLASSIFICATION, Task

__all__ = ["Prepared"]


@dataclass(frozen=True, repr=False)
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
        task: loss and metrics; by default classification.
        reference_plans: every client's plan with its own budget, for the oracle's noise; by default
            ``plans``.
        attacks: clients that do not send an honest update, and what they send.
        noise_floor: F, the least noise energy of an honest update, which attackers know; by default
            the smallest value of the clients' plans.
        stop_when: called after each round with what a server knows (see `released_part`) and the
            released parameters [p]; the run ends when it returns True. It never sees a client's
            scores, loss or budget.

    Raises:
        InvalidValueError: the plans do not match the clients, an attack names an unknown client, or
            the method shares no model and there are attacks or rounds with a share of the clients,
            or something needs the noise of a local optimiser without a closed form.
        UnsupportedModelError: the model cannot be trained with per-record gradients.

    Example:
        `noisewise.prepare` makes one from a config:

            prepared = nw.prepare("configs/demo.toml", "NoiseWise", seed=1)
            prepared.true_noise, prepared.floor  # noise energies of the clients, least allowed
    """

    clients: Sequence[Client]
    plans: Sequence[LocalPlan]
    method: Method
    model: nn.Module
    settings: TrainingSettings
    seed: int = 0
    task: Task = CLASSIFICATION
    reference_plans: Sequence[LocalPlan] = ()
    attacks: Sequence[Attack] = ()
    noise_floor: float | None = None
    stop_when: StopWhen | None = None

    def __repr__(self) -> str:
        """What is run; not the clients' records and plans."""
        return short_repr(
            self, method=self.method.name, seed=self.seed, clients=len(self.clients),
            model=type(self.model).__name__, task=self.task.name, rounds=self.settings.rounds,
            attacks=len(self.attacks) or None,
        )  # fmt: skip

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
        if not self.noise_is_known:
            self._check_unknown_noise()
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
        if self.stop_when is not None:
            allowed = f"must not be set for {name}: nothing is released"
            raise InvalidValueError("training.stop_when", repr(self.stop_when), allowed)
        if self.attacks:
            kinds = [attack.kind for attack in self.attacks]
            raise InvalidValueError(
                "attacks", kinds, f"must be empty for {name}: its clients receive no updates"
            )
        if participation != 1:
            allowed = f"must be 1 for {name}: every client trains its own model in every round"
            raise InvalidValueError("training.participation", participation, allowed)

    @property
    def noise_is_known(self) -> bool:
        """Whether the noise energy of an update has a closed form; not with local Adam."""
        return self.settings.local_optimiser.noise_steps(1) is not None

    def _check_unknown_noise(self) -> None:
        """Refuse what needs the true noise or the noise floor."""
        needs_noise = {
            "method": self.method.name if Disclosure.TRUE_VARIANCE in self.method.needs else None,
            "the guard": self.method.guard and "policy.tolerated_attackers",
            "attacks": [attack.kind for attack in self.attacks] or None,
            "method without a shared model": None if self.method.shares_model else self.method.name,
        }
        for need, value in needs_noise.items():
            if value:
                name = self.settings.local_optimiser.name
                allowed = (
                    f"cannot be combined with {need} ({value}): the noise of its updates has no "
                    'closed form; use "sgd" or "momentum"'
                )
                raise InvalidValueError("training.local_optimiser", name, allowed)

    @cached_property
    def evaluated(self) -> tuple[int, ...]:
        """Positions of the clients that are evaluated: a share, chosen by the seed."""
        n = len(self.clients)
        count = math.ceil(self.settings.evaluate_clients * n)
        if count >= n:
            return tuple(range(n))
        chosen = keyed_generator(self.seed, "evaluated clients").choice(n, count, replace=False)
        return tuple(sorted(int(position) for position in chosen))

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(client.spec.id for client in self.clients)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each client, by id."""
        return {client: position for position, client in enumerate(self.ids)}

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
        if not self.noise_is_known:
            name = self.settings.local_optimiser.name
            raise InvalidValueError("local_optimiser", name, "its noise has no closed form")
        size, rate = ParameterLayout.of(self.model).size, self.settings.learning_rate
        normalised, optimiser = self.method.normalise, self.settings.local_optimiser
        noise = {
            plan: plan_noise(
                plan, size, rate, normalised=normalised,
                noise_steps=optimiser.noise_steps(plan.steps_per_round),
            )
            for plan in dict.fromkeys(plans)  # thousands of clients have few different plans
        }  # fmt: skip
        return np.array([noise[plan] for plan in plans])
