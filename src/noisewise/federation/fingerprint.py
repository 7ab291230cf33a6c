"""The fingerprint of a run: a hash of everything that decides its result.

Only a run with the same fingerprint resumes or reads a folder. Settings, records and initial
parameters are hashed as they are. A user's own aggregators, estimators, models, losses and metrics
are hashed with their source text: after an edit, the same command must not return old results.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from dataclasses import asdict, fields, is_dataclass
from types import FunctionType

import numpy as np

from noisewise.aggregation.methods import Method
from noisewise.data.examples import Examples
from noisewise.federation.prepared import Prepared
from noisewise.storage import to_json

__all__ = ["add_records", "fingerprint", "of_method", "server_fingerprint"]

_NOT_USER_CODE = ("builtins", "noisewise", "torch")


def fingerprint(prepared: Prepared) -> str:
    """SHA-256 of everything that decides a run's result."""
    method, loss, metric = prepared.method, prepared.loss, prepared.metric
    parts = {
        "specs": [asdict(c.spec) | {"reported": c.reported_epsilon} for c in prepared.clients],
        "plans": [asdict(plan) for plan in prepared.plans],
        "method": of_method(method),
        "attacks": [asdict(attack) for attack in prepared.attacks],
        "settings": asdict(prepared.settings),
        "seed": prepared.seed,
        "functions": [_without_address(loss), _without_address(metric)],
    }
    layers = {type(layer): None for layer in prepared.model.modules()}
    own_parts = (method.aggregator, loss, metric, *layers)
    if sources := [source for part in own_parts for source in _user_sources(part)]:
        parts["yours"] = sources
    digest = hashlib.sha256(to_json(parts).encode())
    digest.update(prepared.initial_parameters.cpu().numpy().tobytes())
    for client in prepared.clients:
        for examples in (client.data.train, client.data.test):
            add_records(digest, examples)
    return digest.hexdigest()


def server_fingerprint(method: Method, model: str) -> str:
    """SHA-256 of everything by which a server tells its run from others.

    Args:
        method: with its server steps, see `Method.with_server_steps`.
        model: names and shapes of the parameters.
    """
    return hashlib.sha256(json.dumps([*of_method(method), model]).encode()).hexdigest()


def of_method(method: Method) -> list[object]:
    """What distinguishes a method with its server steps from others; the same in every process."""
    settings: list[object] = [method.normalise, method.server_rate, method.average_rounds]
    if method.auto is not None:
        settings.append(repr(method.auto))
    if not method.shares_model:
        settings.append("shares no model")
    return [method.name, _without_address(method.aggregator), settings]


def add_records(digest: hashlib._Hash, examples: Examples) -> None:
    """Add records and their scaling to a hash."""
    # A view: tobytes() would copy all records.
    digest.update(np.ascontiguousarray(examples.inputs).reshape(-1).view(np.uint8).data)
    digest.update(examples.targets.tobytes())
    digest.update(repr(examples.scaling).encode())


def _user_sources(part: object) -> list[str]:
    """Source text and attributes of a user's own parts, also inside of a dataclass.

    Code that was typed into an interpreter has no source text: its name and attributes are used.
    """
    sources: list[str] = []
    kind = part if isinstance(part, (type, FunctionType)) else type(part)
    if kind.__module__.partition(".")[0] not in _NOT_USER_CODE:
        try:
            sources.append(inspect.getsource(kind))
        except (OSError, TypeError):
            sources.append(kind.__qualname__)
        if kind is not part:
            attributes = sorted(getattr(part, "__dict__", {}).items())
            sources += [f"{key} = {_stable_repr(value)}" for key, value in attributes]
    if is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            sources += _user_sources(getattr(part, field.name))
    return sources


def _stable_repr(value: object) -> str:
    """A repr that is the same in every process: the order of a set is not."""
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_without_address, value)))
    return _without_address(value)


def _without_address(thing: object) -> str:
    """The repr of an object without the memory address, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
