"""`plan_with_releases`: more noise for a plan that shares its budget with other releases."""

from __future__ import annotations

from dataclasses import replace

from noisewise.errors import InvalidValueError
from noisewise.privacy.composition import Counts, add_steps, composed_epsilon
from noisewise.privacy.plan import LocalPlan

__all__ = ["plan_with_releases"]

_LARGEST_SHARE = 0.998
"""Share of epsilon to use at most: upper bounds of steps of several kinds agree to 0.2%."""

_TOLERANCE = 1.001
_MOST_DOUBLINGS = 40


def plan_with_releases(plan: LocalPlan, releases: Counts) -> LocalPlan:
    """Add noise to a plan, so that all its rounds and ``releases`` fit into its budget together.

    The noise multiplier is found by bisection to 0.1%, always on the safe side. Equal arguments
    give an equal plan.

    Args:
        plan: with a budget; calibrated for its own rounds alone.
        releases: number of other releases by (sample_rate, noise_multiplier).

    Returns:
        The plan with a larger noise multiplier; the same plan if there are no releases.

    Raises:
        InvalidValueError: the plan has no budget, or the releases leave too little of it.

    Example:
        >>> from noisewise.data.specs import ClientSpec
        >>> from noisewise.privacy.plan import make_plan
        >>> spec = ClientSpec("a", n_examples=2400, batch_size=32, epsilon=2.0, delta=1e-6)
        >>> alone = make_plan(spec, rounds=10, clip_norm=1.0)
        >>> shared = plan_with_releases(alone, {(1.0, 50.0): 20})
        >>> alone.noise_multiplier < shared.noise_multiplier < 1.1 * alone.noise_multiplier
        True
    """
    budget = plan.budget
    if budget is None:
        raise InvalidValueError("plan", "without noise", "must have a budget to share")
    if not releases:
        return plan
    largest = _LARGEST_SHARE * budget.epsilon
    alone = composed_epsilon(releases, budget.delta, plan.accountant)
    if alone >= largest:
        raise InvalidValueError(
            "epsilon of the releases other than training",
            float(f"{alone:.4g}"),
            f"must be below {largest:g} of the budget's epsilon {budget.epsilon:g}; choose fewer "
            "releases or more noise for them",
        )
    steps = plan.rounds * plan.steps_per_round

    def fits(noise: float) -> bool:
        counts = add_steps(releases, plan.sample_rate, noise, steps)
        return composed_epsilon(counts, budget.delta, plan.accountant) <= largest

    quiet = noisy = plan.noise_multiplier
    for _ in range(_MOST_DOUBLINGS):
        if fits(noisy):
            break
        quiet, noisy = noisy, 2 * noisy
    else:
        raise InvalidValueError(
            "epsilon of the releases other than training",
            float(f"{alone:.4g}"),
            f"leaves too little of the budget's epsilon {budget.epsilon:g} for {plan.rounds} "
            "rounds; choose fewer releases or more noise for them",
        )
    while noisy > _TOLERANCE * quiet:
        middle = (quiet * noisy) ** 0.5
        quiet, noisy = (quiet, middle) if fits(middle) else (middle, noisy)
    return replace(plan, noise_multiplier=noisy)
