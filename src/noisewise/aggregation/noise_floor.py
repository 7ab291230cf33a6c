"""The noise energy of a plan's updates, and the noise floor of the plans a federation permits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from noisewise.errors import InvalidValueError
from noisewise.noise.variance import update_noise_variance
from noisewise.privacy.plan import LocalPlan

__all__ = ["noise_floor", "plan_noise"]


def plan_noise(
    plan: LocalPlan,
    size: int,
    learning_rate: float,
    *,
    normalised: bool = False,
    noise_steps: float | None = None,
) -> float:
    """Compute the closed-form noise energy of one update under a plan.

    This is the paper's eq. sigma_i^2 with the approximation of eq. var_g_effective. For an update
    that is divided by its number of steps, it is divided by the square of that number.

    Args:
        plan: the client's plan.
        size: p, number of parameters.
        learning_rate: of the client's local steps.
        normalised: whether the update is divided by its number of steps.
        noise_steps: noise energy of the update in units of one step's; by default the number of
            steps, which is right for SGD.

    Returns:
        The noise energy; 0 for a plan without privacy.
    """
    if plan.clip_norm is None:
        return 0.0
    steps = plan.steps_per_round
    energy = update_noise_variance(
        size, steps, learning_rate, plan.clip_norm, plan.noise_multiplier, plan.expected_batch
    )
    if noise_steps is not None:
        energy = energy / steps * noise_steps
    return float(energy) / (steps**2 if normalised else 1)


def noise_floor(
    permitted: Iterable[LocalPlan],
    size: int,
    learning_rate: float,
    *,
    normalised: bool,
    noise_steps: Callable[[int], float | None] = float,
) -> float:
    """Compute F, the least noise energy of an honest update under the federation's policy.

    F is the minimum over whole plans, not over each field separately, because the smallest z and
    the largest b need not belong to the same plan.

    Args:
        permitted: the plans that the federation permits.
        size: p, number of parameters.
        learning_rate: of the clients' local steps.
        normalised: whether updates are divided by their number of steps.
        noise_steps: (steps) -> noise energy of an update in units of one step's; by default that of
            SGD, the number of steps.

    Returns:
        F > 0.

    Raises:
        InvalidValueError: there is no plan, or a plan has no privacy.
    """
    energies = [
        plan_noise(
            plan, size, learning_rate, normalised=normalised,
            noise_steps=noise_steps(plan.steps_per_round),
        )
        for plan in permitted
    ]  # fmt: skip
    if not energies or min(energies) <= 0:
        raise InvalidValueError(
            "permitted", f"{len(energies)} plans", "must be at least one plan, each with privacy"
        )
    return min(energies)
