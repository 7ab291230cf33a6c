"""`NoiseWise`: our own method. It maximises the signal-to-noise ratio and limits the bias.

Each client should divide its update by its number of local steps before it sends it
(`Method.normalise`), so that all updates carry the same signal. The weights 1/sigma^2 then give the
best linear unbiased combination, and not only the one with the least noise. (FedNova divides by the
steps as well, for another reason: to remove the bias towards clients that take more steps.) See
docs/noisewise_derivation.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Aggregation, Disclosure, ServerView, State
from noisewise.aggregation.guard import Guard, Weighed, guarded_sum
from noisewise.aggregation.weights import (
    capped_weights,
    noise_and_bias_weights,
    proportional_weights,
    without_empty,
)
from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator, NoiseEstimate
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.reseeding import reseeded
from noisewise.noise.signal import SignalTracker
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.update_spread import SpreadTracker

__all__ = ["NoiseWise"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseWise:
    """Weights that balance estimated noise against the bias from differences between the clients.

    Args:
        estimator: estimates the noise of one round.
        smooth: number of rounds over which estimates are averaged; 1 for no averaging.
        spread: zeta^2, the energy of the signal that only one client has. It sets the balance
            between noise and the bias of a small weight for the data of noisy clients.
            ``"estimated"`` measures it across rounds (`SpreadTracker`); 0 gives inverse-variance
            weights.
        horizon: number of rounds over which the bias adds up while noise averages out.
            ``"rounds"`` uses the number of the current round; 1 balances each round separately.
        target: the weights without noise: ``"uniform"``, or proportional to the clients' numbers of
            ``"examples"``, which clients then have to disclose.
        signal: ``"equal"`` for updates that are divided by their steps. ``"loadings"`` is for other
            updates: it estimates each client's scale of the common signal (`SignalTracker`).
        guard: screening and bounds against hostile clients, or None.

    Example:
        >>> import torch
        >>> from noisewise.aggregation import ServerView, UpdateMatrix
        >>> noise = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
        >>> updates = UpdateMatrix(noise * torch.tensor([1.0, 1.0, 2.0]), ("a", "b", "c"))
        >>> NoiseWise().aggregate(ServerView(updates, round=1), {}).weights.round(1).tolist()
        [0.4, 0.4, 0.1]
    """

    estimator: Estimator = field(default_factory=Factor)
    smooth: int = 20
    spread: float | Literal["estimated"] = "estimated"
    horizon: float | Literal["rounds"] = "rounds"
    target: Literal["uniform", "examples"] = "uniform"
    signal: Literal["equal", "loadings"] = "equal"
    guard: Guard | None = None

    def __post_init__(self) -> None:
        positive_int("smooth", self.smooth)
        if not isinstance(self.estimator, Estimator):
            raise InvalidValueError(
                "estimator", self.estimator, "must have a name and estimate(updates)"
            )
        is_number = isinstance(self.spread, (int, float)) and not isinstance(self.spread, bool)
        if self.spread != "estimated" and not (is_number and 0 <= float(self.spread) < np.inf):
            raise InvalidValueError("spread", self.spread, 'must be "estimated" or a number >= 0')
        if self.horizon != "rounds":
            positive_number("horizon", self.horizon)
        if self.target not in ("uniform", "examples"):
            raise InvalidValueError("target", self.target, 'must be "uniform" or "examples"')
        if self.signal not in ("equal", "loadings"):
            raise InvalidValueError("signal", self.signal, 'must be "equal" or "loadings"')

    @property
    def needs(self) -> frozenset[Disclosure]:
        """The dataset sizes if ``target`` is ``"examples"``, otherwise nothing."""
        return frozenset({Disclosure.N_EXAMPLES} if self.target == "examples" else ())

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.reseeding.Reseedable`."""
        return replace(self, estimator=reseeded(self.estimator, seed, "estimator"))

    def with_guard(self, guard: Guard) -> Self:
        """See `Guardable`."""
        return replace(self, guard=guard)

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        sizes = {}
        if self.target == "examples":
            n_examples = view.disclosure(Disclosure.N_EXAMPLES)
            sizes = dict(zip(view.updates.ids, n_examples, strict=True))

        def weigh(values: Tensor, ids: tuple[str, ...], cap: float) -> Weighed:
            target = proportional_weights([sizes[client] for client in ids]) if sizes else None
            horizon = float(view.round if self.horizon == "rounds" else self.horizon)
            return self._weigh(values, ids, cap, target, horizon, state)

        return guarded_sum(view, self.guard, weigh, state)

    def _weigh(
        self,
        values: Tensor,
        ids: tuple[str, ...],
        cap: float,
        target: Vector | None,
        horizon: float,
        state: State,
    ) -> Weighed:
        tracker = NoiseTracker(self.estimator, memory=self.smooth)
        noise, noise_state = tracker.estimate(values, ids, _part(state, "noise"))
        floored = self._floored(noise.variance)
        scale, scale_state = self._scale(values, ids, floored, _part(state, "scale"))
        spread, spread_state = self._spread(values, ids, floored, scale, _part(state, "spread"))
        empty = ~(values != 0).any(dim=0).cpu().numpy()
        noise_only = self._floored(_without_own_signal(noise, spread * scale**2))
        noise_only = without_empty(noise_only, empty)
        if self.signal == "equal":
            weights = noise_and_bias_weights(noise_only, horizon * spread, target, cap)
        else:
            of_scaled = noise_and_bias_weights(noise_only / scale**2, horizon * spread, target)
            weights = capped_weights(of_scaled / scale, cap)
        details = {**noise.details, "spread": spread, "signal": scale}
        next_state = {
            f"{part}.{name}": array
            for part, arrays in (
                ("noise", noise_state), ("scale", scale_state), ("spread", spread_state)
            )
            for name, array in arrays.items()
        }  # fmt: skip
        estimate = NoiseEstimate(noise.variance, noise.method, noise.converged, details)
        return Weighed(weights, estimate, next_state)

    def _floored(self, variance: Vector) -> Vector:
        return variance if self.guard is None else self.guard.variance(variance)

    def _spread(
        self, values: Tensor, ids: tuple[str, ...], variance: Vector, scale: Vector, state: State
    ) -> tuple[float, State]:
        if self.spread != "estimated":
            return float(self.spread), {}
        if self.signal == "loadings":
            values = values / values.new_tensor(scale)
        estimate, next_state = SpreadTracker(memory=self.smooth).estimate(
            values, ids, variance / scale**2, state
        )
        return estimate.certain, next_state

    def _scale(
        self, values: Tensor, ids: tuple[str, ...], variance: Vector, state: State
    ) -> tuple[Vector, State]:
        """Return each client's scale of the common signal ([n], median 1), and the state."""
        if self.signal == "equal":
            return np.ones(len(ids)), {}
        return SignalTracker().estimate(values, ids, variance, state)


def _without_own_signal(noise: NoiseEstimate, spread: Vector) -> Vector:
    """Subtract the energy of the signal that only one client has from the noise energies.

    A factor model that was fitted to the quietest rows does not contain this signal. Other
    estimators count it as noise; the weights count it again as bias, and would be too equal.

    Args:
        noise: the estimate for n clients.
        spread: [n] energy of the signal that only this client has.

    Returns:
        [n] noise energies >= 0.
    """
    if noise.details.get("share", 1.0) < 1:
        return noise.variance
    return np.asarray(np.maximum(noise.variance - spread, 0.0))


def _part(state: State, name: str) -> State:
    """Return the arrays whose names begin with ``name`` and a dot, without this prefix."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
