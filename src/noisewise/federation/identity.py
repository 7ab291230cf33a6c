"""Which run is it? A fingerprint of everything that decides a run's result.

A folder is resumed or read only by the run that began it. Settings, records and initial parameters
are hashed as they are. Your own aggregators, estimators, models, losses and metrics count with
their source text: whoever edits one and gives the same command must not see yesterday's figures.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from types import FunctionType

import numpy as np
from torch import Tensor, nn

from noisewise.aggregation.methods import Method
from noisewise.data.examples import Examples
from noisewise.federation.attacks import Attack
from noisewise.federation.clients import Client
from noisewise.federation.evaluation import Metric
from noisewise.federation.results import to_json
from noisewise.federation.settings import TrainingSettings
from noisewise.privacy.plan import LocalPlan
from noisewise.training.gradients import Loss

__all__ = ["add_records", "fingerprint", "of_method"]

_NOT_YOURS = ("builtins", "noisewise", "torch")


def fingerprint(
    clients: Sequence[Client],
    plans: Sequence[LocalPlan],
    method: Method,
    settings: TrainingSettings,
    seed: int,
    theta: Tensor,
    functions: tuple[nn.Module, Loss, Metric],
    attacks: tuple[Attack, ...],
) -> str:
    """SHA-256 of everything that decides a run's result.

    Args:
        clients: their settings and records.
        plans: of the clients.
        method: settled.
        settings: rounds, learning rate and the like.
        seed: of participation, sampling and noise.
        theta: initial parameters.
        functions: the model, whose structure theta tells unless its code is yours; loss; metric.
        attacks: on the run.
    """
    model, loss, metric = functions
    parts = {
        "specs": [asdict(c.spec) | {"reported": c.reported_epsilon} for c in clients],
        "plans": [asdict(plan) for plan in plans],
        "method": of_method(method),
        "attacks": [asdict(attack) for attack in attacks],
        "settings": asdict(settings),
        "seed": seed,
        "functions": [_without_address(loss), _without_address(metric)],
    }
    layers = {type(layer): None for layer in model.modules()}
    yours = [code for part in (method.aggregator, loss, metric, *layers) for code in _yours(part)]
    if yours:
        parts["yours"] = yours
    digest = hashlib.sha256(to_json(parts).encode())
    digest.update(theta.cpu().numpy().tobytes())
    for client in clients:
        for examples in (client.data.train, client.data.test):
            add_records(digest, examples)
    return digest.hexdigest()


def of_method(method: Method) -> list[object]:
    """What tells a settled method from others, whatever process asks."""
    around = [method.normalise, method.server_rate, method.average_rounds]
    return [method.name, _without_address(method.aggregator), around]


def add_records(digest: hashlib._Hash, examples: Examples) -> None:
    """Feed records to a hash, with their scaling."""
    digest.update(np.ascontiguousarray(examples.inputs).tobytes())
    digest.update(examples.targets.tobytes())
    digest.update(repr(examples.scaling).encode())


def _yours(part: object) -> list[str]:
    """Source and attributes of what comes from outside of the package, also inside of a dataclass.

    What was typed into an interpreter has no source: there only its attributes count.
    """
    found: list[str] = []
    kind = part if isinstance(part, (type, FunctionType)) else type(part)
    if kind.__module__.partition(".")[0] not in _NOT_YOURS:
        try:
            found.append(inspect.getsource(kind))
        except (OSError, TypeError):
            found.append(kind.__qualname__)
        if kind is not part:
            found += [f"{key} = {_words(value)}" for key, value in sorted(_attributes(part))]
    if is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            found += _yours(getattr(part, field.name))
    return found


def _attributes(part: object) -> list[tuple[str, object]]:
    return list(getattr(part, "__dict__", {}).items())


def _words(value: object) -> str:
    """A repr that is the same in every process: sets have no order of their own."""
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_without_address, value)))
    return _without_address(value)


def _without_address(thing: object) -> str:
    """The repr of an object without the memory address, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
