"""`LocalPlan`: the one object that training and accounting both read, so they cannot diverge."""

from __future__ import annotations

from dataclasses import dataclass

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.data.specs import ClientSpec
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy.accounting import ACCOUNTANTS, DEFAULT_ACCOUNTANT
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.calibration import calibrate

__all__ = ["LocalPlan", "make_plan", "non_private_plan"]


@dataclass(frozen=True)
class LocalPlan:
    """How one client trains in every round, and what that costs.

    Attributes:
        sample_rate: q, the probability with which each record enters a batch.
        expected_batch: b, the public divisor of a gradient sum; never the realised batch.
        steps_per_round: E_i = K_i ceil(N_i / b_i).
        clip_norm: c, the bound on a record's gradient; None without privacy.
        noise_multiplier: z, noise deviation over c; 0 without privacy.
        rounds: for how many rounds the budget is planned.
        accountant: by which z was calibrated and epsilon is reported.
        budget: what the client promises; None without privacy.
    """

    sample_rate: float
    expected_batch: int
    steps_per_round: int
    clip_norm: float | None
    noise_multiplier: float
    rounds: int
    accountant: str
    budget: PrivacyBudget | None

    def __post_init__(self) -> None:
        fraction("sample_rate", self.sample_rate)
        positive_int("expected_batch", self.expected_batch)
        positive_int("steps_per_round", self.steps_per_round)
        positive_int("rounds", self.rounds)
        if self.accountant not in ACCOUNTANTS:
            allowed = f"must be one of {', '.join(ACCOUNTANTS)}"
            raise InvalidValueError("accountant", self.accountant, allowed)
        if self.budget is None:
            if self.clip_norm is not None or self.noise_multiplier != 0:
                raise InvalidValueError("budget", None, "a plan with clipping or noise needs one")
        else:
            positive_number("clip_norm", self.clip_norm)
            positive_number("noise_multiplier", self.noise_multiplier)

    @property
    def is_private(self) -> bool:
        """Whether the plan keeps a budget."""
        return self.budget is not None

    @property
    def noise_std(self) -> float:
        """Deviation c z of the noise on a sum of clipped gradients."""
        return 0.0 if self.clip_norm is None else self.clip_norm * self.noise_multiplier


def make_plan(
    spec: ClientSpec,
    *,
    rounds: int,
    clip_norm: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> LocalPlan:
    """The plan of a client: q = b/N, E_i steps a round, z calibrated for all rounds.

    Args:
        spec: the client's own settings.
        rounds: E, all rounds in which the client may take part.
        clip_norm: c.
        accountant: ``pld``, ``rdp`` or ``moments``.

    Example:
        >>> spec = ClientSpec("a", n_examples=2400, batch_size=32, epsilon=0.5, delta=1e-4)
        >>> make_plan(spec, rounds=200, clip_norm=3.0).steps_per_round
        75
    """
    positive_int("rounds", rounds)
    positive_number("clip_norm", clip_norm)
    budget = PrivacyBudget(float(spec.epsilon), float(spec.delta))
    try:
        z = calibrate(budget, spec.sample_rate, rounds * spec.steps_per_round, accountant)
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
    )


def non_private_plan(
    spec: ClientSpec, *, rounds: int, accountant: str = DEFAULT_ACCOUNTANT
) -> LocalPlan:
    """The same sampling and steps without clipping and noise; for the reference method FedAvg."""
    return LocalPlan(
        sample_rate=spec.sample_rate,
        expected_batch=spec.batch_size,
        steps_per_round=spec.steps_per_round,
        clip_norm=None,
        noise_multiplier=0.0,
        rounds=rounds,
        accountant=accountant,
        budget=None,
    )
