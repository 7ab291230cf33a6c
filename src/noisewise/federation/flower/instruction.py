"""What a server may ask of a site: a round, a learning rate within bounds, parameters, no more.

A question (how good are these parameters?) has no learning rate.

Whoever sends more, or something else, gets no answer: there is no field by which a server could
name a noise level, a clipping norm, a batch, a number of steps or an epsilon.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from noisewise.errors import InvalidValueError, UpdateError
from noisewise.federation.flower.records import read_theta
from noisewise.federation.flower.site import LimitsPart, MetricsPart
from noisewise.privacy.ledger import instruction_hash
from noisewise.privacy.plan import LocalPlan
from noisewise.training.parameters import ParameterLayout

__all__ = ["Instruction", "Question", "asked_round", "read_instruction", "read_question"]


@dataclass(frozen=True)
class Instruction:
    """One sound instruction.

    Attributes:
        round: counted from 1; for the log and the hash.
        learning_rate: eta, within the site's bounds.
        theta: [p] finite.
    """

    round: int
    learning_rate: float
    theta: Tensor

    def digest(self, layout: ParameterLayout, plan: LocalPlan, normalise: bool) -> str:
        """The ledger's name for it: the whole instruction, and the plan that answers it.

        The message's own id plays no part: a server that starts again and repeats a round gets the
        stored bytes, and no budget is spent twice.
        """
        told = {"round": self.round, "learning_rate": self.learning_rate}
        return instruction_hash(
            b"flower-train-1",
            json.dumps(told, sort_keys=True).encode(),
            repr(layout).encode(),
            repr((plan, normalise)).encode(),
            self.theta.numpy().tobytes(),
        )


@dataclass(frozen=True)
class Question:
    """One sound question: how good are these parameters on records that were not trained on?

    Attributes:
        round: counted from 1; for the log and the hash.
        theta: [p] finite.
    """

    round: int
    theta: Tensor

    def digest(self, layout: ParameterLayout, metrics: MetricsPart) -> str:
        """The ledger's name for it; see `Instruction.digest`."""
        return instruction_hash(
            b"flower-evaluate-1",
            json.dumps({"round": self.round}).encode(),
            repr(layout).encode(),
            repr((metrics.noise_multiplier, metrics.records)).encode(),
            self.theta.numpy().tobytes(),
        )


def read_instruction(
    content: RecordDict, layout: ParameterLayout, limits: LimitsPart
) -> Instruction:
    """Check a message to train against the list of what is allowed.

    Raises:
        InvalidValueError: anything missing, unknown or out of bounds.
        UpdateError: the arrays are not those of the site's model.
    """
    config = _config(content, ("learning-rate", "server-round"))
    number, rate = _round(config, limits), config["learning-rate"]
    low, high = limits.learning_rate
    if type(rate) is not float or not math.isfinite(rate) or not low <= rate <= high:
        allowed = f"must be a number from {low:g} to {high:g}, this site's limits"
        raise InvalidValueError("learning-rate", str(rate)[:40], allowed)
    return Instruction(number, rate, _theta(content, layout))


def read_question(content: RecordDict, layout: ParameterLayout, limits: LimitsPart) -> Question:
    """Check a message to evaluate; see `read_instruction`."""
    number = _round(_config(content, ("server-round",)), limits)
    return Question(number, _theta(content, layout))


def asked_round(message: Message) -> int | None:
    """The round that a message names, for a site's notes; None if it names no usable one."""
    try:
        number = message.content.config_records["config"]["server-round"]
    except Exception:  # whatever the server sent
        return None
    return number if type(number) is int and abs(number) < 2**31 else None


def _config(content: RecordDict, allowed: tuple[str, ...]) -> ConfigRecord:
    names = sorted(str(name) for name in content)
    if names != ["arrays", "config"] or [*content.array_records] != ["arrays"]:
        raise InvalidValueError("records", names[:5], "must be arrays and config, nothing else")
    if [*content.config_records] != ["config"]:
        raise InvalidValueError("config", "other", "must be a config record")
    config = content.config_records["config"]
    keys = tuple(sorted(str(key) for key in config))
    if keys != allowed:
        words = f"must hold {' and '.join(allowed)} only"
        raise InvalidValueError("config", list(keys)[:5], words)
    return config


def _round(config: ConfigRecord, limits: LimitsPart) -> int:
    number = config["server-round"]
    if type(number) is not int or not 1 <= number <= limits.last_round:
        allowed = f"must be a whole number from 1 to {limits.last_round}"
        raise InvalidValueError("server-round", str(number)[:40], allowed)
    return number


def _theta(content: RecordDict, layout: ParameterLayout) -> Tensor:
    theta = read_theta(content.array_records["arrays"], layout)
    if not bool(theta.isfinite().all()):
        raise UpdateError("the model has values that are not finite")
    return theta
