"""`LocalPlan`: the parameters of local DP-SGD, read by training and by accounting alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.data.specs import ClientSpec, Unit, check_unit
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, check_accountant
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.calibration import Calibration, calibrate
from noisewise.text import short_repr

__all__ = ["CLIP_RULES", "LocalPlan", "make_plan", "non_private_plan"]

CLIP_RULES = ("norm", "normalise")
"""How a record's gradient is bounded; see `LocalPlan`."""


@dataclass(frozen=True, repr=False)
class LocalPlan:
    """How one client trains in every round, and what that costs.

    Attributes:
        sample_rate: q, the probability with which each record enters a batch.
        expected_batch: b, the public divisor of a gradient sum; never the number of records drawn.
        steps_per_round: E_i = K_i ceil(N_i / b_i).
        clip_norm: c, the bound on a record's gradient; None without privacy.
        noise_multiplier: z, deviation of the noise divided by c; 0 without privacy.
        rounds: number of rounds that z was calibrated for.
        accountant: the accountant that z was calibrated with and that computes epsilon.
        budget: of the client; None without privacy.
        clip_rule: "norm" shortens a record's gradient to the norm c if it is longer; "normalise"
            scales every gradient g to c g / (||g|| + 0.01) (automatic clipping, Bu et al. 2022).
            Either way a record contributes at most c, so the accounting is the same.
        unit: what the budget protects. With "person", read "person" for "record" above: persons
            are sampled, and the mean gradient of a person's records is bounded as one vector.
        max_records: the largest number of a person's records in a step, chosen at random in every
            step; None for records.

    Raises:
        InvalidValueError: a value is out of range, or clipping and noise come without a budget.

    Example:
        >>> spec = ClientSpec("ward-7", 600, 30, 1.0, 1e-5)
        >>> plan = make_plan(spec, rounds=2, clip_norm=1.0)
        >>> plan.sample_rate, plan.steps_per_round
        (0.05, 20)
    """

    sample_rate: float
    expected_batch: int
    steps_per_round: int
    clip_norm: float | None
    noise_multiplier: float
    rounds: int
    accountant: str
    budget: PrivacyBudget | None
    clip_rule: str = "norm"
    unit: Unit = "record"
    max_records: int | None = None

    def __repr__(self) -> str:
        """What decides the cost of the plan."""
        budget = self.budget
        return short_repr(
            self, sample_rate=self.sample_rate, steps_per_round=self.steps_per_round,
            rounds=self.rounds, clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier,
            accountant=self.accountant, unit=self.unit,
            epsilon=None if budget is None else budget.epsilon,
            delta=None if budget is None else budget.delta,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.clip_rule not in CLIP_RULES:
            allowed = "must be one of " + ", ".join(CLIP_RULES)
            raise InvalidValueError("clip_rule", self.clip_rule, allowed)
        check_unit(self.unit, self.max_records)
        fraction("sample_rate", self.sample_rate)
        positive_int("expected_batch", self.expected_batch)
        positive_int("steps_per_round", self.steps_per_round)
        positive_int("rounds", self.rounds)
        check_accountant(self.accountant)
        if self.budget is None:
            if self.clip_norm is not None or self.noise_multiplier != 0:
                allowed = "must be set in a plan with clipping or noise"
                raise InvalidValueError("budget", None, allowed)
        else:
            positive_number("clip_norm", self.clip_norm)
            positive_number("noise_multiplier", self.noise_multiplier)

    @property
    def is_private(self) -> bool:
        """Whether the plan has a budget, and therefore clipping and noise."""
        return self.budget is not None

    @property
    def noise_std(self) -> float:
        """Deviation c z of the noise on a sum of clipped gradients; 0 without privacy."""
        return 0.0 if self.clip_norm is None else self.clip_norm * self.noise_multiplier


@functools.lru_cache(maxsize=4096)
def _calibrated(
    budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str
) -> Calibration:
    """`calibrate`, once in a process for clients, methods and seeds with equal plans."""
    return calibrate(budget, sample_rate, steps, accountant)


def make_plan(
    spec: ClientSpec,
    *,
    rounds: int,
    clip_norm: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    clip_rule: str = "norm",
) -> LocalPlan:
    """Make the plan of a client: q = b/N, E_i steps in each round, z calibrated for all rounds.

    Args:
        spec: the client's own settings.
        rounds: E, all rounds in which the client may take part.
        clip_norm: c.
        accountant: ``pld``, ``rdp`` or ``moments``.
        clip_rule: "norm" or "normalise"; see `LocalPlan`.

    Returns:
        The plan with the smallest z that keeps epsilon within the client's budget.

    Raises:
        InvalidValueError: a value is invalid or out of range for the accountant.
        AccountingError: no noise multiplier satisfies the budget with this accountant.

    Example:
        >>> spec = ClientSpec("a", n_examples=2400, batch_size=32, epsilon=0.5, delta=1e-4)
        >>> make_plan(spec, rounds=200, clip_norm=3.0).steps_per_round
        75
    """
    positive_int("rounds", rounds)
    positive_number("clip_norm", clip_norm)
    budget = PrivacyBudget(float(spec.epsilon), float(spec.delta))
    try:
        z = _calibrated(budget, spec.sample_rate, rounds * spec.steps_per_round, accountant)
    except AccountingError as error:
        raise AccountingError(f"client {spec.id}: {error}") from error
    return LocalPlan(
        sample_rate=spec.sample_rate,
        expected_batch=spec.batch_size,
        steps_per_round=spec.steps_per_round,
        clip_norm=float(clip_norm),
        noise_multiplier=z.noise_multiplier,
        rounds=rounds,
        accountant=accountant,
        budget=budget,
        clip_rule=clip_rule,
        unit=spec.unit,
        max_records=spec.max_records,
    )


def non_private_plan(
    spec: ClientSpec, *, rounds: int, accountant: str = DEFAULT_ACCOUNTANT
) -> LocalPlan:
    """Make a plan with the same sampling and steps, without clipping and noise, for FedAvg.

    Args:
        spec: the client's own settings.
        rounds: E.
        accountant: is only noted in the plan.
    """
    return LocalPlan(
        sample_rate=spec.sample_rate,
        expected_batch=spec.batch_size,
        steps_per_round=spec.steps_per_round,
        clip_norm=None,
        noise_multiplier=0.0,
        rounds=rounds,
        accountant=accountant,
        budget=None,
        unit=spec.unit,
        max_records=spec.max_records,
    )
