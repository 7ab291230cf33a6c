"""`make_room`: the noise of a plan that shares its budget with other releases."""

from __future__ import annotations

from dataclasses import replace

from noisewise.errors import InvalidValueError
from noisewise.privacy.composition import Counts, add_steps, composed_epsilon
from noisewise.privacy.plan import LocalPlan

__all__ = ["make_room"]

_AIM = 0.998
"""Share of epsilon to stay below: upper bounds of steps of several kinds agree to 0.2%."""

_TIGHT = 1.001
_MOST_DOUBLINGS = 40


def make_room(plan: LocalPlan, others: Counts) -> LocalPlan:
    """The plan with so much more noise that ``others`` fit into its budget beside all its rounds.

    The noise multiplier is found by bisection to 0.1%, always on the safe side, and is the same
    whenever it is asked for.

    Args:
        plan: private; calibrated for its own rounds alone.
        others: steps by (sample_rate, noise_multiplier) that are to be released as well.

    Raises:
        InvalidValueError: the others alone spend the budget.

    Example:
        >>> from noisewise.data.specs import ClientSpec
        >>> from noisewise.privacy.plan import make_plan
        >>> spec = ClientSpec("a", n_examples=2400, batch_size=32, epsilon=2.0, delta=1e-6)
        >>> alone = make_plan(spec, rounds=10, clip_norm=1.0)
        >>> shared = make_room(alone, {(1.0, 50.0): 20})
        >>> alone.noise_multiplier < shared.noise_multiplier < 1.1 * alone.noise_multiplier
        True
    """
    budget = plan.budget
    if budget is None:
        raise InvalidValueError("plan", "without noise", "has no budget to share")
    if not others:
        return plan
    alone = composed_epsilon(others, budget.delta, plan.accountant)
    if alone >= _AIM * budget.epsilon:
        raise InvalidValueError(
            "releases beside training",
            f"epsilon {alone:.4g}",
            f"must leave something of epsilon {budget.epsilon:g}: ask for fewer or with more noise",
        )
    steps = plan.rounds * plan.steps_per_round

    def fits(noise: float) -> bool:
        counts = add_steps(others, plan.sample_rate, noise, steps)
        return composed_epsilon(counts, budget.delta, plan.accountant) <= _AIM * budget.epsilon

    quiet = noisy = plan.noise_multiplier
    for _ in range(_MOST_DOUBLINGS):
        if fits(noisy):
            break
        quiet, noisy = noisy, 2 * noisy
    else:
        raise InvalidValueError(
            "releases beside training",
            f"epsilon {alone:.4g}",
            f"leave too little of epsilon {budget.epsilon:g} for {plan.rounds} rounds",
        )
    while noisy > _TIGHT * quiet:
        middle = (quiet * noisy) ** 0.5
        quiet, noisy = (quiet, middle) if fits(middle) else (middle, noisy)
    return replace(plan, noise_multiplier=noisy)
