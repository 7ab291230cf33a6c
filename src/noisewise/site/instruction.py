"""What a server may ask of a site: a round, a learning rate within limits, parameters, no more.

An instruction has no field by which a server could name a noise level, a clipping norm, a batch, a
number of steps or an epsilon. A question for the noised score has no learning rate either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.errors import InvalidValueError, UpdateError
from noisewise.privacy.ledger import instruction_hash
from noisewise.privacy.plan import LocalPlan
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_config import LimitsPart, MetricsPart
from noisewise.training.parameters import ParameterLayout

__all__ = [
    "CheckedInstruction",
    "CheckedQuestion",
    "check_instruction",
    "check_question",
]


@dataclass(frozen=True)
class CheckedInstruction:
    """An instruction within the site's limits.

    Attributes:
        round: for the log and the hash.
        learning_rate: eta.
        theta: [p] finite, in the layout of the site's model.
    """

    round: int
    learning_rate: float
    theta: Tensor

    def digest(self, layout: ParameterLayout, plan: LocalPlan, normalise: bool) -> str:
        """The ledger's name for the whole instruction and the plan that answers it.

        A message's own id is no part of it: if a server restarts and repeats a round, the site
        sends the stored bytes and spends no budget twice. Ledgers on disk hold these hashes, so the
        bytes that are hashed here must not change.
        """
        fields = {"round": self.round, "learning_rate": self.learning_rate}
        return instruction_hash(
            b"flower-train-1",
            json.dumps(fields, sort_keys=True).encode(),
            repr(layout).encode(),
            _without_default(f"({_plan_text(plan)}, {normalise!r})").encode(),
            self.theta.numpy().tobytes(),
        )


def _plan_text(plan: LocalPlan) -> str:
    """All fields of a plan, as ledgers on disk hash them."""
    values = ", ".join(f"{each.name}={getattr(plan, each.name)!r}" for each in fields(plan))
    return f"LocalPlan({values})"


def _without_default(plan: str) -> str:
    """A plan's text without the clipping rule and the unit that older plans have by default."""
    plan = plan.replace(", clip_rule='norm'", "")
    return plan.replace(", unit='record', max_records=None", "")


@dataclass(frozen=True)
class CheckedQuestion:
    """A question within the site's limits: how good are these parameters on held-out records?

    Attributes:
        round: for the log and the hash.
        theta: [p] finite, in the layout of the site's model.
    """

    round: int
    theta: Tensor

    def digest(self, layout: ParameterLayout, metrics: MetricsPart) -> str:
        """The ledger's name for it; see `CheckedInstruction.digest`."""
        terms: tuple[float, ...] = (metrics.noise_multiplier, metrics.records)
        if metrics.score_bound is not None:
            terms = (*terms, metrics.score_bound)
        return instruction_hash(
            b"flower-evaluate-1",
            json.dumps({"round": self.round}).encode(),
            repr(layout).encode(),
            repr(terms).encode(),
            self.theta.numpy().tobytes(),
        )


def check_instruction(
    instruction: Instruction, layout: ParameterLayout, limits: LimitsPart
) -> CheckedInstruction:
    """Check an instruction against the site's limits and the layout of its model.

    Raises:
        InvalidValueError: the round or the learning rate has another type or is out of bounds.
        UpdateError: the parameters are not those of the site's model, or not finite.
    """
    number = _round(instruction.round, limits)
    rate, (low, high) = instruction.learning_rate, limits.learning_rate
    if type(rate) is not float or not math.isfinite(rate) or not low <= rate <= high:
        allowed = f"must be a number from {low:g} to {high:g}, this site's limits"
        raise InvalidValueError("learning_rate", str(rate)[:40], allowed)
    return CheckedInstruction(number, rate, _theta(instruction.parameters, layout))


def check_question(
    question: Question, layout: ParameterLayout, limits: LimitsPart
) -> CheckedQuestion:
    """Check a question; see `check_instruction`."""
    number = _round(question.round, limits)
    return CheckedQuestion(number, _theta(question.parameters, layout))


def _round(number: object, limits: LimitsPart) -> int:
    if type(number) is not int or not 1 <= number <= limits.last_round:
        allowed = f"must be a whole number from 1 to {limits.last_round}"
        raise InvalidValueError("round", str(number)[:40], allowed)
    return number


def _theta(parameters: Mapping[str, NDArray[np.float32]], layout: ParameterLayout) -> Tensor:
    theta = layout.gather(parameters)
    if not bool(theta.isfinite().all()):
        raise UpdateError("the model has values that are not finite")
    return theta
