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
import torch
from torch import Tensor, nn

from noisewise.aggregation.methods import Method
from noisewise.data.examples import Examples
from noisewise.federation.prepared import Prepared
from noisewise.privacy.plan import LocalPlan
from noisewise.storage import to_json

__all__ = ["add_records", "fingerprint", "of_method", "server_fingerprint"]

_NOT_USER_CODE = ("builtins", "noisewise", "torch")


def fingerprint(prepared: Prepared, *, with_rounds: bool = False) -> str:
    """SHA-256 of everything that decides a run's result.

    Args:
        prepared: the run.
        with_rounds: include the number of rounds, as earlier versions did. Without it, a run can be
            extended: the rounds that are done do not depend on how many follow.
    """
    method, loss = prepared.method, prepared.task.loss
    scores = [metric.contributions for metric in prepared.task.metrics]
    settings = prepared.settings.described()
    if not with_rounds:
        del settings["rounds"]
    plans = {plan: _described(plan) for plan in dict.fromkeys(prepared.plans)}
    parts = {
        "specs": [
            _without_default_unit(vars(c.spec)) | {"reported": c.reported_epsilon}
            for c in prepared.clients
        ],
        "plans": [plans[plan] for plan in prepared.plans],
        "method": of_method(method),
        "attacks": [asdict(attack) for attack in prepared.attacks],
        "settings": settings,
        "seed": prepared.seed,
        "functions": [_without_address(part) for part in (loss, *scores)],
    }
    layers = {type(layer): None for layer in prepared.model.modules()}
    own_parts: tuple[object, ...] = (method.aggregator, loss, *scores, *layers)
    if prepared.stop_when is not None:
        parts["stop_when"] = _without_address(prepared.stop_when)
        own_parts = (*own_parts, prepared.stop_when)
    if sources := [source for part in own_parts for source in _user_sources(part)]:
        parts["yours"] = sources
    if layer_settings := _layer_settings(prepared.model):
        parts["layers"] = layer_settings
    digest = hashlib.sha256(to_json(parts).encode())
    digest.update(prepared.initial_parameters.cpu().numpy().tobytes())
    _add_fixed_tensors(digest, prepared.model)
    for client in prepared.clients:
        for examples in (client.data.train, client.data.test):
            add_records(digest, examples)
    return digest.hexdigest()


def _described(plan: LocalPlan) -> dict[str, object]:
    """The fields of a plan; older runs have no clipping rule and no unit."""
    fields = asdict(plan)
    if fields["clip_rule"] == "norm":
        del fields["clip_rule"]
    return _without_default_unit(fields)


def _without_default_unit(fields: dict[str, object]) -> dict[str, object]:
    """The fields of a plan or a spec, without the unit that older runs do not have."""
    default = {"unit": "record", "max_records": None}
    return {k: v for k, v in fields.items() if k not in default or v != default[k]}


def server_fingerprint(method: Method, model: str) -> str:
    """SHA-256 of everything that distinguishes a server's run from others.

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
    settings += [repr(part) for part in (method.schedule, method.optimiser) if part is not None]
    return [method.name, _without_address(method.aggregator), settings]


def add_records(digest: hashlib._Hash, examples: Examples) -> None:
    """Add records and their scaling to a hash."""
    for name, array in examples.named_inputs().items():
        if array is not examples.inputs:
            digest.update(name.encode())
        # A view: tobytes() would copy all records.
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    digest.update(examples.targets.tobytes())
    digest.update(repr(examples.scaling).encode())
    if examples.persons is not None:
        digest.update(b"persons" + examples.persons.tobytes())


def _add_fixed_tensors(digest: hashlib._Hash, model: nn.Module) -> None:
    """Add frozen parameters and buffers: another pretrained model is another run."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, tensor in model.state_dict().items():
        if name not in trained and isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            values = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(values.view(torch.uint8).numpy().data)


def _layer_settings(model: nn.Module) -> list[str]:
    """Numbers and words that the layers of other libraries hold, such as the scale of LoRA."""
    settings = []
    for name, layer in model.named_modules():
        if type(layer).__module__.partition(".")[0] in _NOT_USER_CODE:
            continue
        for key, value in sorted(vars(layer).items()):
            if not key.startswith("_") and key != "training" and _is_plain(value):
                settings.append(f"{name}.{key} = {value!r}")
    return settings


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


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
