"""The federation's policy in numbers: how much noise a permitted plan puts into an update."""

from __future__ import annotations

from collections.abc import Iterable

from noisewise.errors import InvalidValueError
from noisewise.noise.variance import update_noise_variance
from noisewise.privacy.plan import LocalPlan

__all__ = ["noise_floor", "plan_noise"]


def plan_noise(
    plan: LocalPlan, size: int, learning_rate: float, *, normalised: bool = False
) -> float:
    """Closed-form noise energy of one update under a plan; 0 without privacy.

    The paper's eq. sigma_i^2 with the approximation of eq. var_g_effective; for an update that is
    divided by its number of steps, over the square of that number.
    """
    if plan.clip_norm is None:
        return 0.0
    steps = plan.steps_per_round
    energy = update_noise_variance(
        size, steps, learning_rate, plan.clip_norm, plan.noise_multiplier, plan.expected_batch
    )
    return float(energy) / (steps**2 if normalised else 1)


def noise_floor(
    permitted: Iterable[LocalPlan], size: int, learning_rate: float, *, normalised: bool
) -> float:
    """F: the least noise energy that an honest update can have under the federation's policy.

    The minimum goes over the permitted plans as they are, not over their fields one by one: the
    smallest z and the largest b do not occur together.
    """
    energies = [plan_noise(p, size, learning_rate, normalised=normalised) for p in permitted]
    if not energies or min(energies) <= 0:
        raise InvalidValueError("permitted", len(energies), "must be private plans, at least one")
    return min(energies)
