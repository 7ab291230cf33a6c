"""`NoiseWise`: our own method - the best signal-to-noise ratio, with different data in mind.

Its updates are meant to be divided by each client's number of local steps before they are sent
(`Method.normalise`), so that all carry the same signal. Then 1/sigma^2 is the best linear unbiased
combination, not just the quietest one. (FedNova divides by the steps too, for another reason: there
it undoes the bias towards clients that take more steps.) See docs/noisewise_method.md.
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
from noisewise.noise.factor import Factor
from noisewise.noise.signal import SignalTracker
from noisewise.noise.smoothing import NoiseTracker
from noisewise.noise.spread import SpreadTracker
from noisewise.noise.unforeseen import reseeded

__all__ = ["NoiseWise"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseWise:
    """Weights from estimated noise, smoothed over rounds, balanced against different data.

    Args:
        estimator: of the noise of one round.
        smooth: rounds over which estimates are averaged; 1 takes each as it comes.
        spread: ``"estimated"`` weighs noise against the bias of leaving noisy clients' data out,
            with zeta^2 measured across rounds (`SpreadTracker`); a number is taken as zeta^2; 0
            gives inverse-variance weights.
        horizon: for how many rounds a bias adds up while noise averages out: ``"rounds"`` takes
            those that were played, a number is taken as it is, 1 looks at each round by itself.
        target: what the weights should be if there were no noise: ``"uniform"``, or by the numbers
            of ``"examples"``, which clients then have to disclose.
        signal: ``"equal"`` for updates that are divided by their steps; ``"loadings"`` estimates
            each update's share of the common signal where they are not (`SignalTracker`).
        guard: screening and bounds against hostile clients.
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
        known = isinstance(self.spread, (int, float)) and not isinstance(self.spread, bool)
        if self.spread != "estimated" and not (known and 0 <= float(self.spread) < np.inf):
            raise InvalidValueError("spread", self.spread, 'must be "estimated" or a number >= 0')
        if self.horizon != "rounds":
            positive_number("horizon", self.horizon)
        if self.target not in ("uniform", "examples"):
            raise InvalidValueError("target", self.target, "must be uniform or examples")
        if self.signal not in ("equal", "loadings"):
            raise InvalidValueError("signal", self.signal, "must be equal or loadings")

    @property
    def needs(self) -> frozenset[Disclosure]:
        """Nothing, unless the target is by dataset size."""
        return frozenset({Disclosure.N_EXAMPLES} if self.target == "examples" else ())

    def reseeded(self, seed: int | None) -> Self:
        """See `noisewise.noise.unforeseen.Reseedable`."""
        return replace(self, estimator=reseeded(self.estimator, seed, "estimator"))

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        """See `Aggregator`."""
        sizes = {}
        if self.target == "examples":
            told = view.told(Disclosure.N_EXAMPLES)
            sizes = dict(zip(view.updates.ids, told, strict=True))

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
        alone = without_empty(self._floored(_noise_alone(noise, spread * scale**2)), empty)
        if self.signal == "equal":
            weights = noise_and_bias_weights(alone, horizon * spread, target, cap)
        else:
            divided = noise_and_bias_weights(alone / scale**2, horizon * spread, target)
            weights = capped_weights(divided / scale, cap)
        details = {**noise.details, "spread": spread, "signal": scale}
        following = {
            f"{part}.{name}": array
            for part, arrays in (
                ("noise", noise_state), ("scale", scale_state), ("spread", spread_state)
            )
            for name, array in arrays.items()
        }  # fmt: skip
        estimate = NoiseEstimate(noise.variance, noise.method, noise.converged, details)
        return Weighed(weights, estimate, following)

    def _floored(self, variance: Vector) -> Vector:
        return variance if self.guard is None else self.guard.variance(variance)

    def _spread(
        self, values: Tensor, ids: tuple[str, ...], variance: Vector, scale: Vector, state: State
    ) -> tuple[float, State]:
        if self.spread != "estimated":
            return float(self.spread), {}
        if self.signal == "loadings":
            values = values / values.new_tensor(scale)
        found, following = SpreadTracker(memory=self.smooth).estimate(
            values, ids, variance / scale**2, state
        )
        return found.certain, following

    def _scale(
        self, values: Tensor, ids: tuple[str, ...], variance: Vector, state: State
    ) -> tuple[Vector, State]:
        """Each update's share of the common signal, over the median share."""
        if self.signal == "equal":
            return np.ones(len(ids)), {}
        return SignalTracker().estimate(values, ids, variance, state)


def _noise_alone(noise: NoiseEstimate, spread: Vector) -> Vector:
    """[n] energies without what each update has of its own, of energy ``spread`` [n].

    Only a factor model that was fitted to the quietest coordinates leaves that out by itself; to
    all others it looks like noise, and counting it twice would make weights too even.
    """
    if noise.details.get("share", 1.0) < 1:
        return noise.variance
    return np.asarray(np.maximum(noise.variance - spread, 0.0))


def _part(state: State, name: str) -> State:
    """The arrays of one part of the state, without its prefix."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
